"""The paper's hosts as a model of time, calibrated on its tables 5, 6 and 8; all other figures are
then predictions.

A layer takes its linear parts, by the tokens of one host or as long as weights are read, and the
exchange between hosts (`jaxserve.lanes.exchange`). Prefill runs without CUDA graphs (section
4.3): for every further host it also takes the time in which a step of the ring is issued, which
nothing hides, and its all-to-all starts later than that of decode.

What is fitted, by relative error: attention to the single calls of tables 5 and 8, a hop and the
all-to-all to SendRecv and All2All there, how much of a hop is hidden to the sums of table 8; linear
parts to TTFT and TTIT of one host in table 6, and the issue of a step to the TTFT of two. No
constant is fitted to table 4, table 7 or the figures; what the model distinguishes was chosen with
table 4 known. The paper has no all-gather: it is given the rates of a hop.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from experiments.context_parallel.paper import (
    GPUS,
    HEADS,
    MODEL,
    TABLE5,
    TABLE6,
    TABLE8,
    Decode,
    LatencyRow,
    Step,
)
from experiments.context_parallel.work import work_of
from jaxserve.lanes.choice import ExchangeChooser, Pick
from jaxserve.lanes.exchange import EXCHANGES, ExchangeBytes
from jaxserve.lanes.rates import ExchangeRates, ExchangeTimes, Link
from jaxserve.lanes.work import ExchangeWork

MICRO = 1e-6
MILLI = 1e-3
RANKS = 4  # of tables 4 and 5
RINGS = ("pass_kv", "pass_q")  # what the paper has
ORDER = ("gather", *RINGS)  # of exchanges in results
LENIENT = 0.05  # relative error from which one point of attention counts less


def fastest(times: ExchangeTimes, work: ExchangeWork, seconds: Mapping[str, float]) -> str:
    """Picks the fastest of the exchanges that are compared here."""
    return min(ORDER, key=seconds.__getitem__)


@dataclass(frozen=True)
class PaperHost:
    """Rates of one GPU in prefill and decode, and seconds per layer of what is not attention:
    `floor`, or `token` per token of a host where that is more; `issue` per further host, in
    prefill."""

    prefill: ExchangeRates
    decode: ExchangeRates
    floor: float = 0.0
    token: float = 0.0
    issue: float = 0.0

    def chooser(self, hosts: int, chooser: str | Pick = fastest) -> ExchangeChooser:
        """Returns the chooser for prefill."""
        return ExchangeChooser(hosts, HEADS, self.prefill, chooser=chooser)

    def linear(self, tokens: int) -> float:
        return max(self.floor, self.token * tokens)

    def prefill_attention(self, cached: int, new: int, hosts: int) -> dict[str, float]:
        """Seconds of a layer's attention and of what it sends, by strategy."""
        return _in_order(self.chooser(hosts).seconds(work_of([(cached, new)], hosts)))

    def decode_attention(self, context: int, hosts: int, batch: int = 1) -> dict[str, float]:
        work = work_of([(context - 1, 1)] * batch, hosts)
        return _in_order(ExchangeChooser(hosts, HEADS, self.decode).seconds(work))

    def ttft(self, cached: int, new: int, hosts: int) -> dict[str, float]:
        """Seconds to the first token, by strategy. Gathered queries are issued once, as for one
        further host."""
        issued = {"gather": min(hosts - 1, 1), "pass_kv": hosts - 1, "pass_q": hosts - 1}
        rest = self.linear(math.ceil(new / hosts))
        return {
            name: MODEL.layers * (rest + self.issue * issued[name] + seconds)
            for name, seconds in self.prefill_attention(cached, new, hosts).items()
        }

    def ttit(self, context: int, hosts: int, batch: int = 1) -> dict[str, float]:
        """Seconds of a decode step of `batch` sequences, by strategy."""
        rest = self.linear(math.ceil(batch / hosts))
        return {
            name: MODEL.layers * (rest + seconds)
            for name, seconds in self.decode_attention(context, hosts, batch).items()
        }

    def with_links(self, link: Link) -> PaperHost:
        """Decode with other links between hosts, one kind for all that is sent."""
        decode = dataclasses.replace(self.decode, hop=link, all_gather=link, all_to_all=link)
        return dataclasses.replace(self, decode=decode)

    # --- tensor parallelism over hosts (section 4.2.2)

    def tp_ttft(self, tokens: int, hosts: int) -> float:
        return self.ttft(0, tokens, 1)["gather"] / hosts + MODEL.layers * 2 * self.all_reduce(
            tokens, hosts
        )

    def tp_ttit(self, context: int, hosts: int) -> float:
        return self.ttit(context, 1)["gather"] / hosts + MODEL.layers * 2 * self.all_reduce(
            1, hosts
        )

    def all_reduce(self, tokens: int, hosts: int) -> float:
        """Seconds of a sum of activations over hosts, each GPU for its part of them: there and back
        in log2(hosts) hops, at the bandwidth of a ring."""
        size = tokens * MODEL.d_model * HEADS.item / GPUS
        hop = self.decode.hop
        return 2 * math.log2(hosts) * hop.seconds + 2 * (hosts - 1) / hosts * size / hop.bytes_per_s


def _in_order(seconds: dict[str, float]) -> dict[str, float]:
    return {name: seconds[name] for name in ORDER}


