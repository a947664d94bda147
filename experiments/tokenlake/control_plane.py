"""The time of the control plane at 64 lanes, 64 prompts and 512 decodes, and what plans lose by
taking only degrees that are sizes of lane groups.

    python -m experiments.tokenlake.control_plane
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from jaxserve.lanes.cdsp import Latency
from jaxserve.lanes.groups import group_sizes
from jaxserve.lanes.work import Heads
from jaxserve.scheduling.pool.dispatch import TokenBytes, gains, match, match_groups
from jaxserve.scheduling.pool.elastic import BatchTimes, ElasticPlan, plan_step
from jaxserve.scheduling.pool.load import AttentionRates, cache_load

LANES = 64
DECODES = 512
PREFIX = 24_000  # tokens
TBT = 0.25  # seconds
LATE = 0.1  # seconds, too few for 64 prompts beside the decodes
LLAMA_2 = Heads(32, 32, 128)
SIZES = TokenBytes.of(LLAMA_2)
PAIR_OF_A100 = AttentionRates.of(32, LLAMA_2, flops_per_s=3.4e14, bytes_per_s=3.2e12)
REPEATS = 40


def batch_times(degrees: tuple[int, ...]) -> BatchTimes:
    """Times of a 7B model on pairs of A100, roughly: 4 ms a step, 40 us a token, pairs of query and
    key at 340 TFLOP/s."""
    return BatchTimes.of(
        {
            degree: Latency(
                4e-3 + 4e-4 * (degree - 1),
                40e-6 / degree * (1 + 0.05 * math.log2(degree)),
                0.0,
                2 * 4096 * 32 / 3.4e14 / degree,
            )
            for degree in degrees
        }
    )


GROUPS = batch_times(group_sizes(LANES))
ANY = batch_times(tuple(range(1, LANES + 1)))


class Step:
    """Requests of a step: prompts with hashed prefixes, and decodes."""

    def __init__(self, prompts: int, seed: int):
        rng = np.random.default_rng(seed)
        self.tokens = rng.integers(50, 4096, prompts)
        held = rng.random((prompts, LANES)) < 0.4
        self.gain = gains(held * self.tokens[:, None], rng.integers(0, 64, held.shape), SIZES)
        self.prefix = np.full(prompts + DECODES, float(PREFIX))
        self.new = np.concatenate([self.tokens, np.ones(DECODES)])

    def load(self) -> float:
        seconds = GROUPS.ideal(self.new)
        return cache_load(self.prefix, self.new, LANES, seconds, PAIR_OF_A100)

    def plan(self, times: BatchTimes = GROUPS, tbt: float = TBT) -> ElasticPlan:
        return plan_step(times, self.tokens, DECODES, LANES, self.load(), tbt)

    def late(self) -> ElasticPlan:
        """Plans where each prompt alone would be in time, and no plan is."""
        return self.plan(tbt=LATE)

    def prompts_alone(self, times: BatchTimes = GROUPS) -> ElasticPlan:
        return plan_step(times, self.tokens, 0, LANES)

    def homes(self) -> np.ndarray:
        return match(self.gain, [1] * LANES)

    def plan_any(self) -> ElasticPlan:
        return self.plan(ANY)

    def whole(self) -> None:
        """Plans batches and degrees, and matches them to groups of lanes."""
        batches = self.plan().batches
        gain = np.stack([self.gain[list(batch.prompts)].sum(0) for batch in batches])
        match_groups(gain, [batch.degree for batch in batches], np.ones(LANES, bool))


def timed(name: str, work: Callable[[], object], repeats: int = REPEATS) -> None:
    """Prints the milliseconds of a call."""
    work()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    p50, p90 = np.percentile(seconds, [50, 90]) * 1e3
    print(f"{name:58} p50 {p50:6.2f} ms  p90 {p90:6.2f} ms")


def main() -> None:
    """Prints times, and how much worse plans with aligned degrees are."""
    print(f"{LANES} lanes, {DECODES} decodes behind {PREFIX} tokens, {TBT} s between tokens")
    for prompts in (16, 32, 64):
        step = Step(prompts, prompts)
        timed(f"plan of {prompts} prompts, degrees of groups", step.plan)
        timed(f"load, plan and groups of {prompts} prompts", step.whole)
        timed(f"plan of {prompts} prompts, {LATE} s between tokens", step.late)
        timed(f"plan of {prompts} prompts, any degree", step.plan_any, 5)
        timed(f"homes of {prompts} prompts", step.homes)
    for prompts in (16, 32, 64):
        beside, alone = [], []
        for seed in range(5):
            step = Step(prompts, seed)
            beside.append(step.plan().latency / step.plan_any().latency - 1)
            alone.append(step.prompts_alone().latency / step.prompts_alone(ANY).latency - 1)
        print(
            f"{prompts} prompts: summed latency with degrees of groups above any degree "
            f"{np.mean(beside):.1%} beside the decodes, {np.mean(alone):.1%} alone"
        )


if __name__ == "__main__":
    main()
