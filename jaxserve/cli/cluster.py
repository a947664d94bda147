"""`jaxserve cluster`: replicas and a conductor as processes of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxserve.cli.cluster_flags import TRANSFER, check_transfer
from jaxserve.cli.conductor import COMMAND as CONDUCTOR
from jaxserve.cli.conductor import SETTINGS
from jaxserve.cli.engine_flags import SERVER, engine_config, engine_groups, server_config
from jaxserve.cli.gpus import DEVICES, visible_gpus
from jaxserve.cli.own_server import flag
from jaxserve.group.channel import lasting_ports
from jaxserve.group.cluster import ProcessSet, Task
from jaxserve.group.own_code import own_command
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError
from jaxserve.settings.schema.engine import SERVED
from jaxserve.settings.sources import PREFIX
from jaxserve.transfer.plane import TCP

ABOUT = """\
Starts replicas (`jaxserve serve`) and a conductor on this machine, restarts them when they end,
and ends them all at SIGTERM and Ctrl-C: for trying out, for tests, for one big machine. Clients use
--grpc_port and --port, which are the conductor's; the replicas listen on free ports of loopback.
Without --prefill, --decode and --mixed there are two replicas that do both. On machines with GPUs
each replica gets as many as --mesh has, in the order of CUDA_VISIBLE_DEVICES. Replicas that only
prefill or decode have 1 GiB of host memory for KV, where --host_cache_gib says nothing else.

  jaxserve cluster --mixed=2 --model=smollm2-135m
  jaxserve cluster --prefill=2 --decode=2 --model=smollm2-135m
"""
MAX_REPLICAS = 64  # on one machine
OPTIONS = [
    Option("prefill", int, 0, "replicas that prefill", low=0, high=MAX_REPLICAS),
    Option("decode", int, 0, "replicas that decode", low=0, high=MAX_REPLICAS),
    Option(
        "mixed",
        int,
        None,
        "replicas that do both; default: 2, or 0 beside others",
        low=0,
        high=MAX_REPLICAS,
    ),
    *(CONDUCTOR.options[name] for name in SETTINGS),
    TRANSFER,
    Option(
        "port_file",
        str,
        None,
        "file that tells clients' addresses as JSON, grpc and http, once they can connect; removed "
        "at the end",
    ),
]
ROLE_CACHE_GIB = 1.0  # host memory for KV of a replica with a role, where none is configured
SECRET_VARIABLE = "JAXSERVE_CLUSTER_SECRET"
KEYS = "api_key"
OF_CLUSTER = {option.name for option in OPTIONS} | {"config", "print_config", "role"}
NOT_PASSED = {"models", "replicas", "replicas_file", "cluster_ca", "config", "print_config"}
# a replica's own; the rest of the server's settings are the conductor's
OF_REPLICA = {"log_format", "log_level", "drain_timeout", "max_message_mib"}
OF_SERVER = {option.name for option in SERVER["server"]} - OF_REPLICA


def run(values: dict[str, Any]) -> int:
    engine_config(values)
    check_transfer(values["transfer"], server_config(values))
    roles = _roles(values)
    local = fixed_ports(values)
    ports = replica_ports(len(roles), local)
    devices = _devices(values, roles)
    tasks = [
        _replica(number, role, port, _with_host_memory(role, values), variables)
        for number, (role, port, variables) in enumerate(zip(roles, ports, devices))
    ]
    tasks.append(_conductor(local, ports))
    environment = {name: text for name, text in os.environ.items() if name != "JAXSERVE_CONFIG"}
    environment.setdefault(SECRET_VARIABLE, secrets.token_hex(32))
    with _port_file(local) as poll:
        processes = ProcessSet(tasks, environment, values["drain_timeout"], _say, poll)
        return processes.run()


def fixed_ports(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings with ports in place of those that may be any: a server keeps them when
    it restarts."""
    fixed = dict(values)
    for name, port in zip(("grpc_port", "port"), lasting_ports(2, values["host"])):
        if fixed[name] == 0:
            fixed[name] = port
    return fixed


def replica_ports(count: int, front: Mapping[str, Any]) -> list[int]:
    """Returns free ports of loopback for replicas. front: settings of what has the users' ports."""
    taken = (front["grpc_port"], front["port"])
    free = lasting_ports(count + len(taken), "127.0.0.1")
    return [port for port in free if port not in taken][:count]


def _say(text: str) -> None:
    print(f"cluster: {text}", file=sys.stderr, flush=True)


def _roles(values: Mapping[str, Any]) -> list[str]:
    """The role of each replica. Errors: ConfigError."""
    prefill, decode, mixed = (values[name] for name in ("prefill", "decode", "mixed"))
    if mixed is None:
        mixed = 0 if prefill or decode else 2
    if not mixed and not (prefill and decode):
        name = "decode" if prefill else "prefill"
        raise ConfigError(name, "is 0: requests need replicas that prefill and that decode")
    if prefill + decode + mixed > MAX_REPLICAS:
        raise ConfigError("mixed", f"more than {MAX_REPLICAS} replicas on one machine")
    return ["prefill"] * prefill + ["decode"] * decode + ["mixed"] * mixed


