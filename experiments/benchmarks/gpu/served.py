"""Requests through the whole engine, and beside vLLM where it is installed: the same shapes of a
model with random weights, the same batches and contexts, one chunk of a prompt per step on both.

vLLM is a process of another Python, measured after ours with the GPU to itself. A decode step is
what each further token adds to prompts that were computed before; a prefill is the time to the
first token of one new prompt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from experiments.benchmarks.engines import (
    OFFLINE,
    WORKERS,
    Engine,
    EngineError,
    Worker,
    why_absent,
)
from experiments.benchmarks.gpu.replica import Replica, Size
from experiments.benchmarks.gpu.steps import K, prompt
from experiments.benchmarks.gpu.timing import spread
from experiments.benchmarks.gpu.worker import Case, Row, Run
from experiments.benchmarks.gpu_programs import Step
from jaxserve.checkpoint.model_config import to_hf
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.engine.step_shapes import first_shapes
from jaxserve.lab.cli.bench.speed import Runner

LONGEST = 16 * K
CHUNK = 2 * K
SEQUENCES = 64
ROUNDS = 5
# of the memory of a GPU, or of the host, for vLLM
SHARE = 0.9
REHEARSED_SHARE = 0.2
# sequences, tokens of each prompt and of each answer, seed of the prompts -> seconds until all end
Seconds = Callable[..., float]


@dataclasses.dataclass(frozen=True)
class Load:
    """A measured load: `steps` decode steps of `sequences` with `context` tokens each.

    Without steps it is one prompt of `context` tokens.
    """

    sequences: int
    context: int
    steps: int = 0

    def __str__(self) -> str:
        if not self.steps:
            return f"prefill {self.context}"
        return f"decode {self.sequences} x {self.context}"

    def times(self, seconds: Seconds, run: Run) -> list[float]:
        """Takes the seconds of a prefill, or of a decode step, in several rounds after one that
        does not count. Where time runs out it stops after a round."""
        once = functools.partial(self._once, seconds)
        seeds = itertools.count(run.seed)
        once(next(seeds))
        out = [once(next(seeds))]
        while len(out) < (2 if run.rehearse else ROUNDS) and run.left > 0:
            out.append(once(next(seeds)))
        return out

    def _once(self, seconds: Seconds, seed: int) -> float:
        if not self.steps:
            return seconds(1, self.context, 1, seed=seed)
        # always the same prompts: they are computed once, and found afterwards
        of = functools.partial(seconds, self.sequences, self.context, seed=0)
        first = of(1)
        return (of(1 + self.steps) - first) / self.steps


def loads(run: Run) -> list[Load]:
    if run.rehearse:
        return [Load(1, 40, 4), Load(4, 40, 4), Load(1, 100)]
    decodes = [Load(1, K, 64), Load(64, K, 64), Load(8, 8 * K, 64)]
    return [*decodes, Load(1, 2 * K), Load(1, 8 * K)]


# --- jaxserve


def served(run: Run) -> Iterator[Case]:
    replica = Replica(run, Size(LONGEST, CHUNK, SEQUENCES))
    yield "build", replica.built
    yield "compile", functools.partial(_compiled, replica)
    for load in loads(run):
        yield str(load), functools.partial(_served, load, replica)


def _steps(load: Load, replica: Replica) -> list[Step]:
    """Returns a decode step halfway, or the steps of a prefill."""
    if load.steps:
        return [Step(load.sequences, load.context + load.steps // 2)]
    return prompt(load.context, min(load.context, replica.size.chunk))


def _compiled(replica: Replica) -> Row:
    """Compiles the programs that hold every batch, as a start does, and those of the loads."""
    began = time.perf_counter()
    steps = [step for load in loads(replica.run) for step in _steps(load, replica)]
    shapes = {*first_shapes(replica.plan.shapes), *(replica.arrays(step).shape for step in steps)}
    worker = replica.engine.worker
    worker.warm_up(lambda name: None, ("greedy",), shapes)
    return {"s": time.perf_counter() - began, "programs": worker.compiles}


def _served(load: Load, replica: Replica) -> Row:
    """A load on our engine, beside its ideal."""
    runner = Runner(replica.engine)
    vocab = replica.engine.info.vocab
    before = runner.compiles

    def seconds(sequences: int, tokens: int, answers: int, seed: int) -> float:
        dice = np.random.default_rng(seed)
        prompts = dice.integers(vocab // 2, vocab, (sequences, tokens))
        began = time.perf_counter()
        runner.generate(prompts, answers)
        return time.perf_counter() - began

    times = load.times(seconds, replica.run)
    row: Row = {"ms": spread([1e3 * each for each in times]), "rounds": times}
    row |= replica.beside_ideal(_steps(load, replica), statistics.median(times))
    if late := runner.compiles - before:
        return row | {"status": "wrong", "why": f"{late} programs were compiled meanwhile"}
    return row


# --- vLLM


class Vllm:
    """vLLM in a process of its own, with a model of our shape. Errors: RuntimeError where it does
    not start or answer."""

    def __init__(self, run: Run):
        model = MODELS["tiny" if run.rehearse else "llama3.1-8b"]
        self._folder = Path(run.folder, "vllm")
        self._folder.mkdir(exist_ok=True)
        longest = 512 if run.rehearse else LONGEST
        shape = dataclasses.replace(model, max_len=longest)
        config = to_hf(shape) | {"torch_dtype": "bfloat16"}
        (self._folder / "config.json").write_text(json.dumps(config))
        script = str(WORKERS / "run_vllm.py")
        environment = {**os.environ, **OFFLINE}
        environment.pop("PYTHONPATH", None)  # its libraries would import our folders
        engine = Engine("vllm", (run.vllm_python, script), environment, self._folder)
        own = {
            "load_format": "dummy",
            "max_num_batched_tokens": CHUNK,
            "enable_prefix_caching": True,
            "gpu_memory_utilization": REHEARSED_SHARE if run.rehearse else SHARE,
        }
        settings = {
            "dtype": "bfloat16",
            "vocab": model.vocab,
            "context": K,
            "steps": 64,
            "longest": longest,
            "most_sequences": SEQUENCES,
            "engine": own,
        }
        self._log = self._folder / "vllm.log"
        with self._explained():
            self._worker = Worker(engine, settings, self._folder)
        self.versions = self._worker.versions

    def seconds(self, sequences: int, prompt: int, tokens: int, seed: int) -> float:
        with self._explained():
            answer = self._worker.ask(
                kind="time", sequences=sequences, prompt=prompt, tokens=tokens, seed=seed
            )
        return answer["seconds"]

    def close(self) -> None:
        self._worker.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Adds to errors of the process what its log says, which goes with its folder: the first
        error that was logged, or the last line."""
        try:
            yield
        except EngineError as error:
            log = self._log.read_text(errors="replace").strip()
            logged = re.search(r"ERROR .*?(\w+Error: .*)", log)
            reason = logged[1] if logged else log.rpartition("\n")[2]
            raise RuntimeError(f"{error}: {reason}") from None


