"""The servers that clients call: one for each model, started when the first client needs it."""

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

LENGTH = 4096  # tokens: agents' prompts fit, and a text without an end ends in minutes
STARTS = 600  # seconds


class ServerError(Exception):
    """A server that did not start. The message says where its log is."""


class Servers:
    """Servers by model. `url` starts one where none runs; `close` ends all that were started."""

    def __init__(self, given: str | None, logs: Path):
        self._given = given
        self._logs = logs
        self._stack = contextlib.ExitStack()
        self._urls: dict[str, str] = {}

    def url(self, model: str) -> str:
        """The address of a server of this model, without /v1. Errors: ServerError."""
        if self._given:
            return self._given.rstrip("/").removesuffix("/v1")
        if model not in self._urls:
            self._stack.close()  # one at a time, for memory
            self._urls = {model: self._stack.enter_context(serving(model, self._logs))}
        return self._urls[model]

    def close(self) -> None:
        self._stack.close()


@contextlib.contextmanager
def serving(model: str, logs: Path) -> Iterator[str]:
    """Serves a model by `jaxserve serve` on free ports; gives the address once it is ready."""
    log = logs / f"server-{model.replace(':', '-')}.log"
    flags = ["--port=0", "--grpc_port=0", f"--max_model_len={LENGTH}"]
    with tempfile.TemporaryDirectory() as folder, log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxserve", "serve", model, *flags],
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


def model_name(url: str) -> str:
    """The first model that a server lists."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        return json.load(answer)["data"][0]["id"]
