"""Plans the batches of a step over lanes that share one pool of KV (TokenLake, section 6.2).

Lanes hold no state of their own, so in each step prompts are cut into batches, each on as many
lanes as makes the summed latency of all requests least:

    f(i, k) = min over j < i and g <= k of f(j, k - g) + (i - j) T(j + 1 .. i, g, L)

where f(i, k) is the least summed latency of the first i prompts, in the order of their tokens, on k
lanes, and T the seconds of a batch on g lanes (its degree) with a cache load of L. f(0, k) is 0:
lanes may idle. Decodes have a degree of 1, and their seconds depend on their number alone, for the
pool reads their KV; n T(n) is convex, so that equal batches are best. A batch has prompts or
decodes: the best split of all lanes between the two is taken. A step ends with its slowest batch,
so each batch must end within the tightest time between tokens of the decodes; where no plan does,
the limit is dropped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.lanes.cdsp import Latency

INFINITE = math.inf


class BatchTimes(NamedTuple):
    """Seconds of a batch without the cache, on as many lanes as each of `degrees` [g] says: base +
    token sum n + pair sum n^2, over the n tokens of its prompts (LoongServe's form)."""

    degrees: np.ndarray
    base: np.ndarray
    token: np.ndarray
    pair: np.ndarray

    @classmethod
    def of(cls, latencies: Mapping[int, Latency]) -> BatchTimes:
        """Takes what each group size needs for prompts without history. Sizes must have 1."""
        sizes = sorted(latencies)
        each = [latencies[size] for size in sizes]
        columns = ([getattr(one, name) for one in each] for name in ("base", "token", "pair"))
        return cls(np.array(sizes), *map(np.array, columns))

    def prompts(self, tokens: np.ndarray, load: float) -> np.ndarray:
        """Returns seconds of each pair of `batch_ends` as a batch on each degree [g, pairs].
        tokens [n]: of each prompt."""
        ends = batch_ends(len(tokens))
        sums = np.concatenate([[0.0], np.cumsum(tokens, dtype=float)])
        squares = np.concatenate([[0.0], np.cumsum(np.square(tokens, dtype=float))])
        linear = sums[ends.stop] - sums[ends.start]
        quadratic = squares[ends.stop] - squares[ends.start]
        base, token, pair = np.stack([self.base, self.token, self.pair])[..., None] / (1 - load)
        return token * linear + pair * quadratic + base

    def decodes(self, count: np.ndarray, load: float) -> np.ndarray:
        """Returns seconds of a batch of `count` decodes on one lane; 0 where it is empty."""
        return np.where(count > 0, (self.base[0] + self.token[0] * count) / (1 - load), 0.0)

    def ideal(self, tokens: np.ndarray) -> float:
        """Returns seconds of all these prompts on all lanes, as one batch."""
        linear = self.token[-1] * float(tokens.sum())
        return float(self.base[-1]) + linear + float(self.pair[-1]) * float((tokens * tokens).sum())


class BatchEnds(NamedTuple):
    """Every pair of a batch's first prompt and the one after its last, [n (n + 1) / 2] each."""

    start: np.ndarray
    stop: np.ndarray


@functools.cache
def batch_ends(prompts: int) -> BatchEnds:
    """Returns the pairs by their `stop`, those of a `stop` by their `start`."""
    below, left = np.tril_indices(prompts)
    return BatchEnds(left, below + 1)


class PromptBatch(NamedTuple):
    """Prompts that are computed together: their places in the order that was given, the number of
    their lanes, and predicted seconds."""

    prompts: tuple[int, ...]
    degree: int
    seconds: float


class ElasticPlan(NamedTuple):
    """Batches of prompts, and the lanes left to the decodes, which go on these in equal numbers.

    latency: summed over all requests, in seconds. in_time: every batch ends within the limit.
    Prompts that no batch has wait for a later step.
    """

    batches: tuple[PromptBatch, ...]
    decode_lanes: int
    latency: float
    in_time: bool


class PromptTable:
    """f(i, k) for prompts in the order of their tokens on up to `lanes` lanes: see the module.

    seconds [g, pairs]: see `BatchTimes.prompts`. `least` [n + 1, lanes + 1]: f, in 32 bit.
    """

    def __init__(
        self, seconds: np.ndarray, prompts: int, degrees: np.ndarray, lanes: int, limit: float
    ):
        self._seconds = seconds
        self._degrees = [degree for degree in degrees.tolist() if degree <= lanes]
        usable = seconds[: len(self._degrees)]
        ends = batch_ends(prompts)
        size = (ends.stop - ends.start).astype(np.float32)
        cost = np.where(usable <= limit, usable * size, INFINITE).astype(np.float32)
        # of the batches that end at i: those of row i [j, g]
        self._cost = [cost[:, i * (i - 1) // 2 : i * (i + 1) // 2].T for i in range(prompts + 1)]
        # f(j, k - g) [j, g, k]: infinite where a batch of degree g leaves fewer than no lanes
        shape = prompts + 1, len(self._degrees), lanes + 1
        self._before = np.full(shape, INFINITE, np.float32)
        self.least = np.full((prompts + 1, lanes + 1), INFINITE, np.float32)
        self.least[0] = 0.0
        together = np.empty(shape, np.float32)
        for i in range(prompts + 1):
            if i:
                np.add(self._before[:i], self._cost[i][..., None], out=together[:i])
                together[:i].min(0).min(0, out=self.least[i])
            for place, degree in enumerate(self._degrees):
                self._before[i, place, degree:] = self.least[i, : lanes + 1 - degree]

    def batches(self, lanes: int, order: Sequence[int]) -> tuple[PromptBatch, ...]:
        """Returns the batches of the best plan on `lanes` lanes, which must exist. order: the place
        of each prompt, by tokens."""
        batches: list[PromptBatch] = []
        i = len(self.least) - 1
        while i:
            best = int((self._before[:i, :, lanes] + self._cost[i]).argmin())
            j, place = divmod(best, len(self._degrees))
            seconds = float(self._seconds[place, i * (i - 1) // 2 + j])
            batches.append(PromptBatch(tuple(order[j:i]), self._degrees[place], seconds))
            i = j
            lanes -= self._degrees[place]
        return tuple(reversed(batches))


def lanes_needed(seconds: np.ndarray, prompts: int, degrees: np.ndarray, limit: float) -> float:
    """Returns the least number of lanes on which all prompts are in batches that end within the
    limit; infinite where none is enough. seconds: see `BatchTimes.prompts`."""
    degree = np.where(seconds <= limit, degrees[:, None], INFINITE).min(0)
    least = np.full(prompts + 1, INFINITE)
    least[0] = 0
    for i in range(1, prompts + 1):
        least[i] = (least[:i] + degree[i * (i - 1) // 2 : i * (i + 1) // 2]).min()
    return float(least[-1])


def decode_latency(
    times: BatchTimes, count: int, lanes: int, load: float, limit: float
) -> np.ndarray:
    """Returns the least summed latency of `count` decodes on at most k lanes [lanes + 1], in equal
    batches; infinite where none ends within the limit."""
    used = np.maximum(np.arange(lanes + 1), 1)
    low, larger = np.divmod(count, used)
    seconds = times.decodes(low, load)
    longest = times.decodes(low + 1, load)
    summed = larger * (low + 1) * longest + (used - larger) * low * seconds
    summed[np.where(larger > 0, longest, seconds) > limit] = INFINITE
    summed[0] = INFINITE if count else 0.0
    return np.minimum.accumulate(summed)


def plan_step(
    times: BatchTimes,
    tokens: Sequence[int] | np.ndarray,
    decodes: int,
    lanes: int,
    load: float = 0.0,
    limit: float = INFINITE,
) -> ElasticPlan:
    """Returns the plan of a step with the least summed latency.

    tokens [n]: new tokens of each prompt; decodes: their number; limit: seconds that no batch may
    exceed, dropped where no plan meets it. Where there are fewer lanes than phases, prompts wait.
    """
    order = np.argsort(tokens, kind="stable")
    seconds = times.prompts(np.asarray(tokens)[order], load)
    for most in dict.fromkeys((limit, INFINITE)):
        of_decodes = decode_latency(times, decodes, lanes, load, most)
        needed = lanes_needed(seconds, len(order), times.degrees, most)
        if needed + np.count_nonzero(of_decodes == INFINITE) > lanes:
            continue
        table = PromptTable(seconds, len(order), times.degrees, lanes, most)
        split = table.least[-1] + of_decodes[::-1]
        used = int(split.argmin())
        batches = table.batches(used, order.tolist())
        latency = sum(len(batch.prompts) * batch.seconds for batch in batches)
        latency += float(of_decodes[lanes - used])
        return ElasticPlan(batches, lanes - used, latency, most == limit)
    return ElasticPlan((), lanes, float(of_decodes[-1]), False)
