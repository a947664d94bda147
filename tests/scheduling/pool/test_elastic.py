"""Cache load by hand, and elastic plans against a search of all plans."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest

from experiments.tokenlake.control_plane import batch_times
from jaxserve.lanes.work import Heads
from jaxserve.scheduling.pool.elastic import BatchTimes, plan_step
from jaxserve.scheduling.pool.load import AttentionRates, cache_load

DEGREES = (1, 2, 3, 4)


def test_the_load_is_the_larger_of_two_shares():
    rates = AttentionRates.of(2, Heads(4, 2, 8), flops_per_s=1e6, bytes_per_s=1e5)
    assert rates.read == 2 * (2 * 2 * 8 * 2) / 1e5, "K and V of 2 heads in 16 bit, in 2 layers"
    assert rates.pair == 2 * 4 * 32 / 1e6
    prefix, new = np.array([100.0, 50.0]), np.array([1.0, 10.0])
    reading, computing = 161 * rates.read, 600 * rates.pair
    for seconds in (0.01, 1.0):
        free = 4 * seconds
        right = max(reading / (reading + free), computing / (computing + free))
        assert cache_load(prefix, new, 4, seconds, rates) == pytest.approx(right)
    assert cache_load(prefix, new, 8, 1.0, rates) < cache_load(prefix, new, 4, 1.0, rates) < 1
    assert cache_load(np.zeros(0), np.zeros(0), 4, 0.0, rates) == 0.0


def parts(total: int) -> Iterator[list[range]]:
    """All ways to cut `total` prompts into consecutive batches."""
    for cuts in itertools.product((False, True), repeat=max(total - 1, 0)):
        ends = [0, *(place for place, cut in enumerate(cuts, 1) if cut), total]
        yield [range(*pair) for pair in itertools.pairwise(ends) if pair[0] < pair[1]]


def seconds_of(table: BatchTimes, tokens: np.ndarray, degree: int, load: float) -> float:
    place = table.degrees.tolist().index(degree)
    linear = table.token[place] * tokens.sum() + table.pair[place] * (tokens**2).sum()
    return float(table.base[place] + linear) / (1 - load)


def best_prompts(table: BatchTimes, tokens: np.ndarray, lanes: int, load: float, limit: float):
    best = 0.0 if not len(tokens) else math.inf
    for batches in parts(len(tokens)):
        for degrees in itertools.product(table.degrees.tolist(), repeat=len(batches)):
            if sum(degrees) <= lanes:
                each = [
                    seconds_of(table, tokens[list(batch)], degree, load)
                    for batch, degree in zip(batches, degrees)
                ]
                if max(each, default=0.0) <= limit:
                    best = min(best, sum(len(b) * s for b, s in zip(batches, each)))
    return best


def best_decodes(table: BatchTimes, count: int, lanes: int, load: float, limit: float) -> float:
    best = 0.0 if not count else math.inf
    for sizes in itertools.product(range(count + 1), repeat=lanes):
        if sum(sizes) == count:
            each = [(table.base[0] + table.token[0] * n) / (1 - load) if n else 0.0 for n in sizes]
            if max(each, default=0.0) <= limit:
                best = min(best, sum(n * s for n, s in zip(sizes, each)))
    return best


@pytest.mark.parametrize("seed", range(60))
def test_the_plan_is_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    degrees = ((1, 2, 4), DEGREES)[seed % 2]
    table = batch_times(degrees)
    lanes = int(rng.integers(1, 5))
    tokens = rng.integers(10, 8000, int(rng.integers(0, 5)))
    decodes = int(rng.integers(0, 6))
    load = float(rng.choice([0.0, 0.2]))
    limit = float(rng.choice([4.2e-3, 0.05, 0.2, math.inf]))
    ascending = np.sort(tokens).astype(float)

    def best(limit: float) -> float:
        return min(
            best_prompts(table, ascending, used, load, limit)
            + best_decodes(table, decodes, lanes - used, load, limit)
            for used in range(lanes + 1)
        )

    plan = plan_step(table, tokens, decodes, lanes, load, limit)
    right = best(limit)
    assert plan.in_time == math.isfinite(right)
    if not plan.in_time:
        right = best(math.inf)
    if math.isinf(right):
        assert lanes == 1 and len(tokens) and decodes, "one lane for both phases: prompts wait"
        assert not plan.batches and plan.decode_lanes == 1
        return
    assert plan.latency == pytest.approx(right, rel=1e-6)
    assert sorted(prompt for batch in plan.batches for prompt in batch.prompts) == list(
        range(len(tokens))
    )
    assert sum(batch.degree for batch in plan.batches) + plan.decode_lanes <= lanes
    for batch in plan.batches:
        mine = tokens[list(batch.prompts)].astype(float)
        assert batch.seconds == pytest.approx(seconds_of(table, mine, batch.degree, load))
    summed = sum(len(batch.prompts) * batch.seconds for batch in plan.batches)
    summed += best_decodes(table, decodes, plan.decode_lanes, load, math.inf)
    assert summed == pytest.approx(right, rel=1e-6), "the batches are those of the least latency"


def test_a_higher_load_makes_larger_groups_or_smaller_batches():
    tokens = [4000] * 4
    alone = plan_step(batch_times(DEGREES), tokens, 0, 8, limit=0.2)
    loaded = plan_step(batch_times(DEGREES), tokens, 0, 8, load=0.5, limit=0.2)
    assert alone.in_time
    work = lambda plan: sum(len(batch.prompts) / batch.degree for batch in plan.batches)
    assert work(loaded) <= work(alone)


def test_without_a_plan_in_time_the_limit_is_dropped():
    plan = plan_step(batch_times(DEGREES), [100_000], 10, 4, limit=0.05)
    assert not plan.in_time and plan.batches[0].prompts == (0,) and plan.decode_lanes >= 1
