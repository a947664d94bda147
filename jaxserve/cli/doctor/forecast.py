"""Forecasts of what a replica needs and how fast it will be: for the log of `jaxserve serve` and
for `jaxserve doctor`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.scheduling import Scheduler

LENGTHS = [128, *(2048 * 16**power for power in range(4))]  # tokens of prompts and contexts
BATCHES = [4**power for power in range(7)]  # sequences that decode at once


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Predicted seconds, of what has the replica to itself: `ttft` by tokens of a prompt; `tpot` by
    sequences that decode at once and tokens of context of each, where they fit the cache."""

    ttft: dict[int, float]
    tpot: dict[tuple[int, int], float]

    def rows(self) -> list[list[str]]:
        """By length: TTFT, then TPOT of each batch."""
        return [
            [
                shown(length),
                seconds(self.ttft[length]),
                *(seconds(self.tpot.get((batch, length))) for batch in self.batches),
            ]
            for length in self.ttft
        ]

    @property
    def batches(self) -> list[int]:
        return sorted({batch for batch, _ in self.tpot})

    def __str__(self) -> str:
        first = ", ".join(f"{shown(length)}: {seconds(time)}" for length, time in self.ttft.items())
        length = min(length for _, length in self.tpot)
        each = ", ".join(
            f"{batch}: {seconds(self.tpot[batch, length])}"
            for batch in self.batches
            if (batch, length) in self.tpot
        )
        return (
            f"predicted TTFT by tokens of the prompt {first}; TPOT by sequences of "
            f"{shown(length)} tokens {each}"
        )


def forecast(scheduler: Scheduler) -> Forecast | None:
    """Returns its predictor's forecast; None without known costs of steps."""
    predictor = scheduler.predictor
    longest = min(scheduler.max_len, scheduler.cache.needs.longest(scheduler.cache.usable))
    if not predictor.calibrated:
        return None
    lengths = sorted({*(length for length in LENGTHS if length < longest), longest - 1})
    batches = sorted(
        {
            *(batch for batch in BATCHES if batch < scheduler.config.max_seqs),
            scheduler.config.max_seqs,
        }
    )
    fits = [
        (batch, length)
        for batch, length in itertools.product(batches, lengths)
        if batch * scheduler.cache.needs.of(length + 1) <= scheduler.cache.total
    ]
    return Forecast(
        {length: scheduler.times.alone(length) for length in lengths},
        {pair: _tpot(scheduler, *pair) for pair in fits},
    )


def _tpot(scheduler: Scheduler, batch: int, context: int) -> float:
    predictor = scheduler.predictor
    lanes = predictor.mesh.kvp
    size = int(predictor.lane_costs.prompts.meeting(np.array(context)))
    home = np.arange(batch) % lanes
    meets = home[:, None] // size == np.arange(lanes) // size  # [batch, lanes]
    loads = predictor.lane_costs.decodes(
        np.full(batch, context), home, np.full(batch, size), meets.astype(int)
    )
    return predictor.latency(predictor.stage(loads), batch, -(-batch // lanes))


def launch_lines(engine: Any) -> list[str]:
    """Returns the lines to log before an engine serves: ends of completions, sampling, memory,
    capacity, predictions."""
    from jaxserve.engine.memory import sizes

    info = engine.info.summary()
    expected = forecast(engine.scheduler)
    return [
        _ends(engine.info.eos_ids),
        _sampling(engine.info.sampling_defaults),
        f"memory per device: {memory(sizes(engine.worker.plan))}; {info['devices']} devices "
        f"({info['platform']})",
        f"capacity: {info['capacity_tokens']} tokens of KV in pages of {info['block_size']}, "
        f"{info['max_seqs']} sequences at once, "
        f"{info['max_model_len']} tokens in each at most",
        _predicted(expected, engine.doubt),
    ]


def _predicted(expected: Forecast | None, doubt: str) -> str:
    if expected is None:
        return (
            "nothing predicted: without a profile the costs of steps are unknown (`jaxserve "
            "profile` measures one)"
        )
    return f"{expected} (not to be trusted: {doubt})" if doubt else str(expected)


def _ends(ids: Sequence[int]) -> str:
    if not ids:
        return "the model names no token that ends a completion: all run to their max_tokens"
    return f"completions end at token {' or '.join(map(str, ids))}"


def _sampling(defaults: Mapping[str, float]) -> str:
    if not defaults:
        return "sampling that requests do not state: as their protocol says"
    values = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
    return (
        f"sampling that requests do not state: {values}, as the model recommends "
        "(--generation_config=none for the protocol's own)"
    )


def memory(sizes: Any) -> str:
    states = f", states {gib(sizes.states)}" if sizes.states else ""
    return (
        f"{gib(sizes.total)} (weights {gib(sizes.weights)}, KV {gib(sizes.kv)}{states}, tables "
        f"{gib(sizes.tables)}, work about "
        f"{gib(sizes.work)})"
    )


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 0.1 * 2**30 else f"{size / 2**20:.0f} MiB"


def shown(count: int) -> str:
    """128, 2K, 1M: what is a multiple of a unit in that unit."""
    for size, unit in ((2**20, "M"), (2**10, "K")):
        if count >= size and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)


def seconds(time: float | None) -> str:
    if time is None:
        return "-"
    if time < 1:
        return f"{time * 1e3:.3g} ms"
    return f"{time:.3g} s" if time < 1000 else f"{time:.0f} s"
