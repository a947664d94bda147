"""Measures what CUDA graphs cost where buffers move: XLA records the commands of a graph again in a
step whose arrays are not where they were in the step before.

The same decode step runs with all arrays in their places, with arrays that are elsewhere in each
step, and as it is served, with graphs and without. Weights and pages always stay; results are where
the allocator puts them, and `places` counts the places of all arrays in eight steps: 1 if they do
stay. Temporary arrays cannot be seen. The time until the device is done hides what the host does
meanwhile; the time in which steps are issued does not.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from experiments.benchmarks.gpu.replica import Replica, Size, pace
from experiments.benchmarks.gpu.steps import K, named
from experiments.benchmarks.gpu.timing import Launches, in_turns, spread
from experiments.benchmarks.gpu.worker import Case, Row, Run
from experiments.benchmarks.gpu_programs import Step
from jaxserve.engine import stage_programs
from jaxserve.engine.stage_programs import GRAPH_OPTION, StagePrograms
from jaxserve.engine.step_rows import StepArrays
from jaxserve.sharding.rules import sharding

SHORT = Size(16 * K, 2 * K, 64)
PLACES = 4  # of arrays that move
ISSUED = 8  # steps that are issued while the host's time is taken, few enough to be queued
TAKEN = 5  # times that it is taken
STAY = "arrays stay"
MOVE = "arrays move"


def graphs(run: Run) -> Iterator[Case]:
    replica = Replica(run, SHORT)
    steps: tuple[Step, ...] = (Step(1, K), Step(64, K))
    if run.rehearse:
        steps = (Step(1, 32),)
    yield "build", replica.built
    yield "compile", functools.partial(_compiled, replica, steps)
    for step in steps:
        yield named(step), functools.partial(_measured, replica, step, steps)


def _compiled(replica: Replica, steps: tuple[Step, ...]) -> Row:
    began = time.perf_counter()
    kinds = _programs(replica, steps)
    return {
        "s": time.perf_counter() - began,
        **{f"programs, {kind}": programs.compiles for kind, programs in kinds.items()},
    }


@functools.cache
def _programs(replica: Replica, steps: tuple[Step, ...]) -> dict[str, StagePrograms]:
    """Compiles the programs of these steps, the replica's own and, over the same weights and pages,
    such that nothing is in graphs."""
    stages = replica.stages
    without = StagePrograms(replica.plan, stages.stages, stages.head)
    with (
        mock.patch.object(stages, "programs", without),
        mock.patch.object(stage_programs, "graph_options", lambda: {GRAPH_OPTION: ""}),
    ):
        replica.compiled(steps)
    replica.compiled(steps)
    return {"graphs": stages.programs, "no graphs": without}


class Loop:
    """A decode step again and again, whose arrays are in `places` in turn: what goes in, and what
    comes out, which is kept until its place has its turn."""

    def __init__(self, replica: Replica, arrays: StepArrays, programs: StagePrograms, places: int):
        stages = replica.stages
        (self._stage,) = stages.stages
        assert stages.head is not None
        self._head = stages.head.values
        self._layers = programs.get(*programs.layers(self._stage, arrays.shape))
        self._sample = programs.get(*programs.head("greedy", arrays.shape.samples))
        where = sharding(self._stage.mesh, "lanes")
        none = jnp.zeros((1, replica.plan.slots), jnp.int32)
        placed = [
            [jax.device_put(x, where, may_alias=False) for x in (arrays.rows, none)]
            for _ in range(places)
        ]
        self._inputs = itertools.cycle(placed)
        self._kept: deque[Any] = deque(maxlen=places - 1)

    def __call__(self) -> jax.Array:
        return self._step()[-2]

    def _step(self) -> list[jax.Array]:
        """Issues a step; returns all that it takes and gives, beside weights and pages."""
        stage = self._stage
        rows, fed = next(self._inputs)
        hidden, stage.caches, stage.table, _ = self._layers(
            stage.values, stage.caches, stage.table, rows, fed
        )
        tokens, sampled = self._sample(self._head, hidden[1], hidden[2], fed)
        self._kept.append((hidden, tokens, sampled))
        return [rows, fed, *hidden, tokens, sampled]

    def places(self) -> int:
        """Counts the places in which the arrays of steps are, over some steps."""
        seen = set()
        for _ in range(2 * PLACES):
            seen.add(tuple(x.unsafe_buffer_pointer() for x in self._step()))
        return len(seen)


def _served(replica: Replica, step: Step, programs: StagePrograms) -> Callable[[], jax.Array]:
    """Issues a step as the engine's worker does, by these programs."""
    stages = replica.stages
    issued = replica.issued(step)

    def issue() -> jax.Array:
        stages.programs = programs
        return issued()

    return issue


def _run(issue: Callable[[], jax.Array], count: int) -> float:
    """Runs steps one after the other; returns the seconds of all."""
    began = time.perf_counter()
    done = None
    for _ in range(count):
        done = None  # its place is free for the next
        done = issue()
    jax.block_until_ready(done)
    return time.perf_counter() - began


def _host_times(issue: Callable[[], jax.Array]) -> dict[str, float]:
    """Takes the microseconds in which a step is issued while the device has few steps to do."""
    times = []
    for _ in range(TAKEN):
        began = time.perf_counter()
        done = None
        for _ in range(ISSUED):
            done = None
            done = issue()
        times.append((time.perf_counter() - began) / ISSUED * 1e6)
        jax.block_until_ready(done)
    return spread(times)


def _measured(replica: Replica, step: Step, steps: tuple[Step, ...]) -> list[Row]:
    """A step in every way. steps: all that programs are compiled for."""
    arrays = replica.arrays(step)
    kinds = _programs(replica, steps)
    issues: dict[str, Callable[[], jax.Array]] = {}
    for kind, programs in kinds.items():
        for name, places in ((STAY, 1), (MOVE, PLACES)):
            issues[f"{kind}, {name}"] = Loop(replica, arrays, programs, places)
        issues[f"{kind}, as served"] = _served(replica, step, programs)
    launches: dict[str, Launches] = {
        name: functools.partial(_run, issue) for name, issue in issues.items()
    }
    try:
        for launch in launches.values():
            launch(1)
        once = launches[f"graphs, {STAY}"](1)
        timed, faults = in_turns(launches, pace(replica.run, once * len(launches)))
        if faults:
            raise RuntimeError("; ".join(f"{name}: {why}" for name, why in faults.items()))
        host = {name: _host_times(issues[name]) for name in timed}
    finally:
        replica.stages.programs = kinds["graphs"]
    rows = []
    for name, one in timed.items():
        stay = host[f"{name.partition(',')[0]}, {STAY}"]["median"]
        issue = issues[name]
        rows.append(
            {
                "case": f"{named(step)}, {name}",
                "ms": one.spread(1e3),
                "host us": host[name],
                "beyond arrays that stay us": host[name]["median"] - stay,
                "places": issue.places() if isinstance(issue, Loop) else None,
                **replica.beside_ideal([step], one.median),
            }
        )
    return rows
