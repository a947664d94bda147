"""An engine on the devices of this machine with random weights, and steps of it.

The engine is the project's own (`engine.build`); only its weights are made on the device instead of
on the host, which would take minutes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.gpu.ideal import beside_ideal
from experiments.benchmarks.gpu.timing import Launches, Pace, Timed, in_turns
from experiments.benchmarks.gpu.worker import Row, Run
from experiments.benchmarks.gpu_programs import Step, needs
from jaxserve.api.sampling import SamplingParams
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.engine import build, loading, memory, sizing
from jaxserve.engine.profiling.measure import MeasurePoint, StepTimer
from jaxserve.engine.sampling_rows import admissions
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.engine.stages import Stages
from jaxserve.engine.step_rows import StepArrays
from jaxserve.settings.schema import (
    CacheConfig,
    EngineConfig,
    MeshConfig,
    ModelSource,
    SchedulerConfig,
)

TAPE = 2**22 - 3  # odd, so that rows of no width repeat soon
SPARE_GIB = 8.0  # of a device beside weights and KV: for programs, and what is tried for them
SAMPLED = SamplingParams.make(temperature=0.8, top_k=50, top_p=0.95, seed=1)


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a replica: tokens of the longest sequence and of a step, sequences, the type of KV,
    layers where not all, and ranks."""

    longest: int
    chunk: int
    seqs: int
    least: int = 64  # tokens of a row where chunks share a step
    kv: str = "auto"
    layers: int | None = None
    tp: int = 1


TINY = Size(512, 64, 4, 16)