def vllm(run: Run) -> Iterator[Case]:
    started: list[Vllm] = []
    yield "start", functools.partial(_start, run, started)
    for load in loads(run) if started else ():
        yield str(load), functools.partial(beside, load, started[0].seconds, run)
    for peer in started:
        peer.close()


def _start(run: Run, started: list[Vllm]) -> Row:
    if why := why_absent(run.vllm_python, "vllm"):
        return {"status": "absent", "why": why}
    began = time.perf_counter()
    started.append(Vllm(run))
    return {"s": time.perf_counter() - began, "versions": str(started[0].versions)}


def beside(load: Load, seconds: Seconds, run: Run) -> Row:
    """A load on vLLM, beside what it took our engine. The ratio is that of the medians, then the
    least and the largest that rounds allow."""
    times = [1e3 * each for each in load.times(seconds, run)]
    theirs = spread(times)
    row: Row = {"ms": theirs, "rounds": times}
    ours = run.row("served", str(load)).get("ms")
    if not ours:
        return row | {"status": "alone", "why": "our engine was not measured at it"}
    ratios = {
        "median": theirs["median"] / ours["median"],
        "low": theirs["low"] / ours["high"],
        "high": theirs["high"] / ours["low"],
    }
    return row | {"ms of ours": ours, "time of vLLM / ours": ratios}
