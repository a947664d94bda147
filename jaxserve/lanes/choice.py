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
    own. decode_chooser: the exchange of spread decodes; auto: that of least seconds. block: tokens
    of a page. moves: pages that a step moves from each lane to each, where it moves some. seen: by
    page group behind the first, the blocks of a sequence that have a page there, at most.
    corrections: by exchange, where steps were measured; decode_corrections: of spread decodes, with
    what these take besides attention. links: for groups of other sizes; empty: those of `rates`,
    whatever the size. move_times: of pages that change lanes, where steps that move some were
    measured; None: as an all-to-all takes, hidden as `rates` say. Errors: ConfigError that names
    the field.
    """

    chooser: str | Pick = "auto"
    decode_chooser: str = DEFAULT_EXCHANGE
    block: int = 1
    moves: int = 0
    seen: tuple[int, ...] = ()
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
        """Seconds per layer of attention and what lanes send for it, and for states, by exchange;
        without corrections."""
        if self.lanes == 1:
            return dict.fromkeys(EXCHANGES, self.attention(work.pairs, work.shard, work.tokens))
        states = self._state_seconds()
        return {name: row.of_chunks(work, self) + states for name, row in EXCHANGES.items()}

    def _state_seconds(self) -> float:
        """Seconds in which states pass between lanes, in one round (`sharding.states`), spread over
        all layers: rates are those of messages of the layers that attend, spread likewise."""
        heads = self.heads
        if not heads.passed:
            return 0.0
        sent = self.rates.all_gather((self.lanes - 1) * heads.passed)
        return (1 / heads.attending - 1) * sent

    def decodes(
        self,
        share: int,
        kv: float,
        visits: float = 1.0,
        beside: str | None = None,
        moves: bool = False,
    ) -> Decision:
        """Decides for the spread decodes of a step: share, kv, visits as of `work_of_decodes`;
        beside, moves as of `decode_choices`. The seconds per layer are those that lanes take
        besides the attention of as many decodes of their own.

        What a lane of N sends for its s decodes, with q bytes of a query, k of a new key and value
        and p of a partial result with its log-sum-exp; messages; and calls of attention:

        - `gather`: (N-1) s (q + k) in an all-gather, (N-1) s p in an all-to-all; 2 messages that
          nothing hides; 1 call, over the decodes of all lanes.
        - `pass_q`: (N-1) s k in an all-gather, (N-1) s q in N - 1 hops, each beside a call, and
          (N-1) s p in an all-to-all; N + 1 messages; N calls, each over the decodes of one lane.
        - `visit`: at most (N-1) r q, (N-1) r p and (N-1) r k in all-to-alls, with room for r rows
          per pair of lanes, of which all but the first run beside a lane's own call; 3 messages; 2
          calls.

        Decodes that exchange as the spread chunks beside them do only add bytes to the messages of
        these; by `pass_q` an all-gather of their own is left, for chunks need none.
        """
        work = work_of_decodes(self.lanes, share, kv, visits)
        exchanges = decode_exchanges()
        alone = {name: row.of_decodes(work, self) for name, row in exchanges.items()}
        seconds = dict(_corrected(alone, self.decode_corrections))
        if beside in exchanges and alone[beside] > 0:
            row = exchanges[beside]
            seconds[beside] *= row.of_decodes(work, self.joined(row.links)) / alone[beside]
        names = decode_choices(self.decode_chooser, beside, moves)
        return Decision(min(names, key=seconds.__getitem__), seconds)

    def move_seconds(self) -> float:
        """Seconds of the all-to-all in which a step moves pages of a pool between lanes, however
        few they are; without a correction."""
        size = (self.lanes - 1) * self.moves * self.block * self.heads.kv_bytes
        return self.rates.all_to_all(size)

    def exposed_moves(self, linear: float, layers: int) -> float:
        """Seconds of a step's `layers` layers in which pages change lanes and nothing else runs.
        linear: seconds of a layer's linear parts."""
        times = self.move_times or MoveTimes(hidden=self.rates.hidden)
        return times.exposed(self.move_seconds(), linear, self.pools(layers))

    def pools(self, layers: int) -> int:
        """Counts the pools of these layers, each of which is that of a layer in every page
        group."""
        return -(-layers // (1 + len(self.seen)))

    def pages_of(self, blocks: int) -> int:
        """Returns the pages that the first `blocks` blocks of a sequence have."""
        return blocks + sum(min(blocks, seen) for seen in self.seen)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class DecodeChoice:
    """The choice of how a step's spread decodes exchange, made once it is known what is beside
    them. share, kv, visits: see `work_of_decodes`."""

    chooser: ExchangeChooser
    share: int
    kv: float
    visits: float
    _decisions: dict[tuple[str | None, bool], Decision] = dataclasses.field(default_factory=dict)

    def beside(self, exchange: str | None, moves: bool = False) -> Decision:
        """Decides beside spread chunks with this exchange, None: there are none; moves: and beside
        pages that change lanes."""
        known = exchange, moves
        if known not in self._decisions:
            self._decisions[known] = self.chooser.decodes(self.share, self.kv, self.visits, *known)
        return self._decisions[known]


def decode_choices(setting: str, beside: str | None = None, moves: bool = False) -> tuple[str, ...]:
    """Lists the exchanges that spread decodes may choose under a setting of `--decode_exchange`.
    beside: the exchange of the step's spread chunks; None: it has none. moves: whether pages change
    lanes in the step.

    Each pair of exchanges is a program, so `auto` does without some: decodes visit beside chunks
    that visit, and beside no others; and where pages move, they are gathered or go with chunks.
    """
    names: tuple[str, ...] = (setting,)
    if setting == "auto":
        names = tuple(decode_exchanges())
        if beside is not None:
            rooms = EXCHANGES[beside].has_rooms
            names = tuple(name for name in names if EXCHANGES[name].has_rooms == rooms)
    if moves:
        few = DEFAULT_EXCHANGE, beside
        names = tuple(name for name in names if name in few) or (DEFAULT_EXCHANGE,)
    return names


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
