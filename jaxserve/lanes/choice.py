"""Chooses the exchange of a step: by the least predicted seconds, by Algorithms 1 and 5 of the
Context Parallelism paper, or always the same one."""

from __future__ import annotations

import dataclasses
from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.api.batch import DEFAULT_EXCHANGE
from jaxserve.lanes.exchange import EXCHANGES, decode_exchanges
from jaxserve.lanes.rates import ExchangeTimes, GroupLinks, links_of, seconds_beside
from jaxserve.lanes.work import ExchangeWork, require, work_of_decodes


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """The exchange that was chosen, and the predicted seconds per layer of all."""

    strategy: str
    seconds: Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Correction:
    """Corrects an exchange by measured steps: it takes `factor` times as long as predicted, and
    `seconds` per layer."""

    seconds: float = 0.0
    factor: float = 1.0

    def __call__(self, predicted: float) -> float:
        return self.seconds + self.factor * predicted


@dataclasses.dataclass(frozen=True, slots=True)
class MoveTimes:
    """Times of moves of pages between lanes. correction: of an all-to-all of as many bytes in each
    layer; hidden: share of the shorter of a layer's move and the linear parts of the layer before
    it that runs while the longer one does. Errors: ConfigError for a share beyond 1."""

    correction: Correction = Correction()
    hidden: float = 1.0

    def __post_init__(self) -> None:
        require(0 <= self.hidden <= 1, "hidden", self.hidden, "a share from 0 to 1")

    def exposed(self, sent: float, linear: float, layers: int) -> float:
        """Seconds of `layers` layers in which pages move and nothing else runs: all that the first
        layer's take, and of each other one's what the layer before does not hide (Tetris, section
        4.1). sent: seconds per layer of the all-to-all; linear: of a layer's linear parts."""
        moving = self.correction(sent)
        return moving + (layers - 1) * (seconds_beside(moving, linear, self.hidden) - linear)


