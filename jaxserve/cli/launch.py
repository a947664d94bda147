"""`jaxserve launch`: a command as a group of processes, with a supervisor that restarts them."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxserve.files import write_whole
from jaxserve.folders import cache_folder, private_folder
from jaxserve.group.channel import free_port
from jaxserve.group.environment import PORT, Place, place_of
from jaxserve.group.handshake import Certificate
from jaxserve.group.member import LEADER, MIN_SECRET, SECRET_VARIABLE, Member, checked_secret
from jaxserve.group.own_code import own_command
from jaxserve.group.supervisor import Supervisor
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError

SECRET_SECONDS = 60.0  # for the first host to write the group's secret
ABOUT = """\
COMMAND is one of jaxserve (serve, generate, bench ...) or any other, such as python script.py, in
which LLM(...) is made. It runs once, as the leader, which has no devices; beside it run the
workers, each with its share of the devices of --mesh. Stages go across hosts, lanes where they fit;
the ranks of a lane stay on one.

On several hosts start the same line on each: with --hosts, with srun (one task per node), with
mpirun, or as the pods of a LeaderWorkerSet; the last three need no --hosts. All of them must know
the same JAXSERVE_GROUP_SECRET; under Slurm and Open MPI, where hosts share the cache folder, it is
made there.

When a worker ends or hangs, all workers restart and the leader goes on: --replay of COMMAND says
which requests begin again. SIGTERM lets running requests finish.

  jaxserve launch --processes=2 -- serve --mesh=spp=2,kvp=2,tp=3
  srun -N2 --ntasks-per-node=1 jaxserve launch -- serve --mesh=spp=2,tp=8 --dtype=bfloat16
"""
OPTIONS = [
    Option("processes", int, 1, "workers on each host", low=1, high=4096),
    Option("hosts", str, None, "all hosts of the group, the leader's first: A,B,..."),
    Option(
        "group_port", int, None, f"where the leader listens for workers; on several hosts {PORT}"
    ),
    Option("tls_cert", str, "", "PEM file: what leader and workers say is encrypted with it"),
    Option("tls_key", str, "", "PEM file with its key"),
    Option("ranks_across_hosts", bool, False, "let the ranks of a lane be on several hosts"),
]


def run(values: dict[str, Any]) -> int:
    place = _place(values)
    _check_certificate(values, place)
    members = members_of(values, place)
    say = lambda text: print(f"launch: {text}", file=sys.stderr, flush=True)
    if place.source:
        say(f"{place.source}: number {place.index} of {place.count}, leader on {place.leader}")
    command = command_of(values["command"])
    with group_secret(place) as secret:
        environment = {**os.environ, SECRET_VARIABLE: secret}
        try:
            return Supervisor(members, command, environment, say).run()
        except OSError as error:
            raise ConfigError("command", f"{command[0]}: {error.strerror}") from None


def _check_certificate(values: dict[str, Any], place: Place) -> None:
    """Refuses a certificate that the leader could not use. Workers need to know only that there is
    one. Errors: ConfigError."""
    certificate, key = values["tls_cert"], values["tls_key"]
    if bool(certificate) != bool(key):
        raise ConfigError("tls_cert" if certificate else "tls_key", "tls_cert needs tls_key too")
    if not certificate or place.index > 0:
        return
    for field in ("tls_cert", "tls_key"):
        if not os.access(values[field], os.R_OK):
            raise ConfigError(field, f"{values[field]}: no such file, or it cannot be read")
    Certificate.given(certificate, key)


def _place(values: dict[str, Any]) -> Place:
    """Returns the place of this host in the group. Errors: ConfigError."""
    if values["hosts"]:
        hosts = [host.strip() for host in values["hosts"].split(",")]
        if "" in hosts:
            raise ConfigError("hosts", f"{values['hosts']!r} is not a list of hosts")
        places = [number for number, host in enumerate(hosts) if _is_here(host)]
        if len(places) != 1:
            raise ConfigError(
                "hosts",
                f"{values['hosts']}: {len(places)} of them are this machine "
                f"({socket.gethostname()})",
            )
        return Place(places[0], len(hosts), hosts[0], source="--hosts")
    place = place_of(os.environ) or Place(0, 1, "127.0.0.1")
    if not place.leader:
        raise ConfigError("hosts", f"{place.source} does not tell the first host: give --hosts")
    return place


def _is_here(host: str) -> bool:
    if host.split(".")[0] == socket.gethostname().split(".")[0]:
        return True
    try:
        address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0]
        with socket.socket(socket.AF_INET6 if ":" in str(address) else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except (OSError, UnicodeError):  # the latter for what cannot be a host's name
        return False
    return True


def members_of(values: dict[str, Any], place: Place) -> list[Member]:
    """Returns the members that this call starts; the first call has the leader."""
    each = values["processes"]
    port = values["group_port"] or (PORT if place.count > 1 else free_port("127.0.0.1"))
    common = {
        "workers": place.count * each,
        "host": place.leader,
        "port": port,
        "ranks_across_hosts": values["ranks_across_hosts"],
        "tls_cert": values["tls_cert"],
        "tls_key": values["tls_key"],
    }
    workers = [
        Member(place.index * each + number, local=place.local * each + number, **common)
        for number in range(each)
    ]
    if place.index > 0:
        return workers
    return [Member(LEADER, **common), *workers]


@contextlib.contextmanager
def group_secret(place: Place) -> Iterator[str]:
    """Gives the group's secret: on one machine a new one, for a job on several machines the one in
    the cache folder, which the first host writes, and removes when its command has ended. Errors:
    ConfigError."""
    secret = os.environ.get(SECRET_VARIABLE)
    if secret:
        yield checked_secret(secret)
        return
    if place.count == 1:
        yield secrets.token_hex(32)
        return
    if not place.job:
        raise ConfigError(
            "secret",
            f"{SECRET_VARIABLE} must be set, to the same text of at least {MIN_SECRET} characters "
            "on all hosts",
        )
    file = private_folder(cache_folder() / "groups", "secret") / place.job
    if place.index > 0:
        yield _awaited(file)
        return
    if not file.exists():
        write_whole(file, secrets.token_hex(32))
    try:
        yield file.read_text()
    finally:
        file.unlink(missing_ok=True)


def _awaited(file: Path) -> str:
    """Waits for a file and returns its text. Errors: ConfigError if it is not written in time."""
    deadline = time.monotonic() + SECRET_SECONDS
    while True:
        with contextlib.suppress(FileNotFoundError):
            return file.read_text()
        if time.monotonic() > deadline:
            raise ConfigError(
                "secret",
                f"{file} was not written by the first host: share the cache folder "
                f"(JAXSERVE_CACHE), or set {SECRET_VARIABLE} on all hosts",
            )
        time.sleep(0.2)


def command_of(words: list[str]) -> list[str]:
    """Returns how Python runs one of our commands; others as they are."""
    from jaxserve.cli.main import COMMANDS

    names = {words[0], " ".join(words[:2])}
    return own_command("jaxserve", *words) if names & set(COMMANDS) else words


COMMAND = Command({"group": OPTIONS}, run, ABOUT, "COMMAND...")
