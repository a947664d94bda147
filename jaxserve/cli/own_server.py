"""A server of one's own, in a process of its own, for commands that put load on one."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from jaxserve.cli.settings import ALL, engine_config
from jaxserve.settings.schema import ConfigError

STOP_SECONDS = 60.0  # that it has to end, drained


@dataclasses.dataclass(frozen=True)
class OwnServer:
    """grpc: its address; url: of the HTTP port."""

    pid: int
    grpc: str
    url: str


@contextlib.contextmanager
def own_server(values: Mapping[str, Any]) -> Iterator[OwnServer]:
    """`jaxserve serve` with the engine's settings that are among the values, on free ports, once it
    takes requests; it ends with the block.

    Errors: ConfigError for settings that cannot be used, and where the server does not start.
    """
    from jaxserve.server.client import Client

    engine_config(values)  # so that a mistake is ours to tell
    flags = [flag(name, values[name]) for name in ALL if values[name] is not None]
    command = [sys.executable, "-m", "jaxserve", "serve", "--port=0", "--http_port=0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        target, url = (process.stdout.readline().strip() for _ in range(2))
        if not url:
            raise ConfigError("model", "the server did not start")
        with Client(target) as client:
            while not client.healthy():
                if process.poll() is not None:
                    raise ConfigError("model", "the server did not start")
                time.sleep(0.1)
        yield OwnServer(process.pid, target, url)
    finally:
        process.terminate()
        process.wait(timeout=STOP_SECONDS)


def flag(name: str, value: Any) -> str:
    return f"--{'' if value else 'no'}{name}" if isinstance(value, bool) else f"--{name}={value}"
