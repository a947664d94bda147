"""Chooses how lanes exchange queries and KV in a step: what each strategy sends, how long it takes,
and which one is fastest.

A sequence that is spread over N lanes has a share of its KV on each, and each lane computes a share
of its new tokens. Three strategies give the same attention (context parallel paper, section 3.5,
and Medha, section 3.4):

- `gather`: all lanes get all queries in one all-gather, attend over their own KV, and send the
  partials home in one all-to-all. With the queries go the new keys and values, for a token's KV
  need not belong where the token is computed. Nothing depends on what is cached.
- `pass_kv`: queries stay and KV goes round a ring of lanes in N - 1 hops; a hop runs beside the
  attention of the step before.
- `pass_q`: KV stays and queries go round in N - 1 hops; the partials, which are as long as the
  queries, come home in one all-to-all, which nothing hides. Decodes may go so too, where they are
  all that is spread in a step: their new keys and values are gathered first.

A step's chunks are summed up in `ExchangeWork`. `TRAFFIC` gives the bytes per strategy,
`ExchangeChooser` the seconds, and `CHOOSERS` are the rules by which it picks: the least seconds,
the paper's Algorithms 1 and 5, or always the same one; `fitted` makes another of a line fitted to
measurements (appendix D). Everything is per layer and for one rank of tp: each rank's heads have a
ring of their own (figure 5).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.costs.predictor import Costs
from jaxserve.costs.profiles import ITEM, PARTIAL, Link
from jaxserve.settings.schema import ConfigError

RIDGE = 1e-4  # of the logistic regression: keeps it finite where a line parts all points
MOVED_PER_TOKEN = 4  # tokens of KV that a step moves to another lane for each that a lane computes
MOST_MOVES = 256  # pages that a lane sends to all lanes of a replica in a step
PIECE = 2048  # tokens of KV that a lane of the engine sends on at once in `pass_kv`


def moves_per_pair(chunk_tokens: int, block: int, lanes: int) -> int:
    """Pages that a step moves from each lane to each, at most. chunk_tokens: that a lane computes
    in a step; block: tokens of a page; lanes: of a replica.

    A token's KV is sent in far less time than its linear layers take: with 4 KiB a layer at 200
    GB/s in 0.02 us, beside 0.7 us on an H100 for Llama-3 8B.
    """
    return max(1, min(MOVED_PER_TOKEN * chunk_tokens // block, MOST_MOVES // lanes))


def _need(fits: bool, field: str, value: Any, rule: str) -> None:
    if not fits:
        raise ConfigError(field, f"{value} is not {rule}")


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads of one rank. item: bytes of an element of queries, keys and values; partial:
    of partial outputs and their log-sum-exp, 4 in our engine, `item` in the paper; stored: of one
    key or value as it lies on pages, its scale included; 0: head_dim x item. Errors: ConfigError
    for a field below 1."""

    heads: int
    kv_heads: int
    head_dim: int
    item: int = ITEM
    partial: int = PARTIAL
    stored: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            low = 0 if field.name == "stored" else 1
            _need(
                getattr(self, field.name) >= low,
                field.name,
                getattr(self, field.name),
                f"{low} or more",
            )

    @property
    def query_bytes(self) -> int:
        """Of a token's queries."""
        return self.heads * self.head_dim * self.item

    @property
    def new_kv_bytes(self) -> int:
        """Of a new token's key and value."""
        return 2 * self.kv_heads * self.head_dim * self.item

    @property
    def kv_bytes(self) -> int:
        """Of a token's key and value on pages."""
        return 2 * self.kv_heads * (self.stored or self.head_dim * self.item)

    @property
    def partial_bytes(self) -> int:
        """Of a token's partial output and log-sum-exp over one lane's KV."""
        return self.heads * (self.head_dim + 1) * self.partial


@dataclasses.dataclass(frozen=True, slots=True)
class ExchangeWork:
    """Sums over a step's spread chunks: over all lanes, and on the lane that has most."""

    lanes: int
    tokens: int  # new ones, T
    context: int  # cached and new, P + T
    pairs: float  # of a query and a key that it attends to
    share: int  # new tokens of a lane, at most
    shard: int  # tokens of KV on a lane, at most; what goes round is padded to it
    touched: float  # of these, those of sequences that have queries in a step of the ring
    # what differs where chunks are on some of the lanes only; 0: they are on all
    even: int = 0  # new tokens of a lane where any lane may compute them: gathered ones
    holders: int = 0  # lanes that hold a sequence
    here: float = 0.0  # pairs of all queries and the KV of the lane that attends most
    step: float = 0.0  # pairs of one lane's queries and another's KV, at most

    @property
    def cached(self) -> int:
        return self.context - self.tokens

    @property
    def gathered_pairs(self) -> float:
        """Of all queries and one lane's KV, at most."""
        return self.here or self.pairs * self.shard / self.context

    @property
    def step_pairs(self) -> float:
        """Of one lane's queries and one lane's KV, at most: those of a step of the ring."""
        return self.step or self.pairs * self.shard / self.context * self.share / self.tokens