@functools.cache
def calibrated(hidden: float | None = None) -> PaperHost:
    """Fits a system to tables 5, 6 and 8. hidden: share of a hop of prefill that is; None: as of
    decode."""
    flops, read, launch = _attention()
    latency, per_byte = _links(
        [(0, _sent(row).hop, row.hop) for row in TABLE5]
        + [(0, traffic.hop, row.hops / traffic.hops) for row, traffic in _decodes()]
    )
    hop = Link(latency, 1 / per_byte)
    late, soon, per_byte = _links(
        [(0, _sent(row).returned, row.exchange) for row in TABLE5 if row.exchange]
        + [(1, traffic.returned, row.exchange) for row, traffic in _decodes()]
    )
    decode = ExchangeRates(flops, read, launch, hop, hop, Link(soon, 1 / per_byte), _hidden())
    prefill = dataclasses.replace(
        decode,
        all_to_all=Link(late, 1 / per_byte),
        hidden=decode.hidden if hidden is None else hidden,
    )
    return _whole(PaperHost(prefill, decode))


def _attention() -> tuple[float, float, float]:
    """FLOP/s, bytes read per second, seconds of a call. The loss is lenient: with four sequences of
    32K one host takes 60.1 us, with one of 128K 38.9, and reads as much."""
    works = [work_of([(row.cached, row.new)], RANKS) for row in TABLE5]
    points: list[tuple[float, float, float]] = [
        (work.pairs / RANKS**2, work.shard, row.attention) for work, row in zip(works, TABLE5)
    ]
    points += [
        (tokens, tokens, row.op)
        for row in TABLE8
        for tokens in [math.ceil(row.batch / row.hosts) * row.tokens / row.hosts]
    ]
    pairs, read, us = np.array(points, float).T

    def errors(logs: np.ndarray) -> np.ndarray:
        flops, bandwidth, launch = np.exp(logs)
        computed = 4 * HEADS.heads * HEADS.head_dim * pairs / flops
        loaded = HEADS.kv_bytes * read / bandwidth
        return (launch + np.maximum(computed, loaded)) / (us * MICRO) - 1

    found = least_squares(errors, np.log([500e12, 2e12, 5e-6]), loss="soft_l1", f_scale=LENIENT)
    flops, bandwidth, launch = np.exp(found.x).tolist()
    return flops, bandwidth, launch


def _links(points: Sequence[tuple[int, float, float]]) -> list[float]:
    """Seconds of each kind of message, then seconds per byte of all. points: (kind, bytes, us)."""
    kinds = max(kind for kind, *_ in points) + 1
    which, size, us = (np.array(column) for column in zip(*points))

    def errors(logs: np.ndarray) -> np.ndarray:
        values = np.exp(logs)
        return (values[which] + size * values[-1]) / (us * MICRO) - 1

    return np.exp(least_squares(errors, np.log([1e-4] * kinds + [1 / 30e9])).x).tolist()


def _sent(row: Step) -> ExchangeBytes:
    return EXCHANGES[row.strategy].traffic(work_of([(row.cached, row.new)], RANKS), HEADS)


def _decodes() -> list[tuple[Decode, ExchangeBytes]]:
    """Table 8's columns with more than one host, and what they send."""
    works: list[tuple[Decode, ExchangeWork]] = [
        (row, work_of([(row.tokens - 1, 1)] * row.batch, row.hosts))
        for row in TABLE8
        if row.hosts > 1
    ]
    return [(row, EXCHANGES["pass_q"].traffic(work, HEADS)) for row, work in works]


def _hidden() -> float:
    """Share of the shorter of a hop and the attention beside it by which table 8's wholes are less
    than the sums of their parts."""
    rows = [row for row, _ in _decodes()]
    shorter = np.array(
        [(row.hosts - 1) * min(row.hops / (row.hosts - 1), row.loop / row.hosts) for row in rows]
    )
    saved = np.array([row.loop + row.hops + row.exchange - row.whole for row in rows])
    return float(np.clip(shorter @ saved / (shorter @ shorter), 0, 1))


def _whole(system: PaperHost) -> PaperHost:
    """Adds what a step takes besides, from table 6."""
    one, two = ([row for row in TABLE6 if row.hosts == hosts] for hosts in (1, 2))
    to_first = lambda row, trial: (
        trial.ttft(0, row.tokens, row.hosts)["pass_kv"] / (row.ttft * MILLI)
    )
    to_next = lambda row, trial: trial.ttit(row.tokens, row.hosts)["pass_q"] / (row.ttit * MILLI)
    system = _fitted(system, "token", one, to_first)
    system = _fitted(system, "floor", one, to_next)
    return _fitted(system, "issue", two, to_first)


def _fitted(
    system: PaperHost,
    name: str,
    rows: Sequence[LatencyRow],
    share: Callable[[LatencyRow, PaperHost], float],
) -> PaperHost:
    """The one constant for which the model's share of what was measured is nearest to 1."""
    trial = lambda logs: dataclasses.replace(system, **{name: float(np.exp(logs[0]))})
    return trial(
        least_squares(
            lambda logs: [share(row, trial(logs)) - 1 for row in rows],
            [math.log(1e-4)],
            x_scale=0.1,
        ).x
    )
