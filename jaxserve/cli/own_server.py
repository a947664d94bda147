"""Starts a server in a process of its own, for commands that put load on one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

from jaxserve.cli.engine_flags import ALL, engine_config
from jaxserve.group.own_code import own_command
from jaxserve.settings.schema import ConfigError

DATA_SECONDS = 20.0  # for a server to tell what the live page shows
STOP_SECONDS = 60.0  # for the server to end after SIGTERM, its requests drained
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@dataclasses.dataclass(frozen=True)
class OwnServer:
    """A running server. grpc: address of its gRPC port; url: of its HTTP port."""

    pid: int
    grpc: str
    url: str


class StartingServer:
    """A server that was started and may not take requests yet."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process

    def ready(self, waiting: Callable[[], object] = lambda: None) -> OwnServer:
        """Waits until it takes requests. waiting: called a few times a second meanwhile. Errors:
        ConfigError where it does not start."""
        from jaxserve.server.client import Client

        process = self._process
        assert process.stdout is not None
        target, url = (process.stdout.readline().strip() for _ in range(2))
        if not url:
            raise ConfigError("model", "the server did not start")
        with Client(target) as client:
            while not client.healthy():
                if process.poll() is not None:
                    raise ConfigError("model", "the server did not start")
                waiting()
                time.sleep(0.1)
        return OwnServer(process.pid, target, url)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the process within the block, so that others have the machine to themselves."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def own_server(values: Mapping[str, Any]) -> Iterator[OwnServer]:
    """Runs `jaxserve serve` on free ports within the block, which begins when the server takes
    requests; else as `starting_server`."""
    with starting_server(values) as starting:
        yield starting.ready()


@contextlib.contextmanager
def starting_server(
    values: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> Iterator[StartingServer]:
    """Runs `jaxserve serve` on free ports within the block, with the engine's settings that are
    among the values. environment: variables beside those of this process.

    However the block ends, also by SIGTERM or SIGHUP to this process, the server is ended before
    this returns. Errors: ConfigError for settings that cannot be used.
    """
    engine_config(values)  # this process reports a mistake, under its own command's name
    flags = [flag(name, values[name]) for name in ALL if values[name] not in (None, (), [])]
    command = own_command("jaxserve", "serve", "--grpc_port=0", "--port=0", *flags)
    variables = {**os.environ, **(environment or {})}
    with SignalsExit() as signals:
        # a group of its own: Ctrl-C is for this process, which ends the server
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=variables, process_group=0
        )
        try:
            signals.arm()
            yield StartingServer(process)
        finally:
            _end(process)


class SignalsExit:
    """Makes SIGTERM and SIGHUP raise SystemExit in the main thread from `arm()` on, so that
    `finally` clauses run; a signal that comes before is kept until then."""

    def __init__(self) -> None:
        self._armed = False
        self._received: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SignalsExit:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            self._before = {each: signal.signal(each, self._handle) for each in ENDING_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def arm(self) -> None:
        self._armed = True
        self._exit()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:  # a second one does not cut the clean-up short
            self._received = number
            if self._armed:
                self._exit()

    def _exit(self) -> None:
        if self._received is not None:
            raise SystemExit(128 + self._received)


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
    finally:
        if process.stdout is not None:
            process.stdout.close()


def flag(name: str, value: Any) -> str:
    """A setting as an argument: --name=value, --name or --noname."""
    if isinstance(value, bool):
        return f"--{'' if value else 'no'}{name}"
    return f"--{name}={json.dumps(value) if isinstance(value, (tuple, list)) else value}"


def cpu_devices(devices: int) -> dict[str, str]:
    """Returns the environment of a server with this number of devices, all of them CPUs."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "JAXSERVE_LOG_LEVEL": "warning"}


def page_data(url: str) -> dict[str, Any]:
    """Returns what the live page of a server shows. url: of its HTTP port. Empty where it cannot be
    had."""
    try:
        with urllib.request.urlopen(f"{url}/page/data", timeout=DATA_SECONDS) as data:
            return json.load(data)
    except (OSError, ValueError):
        return {}