class Replica:
    """An engine that was not started, and steps on it. Its pages take the memory that weights and
    `SPARE_GIB` leave. Errors of its making come again whenever it is asked for."""

    def __init__(self, run: Run, size: Size):
        self.run = run
        self.size = size
        if run.rehearse:
            layers = size.layers and 1
            self.size = dataclasses.replace(TINY, kv=size.kv, layers=layers, tp=size.tp)
        # Llama 3 in shape, with room for long contexts
        self.model = "tiny" if run.rehearse else "llama3.1-8b"

    @functools.cached_property
    def config(self) -> EngineConfig:
        size = self.size
        cache = Path(self.run.folder) / "xla"
        cache.mkdir(mode=0o700, exist_ok=True)
        block_size = 16 if self.run.rehearse else 64
        return EngineConfig(
            ModelSource(f"random:{self.model}", dtype="bfloat16", max_model_len=size.longest),
            mesh=MeshConfig(tp=size.tp),
            cache=CacheConfig(block_size=block_size, kv_cache_dtype=size.kv),
            scheduler=SchedulerConfig(
                max_seqs=size.seqs, chunk_tokens=size.chunk, min_chunk=size.least
            ),
            profile="none",
            compile_cache=str(cache),
        )

    @contextlib.contextmanager
    def _made(self) -> Iterator[None]:
        """Has plans and engines be made with this model and this memory."""
        size = self.size
        whole = MODELS[self.model]
        layers = size.layers or whole.layers
        shape = dataclasses.replace(whole, layers=layers, max_len=max(whole.max_len, size.longest))
        with (
            mock.patch.dict(MODELS, {self.model: shape}),
            mock.patch.object(memory, "RESERVED_GIB", SPARE_GIB),
        ):
            yield

    @functools.cached_property
    def plan(self) -> StagePlan:
        """The plan of the engine, which need not be there yet. Errors: ConfigError where weights
        leave no room."""
        with self._made():
            return sizing.make_plan(
                self.config, sizing.split_model(self.config, MODELS[self.model])
            )

    @property
    def tokens(self) -> int:
        """Tokens that its pages hold."""
        return self.plan.pages * self.plan.block_size

    @functools.cached_property
    def engine(self) -> Any:
        with self._made(), mock.patch.object(loading, "load", on_device):
            return build.build(self.config, progress=False, warm_up=False)

    @property
    def stages(self) -> Stages:
        return self.engine.worker.stages

    # --- steps

    @functools.cached_property
    def _timer(self) -> StepTimer:
        return StepTimer(self.engine.worker)

    def arrays(self, step: Step) -> StepArrays:
        """A step, ready to be issued. Errors: ValueError for one that its pages do not hold."""
        if step.keys > self.tokens:
            raise ValueError(f"KV of {step.keys:,} tokens; the pages hold {self.tokens:,}")
        chunks = int(step.chunk > 0)
        return self._timer.arrays(
            MeasurePoint(
                decodes=step.decodes,
                context=step.context,
                chunks=chunks,
                cached=step.cached,
                new=step.chunk,
                sample=bool(step.variant),
            )
        )

    def launches(self, *steps: Step) -> Launches:
        """Launches of these steps in a row, each with what it samples."""
        issues = [self.issued(step) for step in steps]

        def run(count: int) -> float:
            began = time.perf_counter()
            done = None
            for _ in range(count):
                for issue in issues:
                    done = issue()
            jax.block_until_ready(done)
            return time.perf_counter() - began

        return run

    def issued(self, step: Step) -> Callable[[], jax.Array]:
        """Returns what issues a step as the engine's worker does, and returns an array of it."""
        stages = self.stages
        arrays = self.arrays(step)
        masks = None
        if step.variant == "guided":  # about half of the vocabulary is allowed
            words = self.plan.mesh.kvp, arrays.shape.samples, self.plan.mask_words
            dice = np.random.default_rng(self.run.seed)
            masks = dice.integers(-(2**31), 2**31, words).astype(np.int32)
        if step.variant not in ("", "greedy"):
            self._admit(step.decodes)

        def issue() -> jax.Array:
            hidden = stages.step(arrays.shape, arrays.rows, 0)
            assert hidden is not None
            if not step.variant:
                return hidden.ints
            sampled = stages.sample(hidden, step.variant, masks)
            assert sampled is not None
            return sampled.tokens

        return issue

    def _admit(self, slots: int) -> None:
        """Has the first slots sample as `SAMPLED` says."""
        prompt = np.zeros(1, np.int32)
        for slot in range(slots):
            for admission in admissions(SAMPLED, 0, slot, prompt, [], slot, ()):
                self.stages.admit(admission)

    def timed(self, *steps: Step) -> Timed:
        """Times of these steps in a row, at a pace that the time left allows."""
        launch = self.launches(*steps)
        launch(1)
        return in_turns({"it": launch}, pace(self.run, launch(1)))[0]["it"]

    def beside_ideal(self, steps: Iterable[Step], seconds: float) -> Row:
        """Columns of steps that took `seconds`, one after the other."""
        return beside_ideal(self.run, [needs(self.plan, step) for step in steps], seconds)

    # --- cases

    def built(self) -> Row:
        """Builds the engine."""
        began = time.perf_counter()
        stages = self.stages.stages
        jax.block_until_ready([stage.values for stage in stages])
        seconds = time.perf_counter() - began
        size = lambda arrays: sum(array.nbytes for array in jax.tree.leaves(arrays)) / 2**30
        return {
            "s": seconds,
            "model": self.model,
            "GiB": size([stage.values for stage in stages]),
            "pool GiB": size([stage.caches for stage in stages]),
            "pool tokens": self.tokens,
        }

    def compiled(self, steps: Iterable[Step]) -> Row:
        """Compiles what these steps need, several programs at a time."""
        began = time.perf_counter()
        programs = self.stages.programs
        wanted: dict[str, Any] = {}
        for step in steps:
            if step.keys > self.tokens:
                continue
            shape = self.arrays(step).shape
            named = [programs.layers(stage, shape) for stage in self.stages.stages]
            if step.variant:
                named.append(programs.head(step.variant, shape.samples))
            wanted |= dict(named)
        programs.warm_up(wanted, lambda name: None)
        seconds = time.perf_counter() - began
        layers = [name for name in wanted if name.startswith("layers")]
        ours = sum("mosaic" in programs.compiled[name].as_text() for name in layers)
        return {"s": seconds, "programs": len(wanted), "with our kernel": ours}


def pace(run: Run, once: float) -> Pace:
    """Returns the pace of what takes `once` seconds: as many rounds as a third of the time left
    allows; a launch that is long is a round."""
    if run.rehearse:
        return run.pace
    least, most = (2, 5) if once < 0.3 else (1, 3)
    rounds = int(np.clip(run.left / 3 / max(least * once, 1e-9), 1, most))
    return Pace(rounds, 0.1 if once < 0.1 else 0.0, least)


def on_device(
    checkpoint: Any,
    model: Any,
    declared: Mapping[str, Any],
    shardings: Mapping[str, Any],
    dtype: Any,
    progress: bool = True,
) -> dict[str, jax.Array]:
    """Stands in for `weights.load`: norms are one, all other weights repeat one array of normal
    random numbers with standard deviation 0.02."""
    tape = 0.02 * jax.random.normal(jax.random.key(0), (TAPE,), dtype)

    @functools.cache
    def maker(shape: tuple[int, ...], where: Any, norm: bool) -> Any:
        def f(tape: jax.Array) -> jax.Array:
            size = math.prod(shape)
            return (
                jnp.ones(shape, dtype)
                if norm
                else jnp.tile(tape, -(-size // TAPE))[:size].reshape(shape)
            )

        return jax.jit(f, out_shardings=where)

    return {
        path: maker(one.shape, shardings[path], "norm" in path)(tape)
        for path, one in declared.items()
    }