def _devices(values: Mapping[str, Any], roles: list[str]) -> list[Mapping[str, str]]:
    """Variables that give each replica its GPUs; none where there are none. Errors: ConfigError."""
    gpus = visible_gpus()
    if not gpus:
        return [{} for _ in roles]
    each = engine_config(values).mesh.devices
    if len(gpus) < each * len(roles):
        raise ConfigError(
            "mesh", f"{len(roles)} replicas of {each} GPUs each; there are {len(gpus)}"
        )
    shares = (gpus[number * each : (number + 1) * each] for number in range(len(roles)))
    return [{DEVICES: ",".join(share)} for share in shares]


def _replica(
    number: int, role: str, port: int, values: Mapping[str, Any], environment: Mapping[str, str]
) -> Task:
    given = COMMAND.options.keys() - OF_CLUSTER - OF_SERVER
    flags = setting_flags(COMMAND, in_own_folder(number, values), given)
    fixed = ["--grpc_port=0", "--port=0", f"--replica_port={port}", f"--role={role}"]
    fixed.append(f"--transfer={values['transfer']}")
    if values["transfer"] != TCP:
        fixed.append("--insecure")
    command = own_command("jaxserve", "serve", *fixed, *flags)
    return Task(f"replica {number}", command, 1, {**environment, **own_key()})


def _with_host_memory(role: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a replica with this role: KV goes from one to another by host memory."""
    if role == "mixed" or values["host_cache_gib"] or not values["prefix_caching"]:
        return values
    return {**values, "host_cache_gib": ROLE_CACHE_GIB}


def in_own_folder(number: int, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a replica, whose blocks on disk are in a folder of its own."""
    disk = engine_config(values).cache.disk_folder
    if disk is None:
        return values
    folder, gib = disk
    return {**values, "disk_cache": f"{folder / f'replica-{number}'}:{gib:g}"}


def _conductor(values: Mapping[str, Any], ports: list[int]) -> Task:
    given = CONDUCTOR.options.keys() - NOT_PASSED - {"replica_port", KEYS}
    flags = setting_flags(CONDUCTOR, values, given)
    replicas = ",".join(f"127.0.0.1:{port}" for port in ports)
    command = own_command("jaxserve", "conductor", f"--replicas={replicas}", *flags)
    return Task("conductor", command, 0, users_keys(values))


def users_keys(values: Mapping[str, Any]) -> dict[str, str]:
    """The API keys among the settings, as a variable of a conductor: `ps` shows flags."""
    if not values[KEYS]:
        return {}
    return {f"{PREFIX}{KEYS.upper()}": json.dumps(list(values[KEYS]))}


def own_key() -> dict[str, str]:
    """A new API key of a replica, as a variable: no user has it, their requests come by the
    conductor."""
    return {f"{PREFIX}{KEYS.upper()}": secrets.token_hex(32)}


def setting_flags(command: Command, values: Mapping[str, Any], given: Collection[str]) -> list[str]:
    """The settings of a command among these values, as arguments. given: names of those to pass."""
    settings = {name: values.get(name) for name in command.options if name in given}
    several = {name: v if isinstance(v, (list, tuple)) else (v,) for name, v in settings.items()}
    return [flag(name, v) for name, vs in several.items() for v in vs if v is not None]


@contextlib.contextmanager
def _port_file(values: Mapping[str, Any]) -> Iterator[Callable[[], None]]:
    """Gives what writes the file once clients can connect; removes it at the end."""
    if values["port_file"] is None:
        yield lambda: None
        return
    file = Path(values["port_file"])
    file.unlink(missing_ok=True)
    text = json.dumps(_addresses(values)) + "\n"

    def poll() -> None:
        if not file.exists() and _listens(values):
            part = file.with_name(f".{file.name}.{os.getpid()}")
            part.write_text(text)
            os.replace(part, file)

    try:
        yield poll
    finally:
        file.unlink(missing_ok=True)


def _addresses(values: Mapping[str, Any]) -> dict[str, str]:
    host = f"[{values['host']}]" if ":" in values["host"] else values["host"]
    scheme = "http" if values["tls_cert"] is None else "https"
    addresses = {"grpc": f"{host}:{values['grpc_port']}"}
    if values["port"] is not None:
        addresses["http"] = f"{scheme}://{host}:{values['port']}"
    return addresses


def _listens(values: Mapping[str, Any]) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((values["host"], values["grpc_port"]), 0.2).close()
        return True
    return False


COMMAND = Command(
    {"cluster": OPTIONS, **SERVER, **engine_groups(**SERVED)}, run, ABOUT, argument="[MODEL]"
)
