"""Runs the calls of one client, and writes what became of each as a line of JSON.

A program declares its calls with `@call` and ends with `main("package", ...)`. It runs in the
client's own environment, so this file needs nothing but the standard library.

Environment: CHECK_URL (the server, without /v1), CHECK_MODEL, CHECK_RESULTS (the file to write),
CHECK_TOKENIZER (a folder with the model's tokenizer in the form of Hugging Face).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

URL = os.environ["CHECK_URL"]
BASE = f"{URL}/v1"
MODEL = os.environ["CHECK_MODEL"]
TOKENIZER = os.environ["CHECK_TOKENIZER"]
KEY = "none"
SECONDS = 180  # for each call
REASON = 400  # most characters of why a call failed

_calls: list[Callable[[], Any]] = []


def call(function: Callable[[], Any]) -> Callable[[], Any]:
    """Declares a call: a function, async or not, that raises where the client does not get what its
    users rely on."""
    _calls.append(function)
    return function


def main(*packages: str) -> None:
    """Runs all calls in order. packages: whose versions are given."""
    write(versions={name: metadata.version(name) for name in packages})
    signal.signal(signal.SIGALRM, _late)
    for function in _calls:
        _run(function)


def command(program: str, *arguments: str, **environment: str) -> str:
    """Runs a program of this environment; returns its output. Errors: AssertionError with the end
    of what it wrote to standard error."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / program), *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    print(done.stdout, done.stderr, sep="\n", flush=True)
    said = (done.stderr or done.stdout)[-REASON:]
    assert not done.returncode, f"exit code {done.returncode}: {said}"
    return done.stdout


def running_server(program: str, *arguments: str, ready: str) -> str:
    """Starts a server of this environment on a free port, which its flag --port gets; returns its
    address once it answers at the path `ready`. The runner ends it. Errors: TimeoutError."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = str(Path(sys.executable).parent / program)
    process = subprocess.Popen([place, *arguments, "--port", str(port)])
    address = f"http://127.0.0.1:{port}"
    until = time.monotonic() + SECONDS
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{address}{ready}", timeout=10).read()
            return address
        time.sleep(0.5)
    raise TimeoutError(f"{program} did not start in {SECONDS} s")


def scratch() -> str:
    """A fresh folder, which goes when the runner ends."""
    return tempfile.mkdtemp(dir=Path(os.environ["CHECK_RESULTS"]).parent)


def write(**fields: Any) -> None:
    """Appends a line to the results."""
    with Path(os.environ["CHECK_RESULTS"]).open("a") as file:
        file.write(json.dumps(fields) + "\n")


def tell(name: str, reason: str | None, seconds: float = 0) -> None:
    """Writes a call's outcome. reason: why it failed; None where it did not."""
    write(call=name, reason=reason and reason[:REASON], seconds=round(seconds, 1))


def _run(function: Callable[[], Any]) -> None:
    began = time.monotonic()
    reason = None
    signal.alarm(SECONDS)
    try:
        result = function()
        if inspect.isawaitable(result):
            asyncio.run(_awaited(result))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        traceback.print_exc()
        reason = _reason(error)
    finally:
        signal.alarm(0)
    tell(function.__name__, reason, time.monotonic() - began)


async def _awaited(result: Any) -> None:
    await result


def _late(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"no answer in {SECONDS} s")


def _reason(error: BaseException) -> str:
    """The error's type and message; for an assertion, the line that failed and the message."""
    said = " ".join(str(error).split())
    if not isinstance(error, AssertionError):
        return f"{type(error).__name__}: {said}"
    program = str(Path(sys.argv[0]).resolve())
    lines = [
        frame.line
        for frame in traceback.extract_tb(error.__traceback__)
        if str(Path(frame.filename).resolve()) == program
    ]
    return f"{lines[-1] if lines else 'assert'}: {said}".removesuffix(": ")