# picks an exchange by a group's times, a step's work and the predicted seconds by exchange
Pick = Callable[[ExchangeTimes, ExchangeWork, Mapping[str, float]], str]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule by which steps choose their exchange. summary: for help texts."""

    summary: str
    pick: Pick


def least_seconds(times: ExchangeTimes, work: ExchangeWork, seconds: Mapping[str, float]) -> str:
    """Picks the least predicted time; the first of the table where all take as long."""
    return min(seconds, key=seconds.__getitem__)


def _passes_kv(times: ExchangeTimes, work: ExchangeWork, returned: float) -> bool:
    """Says if the paper's algorithms pass KV: where attention hides its hops (Eq. 2), or its
    messages are smaller than those of queries (Eq. 1). returned: the share of new tokens by which
    the all-to-all of pass-Q lowers that threshold (appendix C)."""
    heads = times.heads
    rates = times.rates
    hidden = (
        work.tokens * heads.pair_flops * rates.hop.bytes_per_s
        >= times.lanes * rates.flops_per_s * heads.kv_bytes
    )
    equal_miss = heads.kv_bytes / heads.query_bytes
    return hidden or work.tokens / work.context >= equal_miss - returned


def algorithm_1(times: ExchangeTimes, work: ExchangeWork, seconds: Mapping[str, float]) -> str:
    """Picks pass-KV where it is hidden or its messages are smaller."""
    return _PAPER[_passes_kv(times, work, 0.0)]


def algorithm_5(times: ExchangeTimes, work: ExchangeWork, seconds: Mapping[str, float]) -> str:
    """Picks as Algorithm 1 does, with the all-to-all of pass-Q counted (appendix C)."""
    rates = times.rates
    flops = work.lanes * rates.flops_per_s * times.heads.item
    return _PAPER[_passes_kv(times, work, 4 * work.tokens * rates.hop.bytes_per_s / flops)]


_PAPER = {False: "pass_q", True: "pass_kv"}  # the exchanges that its algorithms choose from
CHOOSERS: dict[str, Rule] = {
    "auto": Rule("whichever is predicted to be fastest in each step", least_seconds),
    "alg1": Rule("as the context parallel paper's Algorithm 1 chooses", algorithm_1),
    "alg5": Rule("as its Algorithm 5 chooses", algorithm_5),
}


@dataclasses.dataclass(frozen=True)
class ExchangeChooser(ExchangeTimes):
    """Chooses for steps in which groups of `lanes` lanes meet, and predicts how long what it
    chooses takes.

    chooser: a name of `CHOOSERS` or of an exchange, which is then always chosen, or a rule of one's
    own. decode_chooser: the exchange of steps whose spread rows are decodes alone; auto: that of
    least seconds. block: tokens of a page. moves: pages that a step moves from each lane to each,
    where it moves some. corrections: by exchange, where steps were measured; decode_corrections:
    of steps whose spread rows are decodes alone, with what these take besides attention. links: for
    groups of other sizes; empty: those of `rates`, whatever the size. move_times: of pages that
    change lanes, where steps that move some were measured; None: as an all-to-all takes, hidden as
    `rates` say. Errors: ConfigError that names the field.
    """

    chooser: str | Pick = "auto"
    decode_chooser: str = DEFAULT_EXCHANGE
    block: int = 1
    moves: int = 0
    corrections: Mapping[str, Correction] = dataclasses.field(default_factory=dict)
    decode_corrections: Mapping[str, Correction] = dataclasses.field(default_factory=dict)
    links: GroupLinks = dataclasses.field(default_factory=dict)
    move_times: MoveTimes | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        names = list(EXCHANGE_CHOICES)
        fits = callable(self.chooser) or self.chooser in names
        require(fits, "exchange", repr(self.chooser), f"one of {', '.join(names)}")
        names = list(DECODE_CHOICES)
        fits = self.decode_chooser in names
        require(fits, "decode_exchange", repr(self.decode_chooser), f"one of {', '.join(names)}")

    def for_groups(self, lanes: int) -> ExchangeChooser:
        """Returns the chooser for groups of `lanes` lanes, with the links that they have."""
        rates = self.rates
        if self.links:
            rates = rates.with_links(links_of(self.links, lanes))
        return dataclasses.replace(self, lanes=lanes, rates=rates)

    def decide(self, work: ExchangeWork) -> Decision:
        """Decides for the spread chunks of a step."""
        seconds = _corrected(self.seconds(work), self.corrections)
        return Decision(self._picked(work, seconds), seconds)

    def _picked(self, work: ExchangeWork, seconds: Mapping[str, float]) -> str:
        if not isinstance(self.chooser, str):
            return self.chooser(self, work, seconds)
        if self.chooser in CHOOSERS:
            return CHOOSERS[self.chooser].pick(self, work, seconds)
        return self.chooser

    def seconds(self, work: ExchangeWork) -> dict[str, float]:
        """Seconds per layer of attention and what lanes send for it, by exchange; without
        corrections."""
        if self.lanes == 1:
            return dict.fromkeys(EXCHANGES, self.attention(work.pairs, work.shard, work.tokens))
        return {name: row.of_chunks(work, self) for name, row in EXCHANGES.items()}

    def decodes(self, share: int, kv: float, visits: float = 1.0) -> Decision:
        """Decides for a step whose spread rows are decodes alone: see `work_of_decodes`. The
        seconds are those that lanes take besides the attention of as many decodes of their own."""
        work = work_of_decodes(self.lanes, share, kv, visits)
        seconds = {name: row.of_decodes(work, self) for name, row in decode_exchanges().items()}
        seconds = _corrected(seconds, self.decode_corrections)
        if self.decode_chooser == "auto":
            return Decision(least_seconds(self, work, seconds), seconds)
        return Decision(self.decode_chooser, seconds)

    def move_seconds(self) -> float:
        """Seconds per layer of the all-to-all in which a step moves pages between lanes, however
        few they are; without a correction."""
        size = (self.lanes - 1) * self.moves * self.block * self.heads.kv_bytes
        return self.rates.all_to_all(size)

    def exposed_moves(self, linear: float, layers: int) -> float:
        """Seconds of a step's `layers` layers in which pages change lanes and nothing else runs.
        linear: seconds of a layer's linear parts."""
        times = self.move_times or MoveTimes(hidden=self.rates.hidden)
        return times.exposed(self.move_seconds(), linear, layers)


def _corrected(
    seconds: dict[str, float], corrections: Mapping[str, Correction]
) -> dict[str, float]:
    """Returns the seconds by exchange, each corrected where a correction of it is known."""
    if not corrections:
        return seconds
    return {
        name: corrections[name](each) if name in corrections else each
        for name, each in seconds.items()
    }


# What the settings --exchange and --decode_exchange may be: an exchange or a rule that chooses one.
EXCHANGE_CHOICES: Mapping[str, Any] = ChainMap[str, Any](CHOOSERS, EXCHANGES)
DECODE_CHOICES: Mapping[str, Any] = {**decode_exchanges(), "auto": CHOOSERS["auto"]}
