"""The checks of `jaxserve doctor` that need no JAX: the machine, ports, folders, files."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import shutil
import socket
import ssl
import stat
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.source import cache_folder

OK, WARNING, FAULT = "ok", "warning", "fault"
PYTHON = 3, 11
NEEDED = {"jax": (0, 10, 2), "jaxlib": (0, 10, 2)}
DISK = 2 * 2**30, 100 * 2**20                           # bytes free for compiled programs and models: fewer are a warning, a fault
FILES = 4096                                            # descriptors: fewer are a warning
SECRET = ("tls_key", "api_keys")                        # files that others should not read


@dataclasses.dataclass(frozen=True)
class Check:
    """What was looked at, how it is, and where it is not well what to do."""

    name: str
    state: str
    said: str
    advice: str = ""


def python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", OK, version) if sys.version_info >= PYTHON else Check("python", FAULT, version, "install Python 3.11 or later")


def libraries() -> Iterator[Check]:
    for name, least in NEEDED.items():
        needed = ".".join(map(str, least))
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Check(name, FAULT, "is not installed", f"pip install '{name}>={needed}'")
            continue
        numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
        old = Check(name, FAULT, f"{found} is older than {needed}", f"pip install --upgrade '{name}>={needed}'")
        yield Check(name, OK, found) if numbers >= least else old


def ports(config: ServerConfig) -> Iterator[Check]:
    """Every port that the server will listen on."""
    for field in dataclasses.fields(config):
        port = getattr(config, field.name)
        if (field.name == "port" or field.name.endswith("_port")) and port is not None:
            yield _port(field.name, config.host.strip("[]"), port)


def _port(name: str, host: str, port: int) -> Check:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        said = f"cannot listen on {host}:{port}: {error.strerror}"
        return Check(name, FAULT, said, f"end what listens there, or choose another --{name}")
    return Check(name, OK, f"{host}:{port} is free" if port else "a free one is taken")


def folders(config: EngineConfig) -> Iterator[Check]:
    """Where models, profiles and compiled programs are kept."""
    root = cache_folder()
    yield _writable("cache", root, "set JAXSERVE_CACHE to a folder that you may write to")
    if config.compile_cache != "":
        yield _programs(Path(config.compile_cache) if config.compile_cache else root / "xla")
    yield _disk(root)


def _writable(name: str, folder: Path, advice: str) -> Check:
    there = _existing(folder)
    if not os.access(there, os.W_OK | os.X_OK) or not there.is_dir():
        return Check(name, FAULT, f"{folder} cannot be written to", advice)
    return Check(name, OK, str(folder) + ("" if there == folder else " (will be made)"))


def _programs(folder: Path) -> Check:
    name = "compile cache"
    found = _writable(name, folder, "name another folder with --compile_cache")
    if found.state != OK or not folder.exists():
        return found
    info = folder.stat()
    if info.st_uid != os.getuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return Check(name, FAULT, f"{folder} belongs to another user or can be written by others, who could have code run here",
                     f"chmod 700 {folder}, after a look at what is in it")
    return found


def _disk(folder: Path) -> Check:
    free = shutil.disk_usage(_existing(folder)).free
    said = f"{free / 2**30:.1f} GiB free for {folder}"
    state = OK if free >= DISK[0] else WARNING if free >= DISK[1] else FAULT
    return Check("disk", state, said, "" if state == OK else "make room, or move the cache with JAXSERVE_CACHE")


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def descriptors() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= FILES:
        return Check("open files", OK, f"at most {'any number' if soft == resource.RLIM_INFINITY else soft}")
    return Check("open files", WARNING, f"at most {soft}, and each client has one", f"ulimit -n {max(FILES, min(hard, 65536))}")


def security(config: ServerConfig) -> Iterator[Check]:
    """The files of keys and certificates that are named."""
    named = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)
             if field.name == "api_keys" or field.name.startswith("tls_")}
    for name, file in named.items():
        if isinstance(file, str):
            yield _readable(name, Path(file))
    if isinstance(cert := named.get("tls_cert"), str):
        yield _certificate(cert, named.get("tls_key"))


def _readable(name: str, file: Path) -> Check:
    try:
        with open(file, "rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
    except OSError as error:
        return Check(name, FAULT, f"{file}: {error.strerror}", f"name a file that this user can read with --{name}")
    if name in SECRET and mode & (stat.S_IRGRP | stat.S_IROTH):
        return Check(name, WARNING, f"{file} can be read by others", f"chmod 600 {file}")
    return Check(name, OK, str(file))


def _certificate(cert: str, key: object) -> Check:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key if isinstance(key, str) else None, password="")
    except (OSError, ssl.SSLError) as error:
        return Check("certificate", FAULT, f"{cert} and its key cannot be used: {error}", "name a PEM chain and its key, without password")
    return Check("certificate", OK, "the certificate and its key belong together")


def memory_available() -> int:
    """Bytes of RAM that this process may still take: of the machine, and of its control group where that has a limit."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        found.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return min(found)
