"""Starts a server in a process of its own, for commands that put load on one."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from jaxserve.cli.engine_flags import ALL, engine_config
from jaxserve.settings.schema import ConfigError

STOP_SECONDS = 60.0  # for the server to end after SIGTERM, its requests drained
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@dataclasses.dataclass(frozen=True)
class OwnServer:
    """A running server. grpc: address of its gRPC port; url: of its HTTP port."""

    pid: int
    grpc: str
    url: str


@contextlib.contextmanager
def own_server(values: Mapping[str, Any]) -> Iterator[OwnServer]:
    """Runs `jaxserve serve` on free ports within the block, with the engine's settings that are
    among the values.

    The block begins when the server takes requests. However the block ends, also by SIGTERM or
    SIGHUP to this process, the server is ended before this returns. Errors: ConfigError for
    settings that cannot be used, and where the server does not start.
    """
    from jaxserve.server.client import Client

    engine_config(values)  # a mistake is told by this process, under its own command's name
    flags = [flag(name, values[name]) for name in ALL if values[name] is not None]
    command = [sys.executable, "-m", "jaxserve", "serve", "--port=0", "--http_port=0", *flags]
    with signals_exit(), subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
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
            _end(process)


@contextlib.contextmanager
def signals_exit() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP raise SystemExit in the main thread, so that `finally`
    clauses run; without it they would end the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def leave(number: int, frame: FrameType | None) -> None:
        for each in ENDING_SIGNALS:  # a second signal does not cut the clean-up short
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


def flag(name: str, value: Any) -> str:
    """A setting as an argument: --name=value, --name or --noname."""
    return f"--{'' if value else 'no'}{name}" if isinstance(value, bool) else f"--{name}={value}"
