"""Weights that stay quantised beside the same weights in f32, and beside llama.cpp, in one run.

    python -m experiments.benchmarks.kept_weights --file=model-Q8_0.gguf --json=kept_weights.json

Every engine lives in a process of its own, and they take turns as in `side_by_side`. Memory is what
a process holds by itself (RssAnon) before the first measurement.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
from pathlib import Path
from typing import Any

from experiments.benchmarks import engines
from experiments.benchmarks.comparison import Comparison
from experiments.benchmarks.engines import Engine, EngineError, Worker
from experiments.benchmarks.side_by_side import Conditions, measured
from experiments.script import command_line, keep
from jaxserve.folders import cache_folder
from jaxserve.lab.cli.bench.engine import counts
from jaxserve.lab.cli.bench.speed import CONTEXT, STEPS, SpeedPoint
from jaxserve.observe.machine import described, machine
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.weights import open_checkpoint

DEQUANTISED = "dequantised"
OPTIONS = {
    "kept_weights": [
        Option("file", str, "smollm2-135m", "GGUF file, or a fetched name"),
        Option("dtype", str, "float32", "type of activations", choices=("float32", "bfloat16")),
        Option("prefill", str, "512", "prompt lengths; '' for none"),
        Option("decode", str, "1,8", "sequences that decode at once; '' for none"),
        Option("threads", int, None, "cores for each engine; default: all", 1),
        Option(
            "llama_python",
            str,
            None,
            "Python with llama-cpp-python, which takes part but for several sequences",
        ),
        Option("rounds", int, 5, "rounds, after one that does not count", 1),
        Option("seconds", float, 1.0, "a measurement is repeated for so long in its round", 0),
        Option("foreign", float, 3.0, "most percent of the machine that others may use", 0, 100),
        Option("patience", float, 60.0, "seconds to wait for a quiet measurement", 0),
        Option("json", str, None, "file for all figures"),
    ]
}


def run(values: dict[str, Any]) -> int:
    cpus = sorted(os.sched_getaffinity(0))[: values["threads"]]
    os.sched_setaffinity(0, cpus)  # the engines inherit it
    file = Path(str(open_checkpoint(values["file"]).tokenizer)).resolve()
    points = [
        SpeedPoint(kind, size)
        for kind in ("prefill", "decode")
        for size in counts(kind, values[kind])
    ]
    logs = cache_folder() / "side_by_side" / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    settings = _settings(values, file, points, len(cpus))
    conditions = Conditions(values["seconds"], values["foreign"], values["patience"])
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(contextlib.closing(Worker(engine, settings | more, logs)))
            for engine, more in _engines(values, file, cpus)
        ]
        memory = {worker.engine.name: _anonymous(worker.pid) for worker in workers}
        ours = [worker for worker in workers if worker.engine.name != engines.LLAMA]
        several = [point for point in points if point.kind == "decode" and point.size > 1]
        alone = [point for point in points if point not in several]
        found = [
            *measured(workers, alone, values["rounds"], conditions),
            *measured(ours, several, values["rounds"], conditions),
        ]
    comparison = Comparison(tuple(found))
    nbytes = file.stat().st_size
    print(described(machine()), f"{file.name}: {nbytes / 1e6:.1f} MB", sep="\n")
    for name, held in memory.items():
        print(f"{name}: {held / 1e6:.0f} MB of memory")
    print("", comparison.shown(), sep="\n")
    keep(values, file_bytes=nbytes, memory=memory, **comparison.record())
    return 0


def _engines(
    values: dict[str, Any], file: Path, cpus: list[int]
) -> list[tuple[Engine, dict[str, str]]]:
    """Engines, and the settings that each has besides those of all."""
    own = engines.own(sys.executable, file)
    other = dataclasses.replace(own, name=DEQUANTISED)
    found = [(own, {"quantization": "auto"}), (other, {"quantization": "none"})]
    if values["llama_python"]:
        found.append((engines.llama_python(values["llama_python"], file, cpus), {}))
    return found


def _settings(
    values: dict[str, Any], file: Path, points: list[SpeedPoint], threads: int
) -> dict[str, Any]:
    return {
        "dtype": values["dtype"],
        "threads": threads,
        "context": CONTEXT,
        "steps": STEPS,
        "chunk_tokens": 512,
        "most_sequences": max(8, *(point.size for point in points if point.kind == "decode")),
        "vocab": open_checkpoint(str(file)).config.vocab,
        "longest": max(1024, *(point.length for point in points)),
    }


def _anonymous(pid: int) -> int:
    """Bytes of memory of a process that no file is behind."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return 1024 * int(found[1]) if found else 0


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])

if __name__ == "__main__":
    summary = "weights that stay quantised, beside f32 and llama.cpp"
    sys.exit(command_line("kept_weights", summary, COMMAND, sys.argv[1:], EngineError))