def work_of(
    chunks: Sequence[tuple[int, int]], lanes: int, shards: Sequence[int] | None = None
) -> ExchangeWork:
    """Sums up chunks of (cached, new) tokens. New tokens are dealt evenly, decodes sequence by
    sequence (Alg. 4).

    shards: per chunk, tokens of KV with the new ones on the lane that holds most; default: an even
    split of both (section 3.5.1). Errors: ConfigError that names lanes, chunks, cached, new or
    shards."""
    _need(lanes >= 1, "lanes", lanes, "1 or more")
    _need(len(chunks) > 0, "chunks", list(chunks), "one or more")
    _need(shards is None or len(shards) == len(chunks), "shards", shards, "one for each chunk")
    tokens = 0
    context = 0
    share = 0
    decodes = 0
    pairs = 0.0
    prefill = 0
    decode = 0
    for index, (cached, new) in enumerate(chunks):
        if cached < 0 or new < 1:
            _need(cached >= 0, "cached", cached, "0 or more")
            _need(new >= 1, "new", new, "1 or more")
        shard = -(-cached // lanes) - (-new // lanes) if shards is None else shards[index]
        tokens = tokens + new
        context = context + cached + new
        pairs += new * (cached + (new + 1) / 2)
        if new == 1:
            decodes = decodes + 1
            decode = decode + shard
        else:
            share = share - (-new // lanes)
            prefill = prefill + shard
    visits = -(-decodes // lanes)
    touched = prefill + (decode * visits / decodes if decodes else 0.0)
    return ExchangeWork(lanes, tokens, context, pairs, share + visits, prefill + decode, touched)


def work_of_decodes(lanes: int, share: int, kv: float) -> ExchangeWork:
    """Sums up decodes in a group of `lanes` lanes, each of which sends as many rows as the one that
    is home to most, `share`, and of whose KV a lane holds at most `kv` tokens. Of these, one lane's
    queries need an even share."""
    return ExchangeWork(
        lanes, lanes * share, math.ceil(lanes * kv), kv * lanes, share, math.ceil(kv), kv / lanes
    )


@dataclasses.dataclass(frozen=True, slots=True)
class SpreadChunks:
    """The spread chunks of a step, each of which bears on the lanes of its group. group_size: of
    the largest group; holders: most lanes that hold a chunk's sequence.

    by_lane [9, lanes]: sums over the chunks of the lane's groups: new tokens; tokens of context;
    pairs of query and key; new tokens of the lane where any lane of the group may compute them
    (gathered); and what the lane itself has: new tokens that it computes round a ring; tokens of KV
    that it holds; pairs of all queries and its KV; pairs of its queries and another lane's KV, at
    most; tokens of KV that these are paired with."""

    by_lane: np.ndarray
    group_size: int = 1
    holders: int = 0

    @classmethod
    def none(cls, lanes: int) -> SpreadChunks:
        return cls(np.zeros((9, lanes)))

    def plus(
        self, cached: int, new: int, computed: np.ndarray, held: np.ndarray, group: range
    ) -> SpreadChunks:
        """With a chunk of `new` tokens after `cached` ones. computed, held [lanes]: each lane's
        share of the new tokens and of all KV; group: the lanes that compute it."""
        context = cached + new
        pairs = new * (cached + (new + 1) / 2)
        most = held.max()
        own = np.zeros_like(self.by_lane)
        totals = new, context, pairs, -(-new // len(group))
        own[:4, group.start : group.stop] = np.array(totals)[:, None]
        own[4] = new * computed
        own[5] = context * held
        own[6] = pairs * held
        own[7] = pairs * most * computed
        own[8] = context * most * (computed > 0)
        return SpreadChunks(
            self.by_lane + own,
            max(self.group_size, len(group)),
            max(self.holders, int(np.count_nonzero(held))),
        )

    @property
    def lanes(self) -> np.ndarray:
        """[lanes] bool; those that some chunk bears on."""
        return self.by_lane[0] > 0

    def computed(self, strategy: str) -> list[int]:
        """New tokens that each lane computes: gathered ones go to all lanes of a group alike."""
        return np.ceil(self.by_lane[3 if strategy == "gather" else 4]).astype(int).tolist()

    def work(self) -> ExchangeWork:
        """The sums, on the lane that has most of each."""
        tokens, context, pairs, even, share, shard, here, step, touched = self.by_lane.max(
            1
        ).tolist()
        return ExchangeWork(
            self.group_size,
            int(tokens),
            int(context),
            pairs,
            math.ceil(share),
            math.ceil(shard),
            touched,
            int(even),
            self.holders,
            here,
            step,
        )


# --- bytes


@dataclasses.dataclass(frozen=True, slots=True)
class ExchangeBytes:
    """Bytes that one lane sends (and receives) per layer. `rounds` times `lanes - 1` hops of `hop`
    bytes each; then bytes of an all-gather and of an all-to-all, each in `lanes - 1` messages; 0
    where there is none."""

    lanes: int
    rounds: int = 0
    hop: int = 0
    gathered: int = 0
    exchanged: int = 0

    @property
    def hops(self) -> int:
        return self.rounds * (self.lanes - 1)

    @property
    def messages(self) -> int:
        return self.hops + (self.lanes - 1) * ((self.gathered > 0) + (self.exchanged > 0))

    @property
    def bytes(self) -> int:
        return self.hops * self.hop + self.gathered + self.exchanged


def gather(work: ExchangeWork, heads: Heads, piece: int = 0) -> ExchangeBytes:
    """(N-1) T/N (N_H + 2 N_KV) H e for queries, keys and values; (N-1) T/N N_H (H + 1) partial for
    the partials."""
    far = (work.lanes - 1) * (work.even or work.share)
    return ExchangeBytes(
        work.lanes,
        gathered=far * (heads.query_bytes + heads.new_kv_bytes),
        exchanged=far * heads.partial_bytes,
    )


def pass_kv(work: ExchangeWork, heads: Heads, piece: int = 0) -> ExchangeBytes:
    """(N-1) 2 (T+P)/N N_KV H e, with the fullest lane's shard for (T+P)/N: messages of a ring are
    of equal size (section 3.5.2). KV goes as it is stored, in pieces of `piece` tokens, the last
    one padded; 0: a shard at once, as in the paper."""
    piece = piece or max(work.shard, 1)
    return ExchangeBytes(work.lanes, rounds=-(-work.shard // piece), hop=piece * heads.kv_bytes)


def pass_q(work: ExchangeWork, heads: Heads, piece: int = 0) -> ExchangeBytes:
    """(N-1) T/N N_H H e around the ring. Then a lane has partials of all N shares of T/N tokens
    over its KV and sends N-1 of them home: (N-1) T/N N_H (H + 1) partial (appendix C, which counts
    one log-sum-exp per token, not per head)."""
    return ExchangeBytes(
        work.lanes,
        rounds=1,
        hop=work.share * heads.query_bytes,
        exchanged=(work.lanes - 1) * work.share * heads.partial_bytes,
    )


def pass_q_decodes(work: ExchangeWork, heads: Heads, piece: int = 0) -> ExchangeBytes:
    """As `pass_q`, and (N-1) T/N 2 N_KV H e for the new keys and values of decodes: these may
    belong on any lane, and are gathered."""
    gathered = (work.lanes - 1) * work.share * heads.new_kv_bytes
    return dataclasses.replace(pass_q(work, heads), gathered=gathered)


TRAFFIC: dict[str, Callable[..., ExchangeBytes]] = {
    "gather": gather,
    "pass_kv": pass_kv,
    "pass_q": pass_q,
}
# of steps whose spread rows are decodes alone
DECODE_TRAFFIC: dict[str, Callable[..., ExchangeBytes]] = {
    "gather": gather,
    "pass_q": pass_q_decodes,
}


# --- seconds


@dataclasses.dataclass(frozen=True, slots=True)
class ExchangeRates:
    """How fast one rank attends and sends: measured, not off a data sheet (section 3.4). hidden:
    share of the shorter of a hop and the attention beside it that runs while the longer one does.
    Errors: ConfigError for a rate that is not positive, or a share beyond 1."""

    flops_per_s: float  # attention of many queries
    read_bytes_per_s: float  # KV, by attention of few
    launch: float  # seconds that every call of attention takes besides
    hop: Link  # to the next lane of the ring
    gather: Link  # an all-gather, by the bytes that a lane receives
    exchange: Link  # an all-to-all, by the bytes that a lane sends
    hidden: float = 1.0

    def __post_init__(self) -> None:
        for field in ("flops_per_s", "read_bytes_per_s"):
            _need(getattr(self, field) > 0, field, getattr(self, field), "above 0")
        for field in ("hop", "gather", "exchange"):
            _need(
                getattr(self, field).bytes_per_s > 0,
                field,
                getattr(self, field),
                "above 0 bytes per second",
            )
        _need(self.launch >= 0, "launch", self.launch, "0 or more")
        _need(0 <= self.hidden <= 1, "hidden", self.hidden, "a share from 0 to 1")

    def beside(self, hop: float, attention: float) -> float:
        """Seconds of a hop and the attention that runs beside it."""
        return max(hop, attention) + (1 - self.hidden) * min(hop, attention)


def rates_of(costs: Costs, heads: Heads) -> ExchangeRates:
    """Rates that say what a profile's costs of attention and of the exchange between lanes say.
    What costs nothing is infinitely fast."""
    per = lambda amount, seconds: amount / seconds if seconds > 0 else math.inf
    token = heads.query_bytes + heads.new_kv_bytes + heads.partial_bytes
    link = Link(costs.kvp / 2, per(token, costs.kvp_token))
    return ExchangeRates(
        per(4 * heads.heads * heads.head_dim, costs.pair),
        per(heads.kv_bytes, max(costs.read, costs.decode_kv)),
        costs.chunk,
        link,
        link,
        link,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Boundary:
    """The paper's line between the rings (appendix D): pass-KV where h = new log(T) + miss log(T /
    (T+P)) + constant is above 0; natural logarithms."""

    new: float
    miss: float
    constant: float

    def __call__(self, cached: int, new: int) -> float:
        return self.new * math.log(new) + self.miss * math.log(new / (new + cached)) + self.constant


def fit_boundary(points: Sequence[tuple[int, int, float, float]]) -> Boundary:
    """Fits the line that best tells where pass-KV is faster, by logistic regression. points:
    (cached, new, seconds of pass-KV, seconds of pass-Q). Where all points have one total length it
    cannot be told apart from one in T alone; the smallest coefficients are then taken. Errors:
    ConfigError where the same ring is faster at all points."""
    table = np.array(points, float).reshape(-1, 4)
    faster = (table[:, 2] < table[:, 3]).astype(float)
    _need(
        0 < faster.sum() < len(faster),
        "points",
        f"{len(points)} measurements",
        "a set in which each ring is faster somewhere",
    )
    x = np.log(np.stack([table[:, 1], table[:, 1] / (table[:, 0] + table[:, 1])], 1))
    middle = x.mean(0)
    spread = np.maximum(x.std(0), 1e-9)
    design = np.column_stack([(x - middle) / spread, np.ones(len(x))])
    ridge = RIDGE * np.diag([1.0, 1.0, 0.0])
    found = np.zeros(3)
    for _ in range(100):  # Newton's method
        share = 1 / (1 + np.exp(-np.clip(design @ found, -30, 30)))
        slope = design.T @ (share - faster) / len(x) + ridge @ found
        hessian = (design.T * (share * (1 - share))) @ design / len(x) + ridge + 1e-12 * np.eye(3)
        step = np.linalg.solve(hessian, slope)
        found -= step / max(1.0, float(np.abs(step).max()))
        if np.abs(step).max() < 1e-9:
            break
    new, miss = (found[:2] / spread).tolist()
    return Boundary(new, miss, float(found[2] - (found[:2] / spread) @ middle))


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """The strategy, and the predicted seconds per layer of all."""

    strategy: str
    seconds: Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Correction:
    """What measured steps say of an exchange: it takes `factor` times as long as predicted, and
    `seconds` per layer."""

    seconds: float = 0.0
    factor: float = 1.0

    def __call__(self, predicted: float) -> float:
        return self.seconds + self.factor * predicted


# picks a strategy by a chooser's rates, a step's work and the predicted seconds by strategy
Chooser = Callable[["ExchangeChooser", ExchangeWork, Mapping[str, float]], str]


@dataclasses.dataclass(frozen=True)
class ExchangeChooser:
    """Chooses for steps in which groups of `lanes` lanes meet, and tells how long what it chooses
    takes. chooser: a name of `CHOOSERS`, or a rule of one's own. piece: tokens of KV that a lane
    sends on at once, see `pass_kv`. costs: of attention, where a profile has them; None: as the
    rates say. block: tokens of a page. moves: pages that a step moves from each lane to each, where
    it moves some. decode_exchange: strategy of steps whose spread rows are decodes alone, of
    `DECODE_TRAFFIC`; auto: that of least seconds. corrections: by strategy, where steps were
    measured. Errors: ConfigError that names the field."""

    lanes: int
    heads: Heads
    rates: ExchangeRates
    chooser: str | Chooser = "roofline"
    piece: int = 0
    costs: Costs | None = None
    block: int = 1
    moves: int = 0
    decode_exchange: str = "gather"
    corrections: Mapping[str, Correction] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _need(self.lanes >= 1, "lanes", self.lanes, "1 or more")
        _need(self.piece >= 0, "piece", self.piece, "0 or more")
        known = callable(self.chooser) or self.chooser in CHOOSERS
        _need(known, "chooser", repr(self.chooser), f"one of {', '.join(CHOOSERS)}")
        some = "auto", *DECODE_TRAFFIC
        known = self.decode_exchange in some
        _need(known, "decode_exchange", repr(self.decode_exchange), f"one of {', '.join(some)}")

    def choose(
        self, chunks: Sequence[tuple[int, int]], shards: Sequence[int] | None = None
    ) -> Decision:
        """For a step's spread chunks of (cached, new) tokens. Errors: see `work_of`."""
        return self.decide(work_of(chunks, self.lanes, shards))

    def nothing(self) -> SpreadChunks:
        """A step of so many lanes without spread chunks."""
        return SpreadChunks.none(self.lanes)

    def decide(self, work: ExchangeWork) -> Decision:
        """For the spread chunks of a step."""
        seconds = self.corrected(self.seconds(work))
        choose = CHOOSERS[self.chooser] if isinstance(self.chooser, str) else self.chooser
        return Decision(choose(self, work, seconds), seconds)

    def corrected(self, seconds: dict[str, float]) -> dict[str, float]:
        """`seconds` of each strategy as measured steps say they are."""
        if not self.corrections:
            return seconds
        return {
            name: self.corrections[name](each) if name in self.corrections else each
            for name, each in seconds.items()
        }

    def seconds(self, work: ExchangeWork) -> dict[str, float]:
        """Of attention and what lanes send for it, per layer, by strategy; without corrections."""
        if self.lanes == 1:
            return dict.fromkeys(TRAFFIC, self.attention(work.pairs, work.shard, work.tokens))
        return {
            "gather": self._gather(
                gather(work, self.heads),
                self.attention(work.gathered_pairs, work.shard, work.tokens),
            ),
            "pass_kv": self._ring(pass_kv(work, self.heads, self.piece), work),
            "pass_q": self._ring(pass_q(work, self.heads), work),
        }

    def attention(self, pairs: float, read: float, queries: float = 0.0) -> float:
        """Seconds of so many pairs of query and key, of so many `queries`, over `read` tokens of
        KV: computing or reading, whichever takes longer."""
        if self.costs is not None:
            return self.costs.attend(pairs, read, queries)
        heads = self.heads
        rates = self.rates
        computed = 4 * heads.heads * heads.head_dim * pairs / rates.flops_per_s
        return rates.launch + max(computed, heads.kv_bytes * read / rates.read_bytes_per_s)

    def _gather(self, traffic: ExchangeBytes, attention: float) -> float:
        return (
            self.rates.gather(traffic.gathered) + attention + self.rates.exchange(traffic.exchanged)
        )

    def _ring(self, traffic: ExchangeBytes, work: ExchangeWork) -> float:
        """Each hop beside the attention of what came before it; the last attention; the all-to-all,
        where there is one. The ring passes all lanes of a group, also those that hold
        nothing."""
        rounds = traffic.rounds
        attention = self.attention(
            work.step_pairs / rounds, work.touched / rounds, work.share / rounds
        )
        hop = self.rates.hop(traffic.hop)
        home = self.rates.exchange(traffic.exchanged) if traffic.exchanged else 0.0
        beside = (work.holders or self.lanes) - 1
        hops = beside * self.rates.beside(hop, attention) + (self.lanes - 1 - beside) * hop
        return rounds * (hops + attention) + home

    def decodes(self, share: int, kv: float) -> Decision:
        """For a step whose spread rows are decodes alone: see `work_of_decodes`. The seconds are
        those that lanes take besides the attention of as many decodes of their own."""
        work = work_of_decodes(self.lanes, share, kv)
        traffic = gather(work, self.heads)
        seconds = {
            "gather": self.rates.gather(traffic.gathered) + self.rates.exchange(traffic.exchanged),
            "pass_q": self._decode_ring(work),
        }
        fixed = self.decode_exchange
        strategy = min(seconds, key=seconds.__getitem__) if fixed == "auto" else fixed
        return Decision(strategy, seconds)

    def _decode_ring(self, work: ExchangeWork) -> float:
        """New keys and values in an all-gather; what of each hop the attention beside it does not
        hide; a call of attention more for each; partials home in an all-to-all."""
        rates = self.rates
        traffic = pass_q_decodes(work, self.heads)
        call = self._attention_of_decodes(0, 0.0)
        attention = self._attention_of_decodes(work.share, work.touched)
        exposed = rates.beside(rates.hop(traffic.hop), attention) - attention
        return (
            rates.gather(traffic.gathered)
            + traffic.hops * (exposed + call)
            + rates.exchange(traffic.exchanged)
        )

    def _attention_of_decodes(self, queries: int, kv: float) -> float:
        """Seconds of a call of attention of so many decodes over `kv` tokens together."""
        if self.costs is None:
            return self.attention(kv, kv, queries)
        return self.costs.decode + self.costs.decode_seq * queries + self.costs.decode_kv * kv

    def move(self) -> float:
        """Seconds per layer in which a step moves pages between lanes, however few they are."""
        return self.rates.exchange((self.lanes - 1) * self.moves * self.block * self.heads.kv_bytes)

    # --- the paper's thresholds

    def hides_pass_kv(self, tokens: int) -> bool:
        """Whether attention of so many new tokens lasts as long as the hops of pass-KV, whatever is
        cached (Eq. 2)."""
        heads = self.heads
        rates = self.rates
        return (
            tokens * 4 * heads.heads * heads.head_dim * rates.hop.bytes_per_s
            >= self.lanes * rates.flops_per_s * heads.kv_bytes
        )

    def hides_pass_q(self, context: int) -> bool:
        """Whether attention lasts as long as the hops of pass-Q, by the length of the whole context
        (Eq. 3)."""
        return (
            context * 4 * self.rates.hop.bytes_per_s
            >= self.lanes * self.heads.item * self.rates.flops_per_s
        )

    @property
    def equal_miss(self) -> float:
        """Share of new tokens at which queries are as long as keys and values (Eq. 1)."""
        return self.heads.kv_bytes / self.heads.query_bytes


def roofline(exchange: ExchangeChooser, work: ExchangeWork, seconds: Mapping[str, float]) -> str:
    """Picks the least predicted time; `gather` where all take as long."""
    return min(seconds, key=seconds.__getitem__)


def alg1(exchange: ExchangeChooser, work: ExchangeWork, seconds: Mapping[str, float]) -> str:
    """Algorithm 1: pass-KV where it is hidden or its messages are smaller."""
    return (
        "pass_kv"
        if exchange.hides_pass_kv(work.tokens) or work.tokens / work.context >= exchange.equal_miss
        else "pass_q"
    )


def alg5(exchange: ExchangeChooser, work: ExchangeWork, seconds: Mapping[str, float]) -> str:
    """Algorithm 5: the same with the all-to-all of pass-Q counted (appendix C)."""
    rates = exchange.rates
    home = (
        4
        * work.tokens
        * rates.hop.bytes_per_s
        / (work.lanes * rates.flops_per_s * exchange.heads.item)
    )
    return (
        "pass_kv"
        if exchange.hides_pass_kv(work.tokens)
        or work.tokens / work.context >= exchange.equal_miss - home
        else "pass_q"
    )


def fitted(boundary: Boundary) -> Chooser:
    """A rule: the ring that a fitted line says is faster (appendix D)."""
    return lambda exchange, work, seconds: (
        "pass_kv" if boundary(work.cached, work.tokens) > 0 else "pass_q"
    )


def _always(strategy: str) -> Chooser:
    return lambda exchange, work, seconds: strategy


CHOOSERS: dict[str, Chooser] = {
    "roofline": roofline,
    "alg1": alg1,
    "alg5": alg5,
    **{strategy: _always(strategy) for strategy in TRAFFIC},
}
