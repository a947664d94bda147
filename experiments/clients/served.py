"""The servers that clients call: one at a time, started when a client needs it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from experiments.clients.catalogue import CHAT, TINY
from experiments.clients.models import first_layer
from jaxserve.folders import cache_folder

STARTS = 600  # seconds


class ServerError(Exception):
    """A server that did not start. The message says where its log is."""


class Servers:
    """The server that is called. `url` starts another where it is not the one that is asked for;
    `close` ends it."""

    def __init__(self, given: str | None, logs: Path):
        self._given = given
        self._logs = logs
        self._stack = contextlib.ExitStack()
        self._urls: dict[tuple[str, tuple[str, ...]], str] = {}

    def url(self, model: str, flags: tuple[str, ...]) -> str:
        """The address of a server of this model, without /v1. Errors: ServerError."""
        if self._given:
            return address(self._given)
        if (model, flags) not in self._urls:
            self._stack.close()  # one at a time, for memory
            started = serving(model, flags, self._logs)
            self._urls = {(model, flags): self._stack.enter_context(started)}
        return self._urls[model, flags]

    def close(self) -> None:
        self._stack.close()


@contextlib.contextmanager
def serving(model: str, flags: tuple[str, ...], logs: Path) -> Iterator[str]:
    """Serves a model by `jaxserve serve` on free ports; gives the address once it is ready."""
    log = logs / f"server-{model.replace(' ', '-')}.log"
    if model == TINY:
        model = str(first_layer(CHAT, cache_folder() / "clients" / "first-layer"))
    places = ("--port=0", "--grpc_port=0")
    with tempfile.TemporaryDirectory() as folder, log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxserve", "serve", model, *places, *flags],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"TMPDIR": folder},
        )
        try:
            yield _ready(process, log)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ready(process: subprocess.Popen[str], log: Path) -> str:
    """Waits until the server takes requests; returns the address that it prints."""
    assert process.stdout is not None
    addresses = (line.strip() for line in process.stdout)
    url = next((line for line in addresses if line.startswith("http://")), None)
    until = time.monotonic() + STARTS
    while url and process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(urllib.error.URLError):
            urllib.request.urlopen(f"{url}/ready", timeout=10).read()
            return url
        time.sleep(0.5)
    raise ServerError(f"the server did not start; see {log}")


def address(url: str) -> str:
    """A server's address as clients are given it, without /v1."""
    return url.rstrip("/").removesuffix("/v1")


def model_name(url: str) -> str:
    """The first model that a server lists."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        return json.load(answer)["data"][0]["id"]


def version(url: str) -> str:
    """The version that a server tells."""
    with urllib.request.urlopen(f"{url}/version", timeout=30) as answer:
        return json.load(answer)["version"]
