"""The checks of `jaxserve doctor` that need no JAX: the machine, ports, folders, files."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import shutil
import socket
import stat
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from jaxserve.folders import cache_folder
from jaxserve.settings.schema import EngineConfig, ServerConfig

OK = "ok"
WARNING = "warning"
FAULT = "fault"
PYTHON = 3, 11
NEEDED = {"jax": (0, 10, 2), "jaxlib": (0, 10, 2)}
# bytes free for compiled programs and models: fewer are a warning, a fault
DISK = 2 * 2**30, 100 * 2**20
FILES = 4096  # descriptors: fewer are a warning


@dataclasses.dataclass(frozen=True)
class Check:
    """A subject that was checked, its state, and what to do if it is not well."""

    name: str
    state: str
    said: str
    advice: str = ""

    @classmethod
    def of(cls, name: str, state: str, said: str, advice: str) -> Check:
        """Returns a check with advice only if it is not well."""
        if state == OK:
            advice = ""
        return cls(name, state, said, advice)


def state_of(amount: float, ample: float, enough: float) -> str:
    """Returns the state of an amount: OK if ample, FAULT if not enough."""
    if amount >= ample:
        return OK
    return WARNING if amount >= enough else FAULT


def python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    state = state_of(sys.version_info >= PYTHON, True, True)
    return Check.of("python", state, version, "install Python 3.11 or later")


def libraries() -> Iterator[Check]:
    for name, least in NEEDED.items():
        needed = ".".join(map(str, least))
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Check(name, FAULT, "is not installed", f"pip install '{name}>={needed}'")
            continue
        numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
        if numbers >= least:
            yield Check(name, OK, version)
            continue
        text = f"{version} is older than {needed}"
        yield Check(name, FAULT, text, f"pip install --upgrade '{name}>={needed}'")


def ports(config: ServerConfig) -> Iterator[Check]:
    """Every port that the server will listen on."""
    for field in dataclasses.fields(config):
        port = getattr(config, field.name)
        if (field.name == "port" or field.name.endswith("_port")) and port is not None:
            yield _port(field.name, config.host.strip("[]"), port)


def _port(name: str, host: str, port: int) -> Check:
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        text = f"cannot listen on {host}:{port}: {error.strerror}"
        return Check(name, FAULT, text, f"end what listens there, or choose another --{name}")
    return Check(name, OK, f"{host}:{port} is free" if port else "a free one is taken")


def folders(config: EngineConfig) -> Iterator[Check]:
    """Checks the folder of models, profiles and compiled programs."""
    root = cache_folder()
    advice = "or set JAXSERVE_CACHE to a folder of your own"
    for name in ("models", "profiles"):
        yield _kept(name, (root, root / name), advice)
    if config.compile_cache != "":
        named = (Path(config.compile_cache),) if config.compile_cache else (root, root / "xla")
        yield _kept("compile cache", named, "or name another folder with --compile_cache")
    yield _disk(root)


def _kept(name: str, folders: tuple[Path, ...], advice: str) -> Check:
    """The last of these folders, each in the one before, by the rules of `private_folder`;
    none is made."""
    last = folders[-1]
    existing = next(path for path in (last, *last.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Check(name, FAULT, f"{last} cannot be written to", advice)
    for folder in filter(Path.exists, folders):
        info = folder.stat()
        if info.st_uid not in (0, os.geteuid()) or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return Check(
                name,
                FAULT,
                f"{folder} belongs to another user or can be written by others, who could have "
                "code run here",
                f"chmod go-w {folder}, after a look at what is in it; {advice}",
            )
    return Check(name, OK, str(last) + ("" if existing == last else " (will be made)"))


def _disk(folder: Path) -> Check:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    text = f"{free / 2**30:.1f} GiB free for {folder}"
    advice = "make room, or move the cache with JAXSERVE_CACHE"
    return Check.of("disk", state_of(free, *DISK), text, advice)


def descriptors() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return Check("open files", OK, "at most any number")
    if soft >= FILES:
        return Check("open files", OK, f"at most {soft}")
    return Check(
        "open files",
        WARNING,
        f"at most {soft}, and each client has one",
        f"ulimit -n {max(FILES, min(hard, 65536))}",
    )


def memory_available() -> int:
    """Bytes of RAM that this process may still take: of the machine, and of its control group where
    that has a limit."""
    amounts = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        amounts += [
            int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")
        ]
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        amounts.append(
            int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        )
    return min(amounts)
