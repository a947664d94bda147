"""Predicts how long steps take: one model of time for the scheduler, placement, planning and the
simulator.

A step runs through the stages one after the other; within a stage the slowest lane decides. A
lane's time in one layer is that of its linear parts, which depends on how many tokens it computes,
plus attention, which depends on who attends to how much, plus what ranks and lanes say to each
other. `Costs` holds the coefficients, in seconds; `Predictor` applies them to batches and, while
serving, corrects them by what steps really took. How lanes exchange what spread chunks need, and
how long that takes, it asks an `ExchangeChooser`; without one they gather queries.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxserve.api.batch import Batch
from jaxserve.lanes.groups import group_around, group_sizes, lanes_of, size_around
from jaxserve.settings.schema import MeshConfig

if TYPE_CHECKING:
    from jaxserve.costs.exchange_choice import Decision, ExchangeChooser, SpreadChunks

HOST_SECONDS = 0.003  # in which the host decides and issues a step
EARLY_SHARE = 0.1  # of a step's predicted time, by which it may end early


@dataclasses.dataclass(frozen=True)
class ShapeCost:
    """A compiled shape of a step and its time: so many decodes, and rows of so many prefill tokens;
    `seconds` per layer for all but attention."""

    decodes: int
    rows: int
    width: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class SpreadShape:
    """A compiled shape of steps with spread chunks, on groups of `group_size` lanes that meet by
    `exchange`. Per lane: decodes, rows of prefill tokens, and all tokens, padding included."""

    group_size: int
    exchange: str
    decodes: int
    rows: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of one model, on one kind of device, at one degree of tp. All but `launch`, `head`
    and `hop` are per layer.

    Linear parts of n tokens: the greater of `linear_floor` (weights are read) and `linear_base +
    linear_token n` (they are used). Attention of a chunk of new tokens after cached ones: the
    greater of `pair (cached + new / 2) new` and `read (cached + new)`, plus `chunk` and
    `chunk_token new`. Of decodes: `decode` once, `decode_seq` each, `decode_kv` per token of
    context. In a batch with both, `mixed` times the smaller of the two is added (below 0: they
    overlap).
    """

    layers: int
    launch: float = 0.0  # a step in one stage, whatever it does
    linear_floor: float = 0.0
    linear_base: float = 0.0
    linear_token: float = 0.0
    chunk: float = 0.0
    chunk_token: float = 0.0  # per new token: tiles on the diagonal, queries and outputs
    pair: float = 0.0
    read: float = 0.0
    decode: float = 0.0
    decode_seq: float = 0.0
    decode_kv: float = 0.0
    mixed: float = 0.0
    head: float = 0.0  # final norm, projection to the vocabulary and sampling, in the last stage
    head_token: float = 0.0  # per sampled token
    tp: float = 0.0  # both sums over ranks: once, and per token
    tp_token: float = 0.0
    kvp: float = 0.0  # both exchanges between lanes: once, and per spread token
    kvp_token: float = 0.0
    hop: float = 0.0  # from stage to stage: once, and per token
    hop_token: float = 0.0
    # what was measured of an engine, cheapest first; a step costs as its shape does
    shapes: tuple[ShapeCost, ...] = ()
    tile: int = 1  # tokens of a prefill row of these shapes, where there are several rows
    spread_shapes: tuple[SpreadShape, ...] = ()  # those of steps with spread chunks, the same
    # what a token of padding in a step with spread chunks takes, as a share of any other: 1 where
    # devices compute what is compiled, 0 where kernels skip it
    padding: float = 1.0
    # share of its work for which a lane waits for each other one at work: 0 where each has devices
    # of its own; costs are those of lanes that are all at work
    shared: float = 0.0
    longest: bool = False  # decodes cost as if all of the shape's had the longest context of them

    def linear(self, tokens: float) -> float:
        """One layer's linear parts and the sums over ranks."""
        return (
            smooth_max(self.linear_floor, self.linear_base + self.linear_token * tokens)
            + self.tp
            + self.tp_token * tokens
        )

    def compiled(self, lane: LaneLoad) -> ShapeCost | None:
        """The cheapest shape that holds what a lane does; None where there are none, or none
        does."""
        for shape in self.shapes:
            if lane.decodes <= shape.decodes and (
                lane.tiles <= shape.rows
                if shape.rows != 1
                else lane.chunks <= 1 and lane.tokens <= shape.width
            ):
                return shape
        return None

    def spread(self, lane: LaneLoad, group_size: int) -> float:
        """One layer's linear parts in a step with spread chunks, in its compiled shape if there is
        one that holds what the lane does."""
        used = lane.decodes + lane.tokens
        for shape in self.spread_shapes:
            if (
                shape.exchange == lane.strategy
                and shape.group_size >= group_size
                and shape.decodes >= lane.decodes
                and shape.rows >= lane.tiles
            ):
                return self.linear(used + self.padding * max(0, shape.tokens - used))
        return self.linear(used)

    def crowd(self, busy: int, lanes: int) -> float:
        """How much longer work takes with `busy` of so many lanes at work than with all."""
        return (1 + self.shared * (busy - 1)) / (1 + self.shared * (lanes - 1))

    def attend_chunk(self, cached: float, new: int, own: float | None = None) -> float:
        """One layer's attention of `new` tokens after `cached` ones. On a lane that holds a share
        of a spread context, `cached` and `own` are its shares of the tokens before and of the new
        ones."""
        own = new if own is None else own
        return self._attend(self.pair * (cached + own / 2) * new, cached + own, new)

    def attend(self, pairs: float, read: float, queries: float) -> float:
        """One layer's attention of `queries` new tokens in so many pairs of query and key, over
        `read` tokens of KV."""
        return self._attend(self.pair * pairs, read, queries)

    def _attend(self, computed: float, read: float, queries: float) -> float:
        return self.chunk + self.chunk_token * queries + smooth_max(computed, self.read * read)

    def attend_decodes(self, count: int, context: float) -> float:
        """One layer's attention of `count` decodes over `context` tokens together."""
        return self.decode + self.decode_seq * count + self.decode_kv * context if count else 0.0

    def attention(self, prefill: float, decode: float) -> float:
        return prefill + decode + self.mixed * min(prefill, decode)


def _shares(held: Sequence[int]) -> list[float]:
    whole = sum(held) or 1
    return [blocks / whole for blocks in held]


def _fullest(reach: float, lanes: int, first: float, last: float) -> float:
    """Tokens on the fullest lane, on average while a context grows from `first` to `last`: `reach`,
    and once all hold that, a share."""
    even = min(max(first, reach * lanes), last)  # from here on all lanes hold as much
    return (reach * (even - first) + (last - even) * (even + last) / 2 / lanes) / (last - first)


def smooth_max(a: float, b: float) -> float:
    """The greater of two, with a smooth change from one to the other: their 4-norm, (a^4 +
    b^4)^(1/4), 19 % above where they are equal."""
    low, high = (a, b) if a < b else (b, a)
    if high <= 0:
        return 0.0
    square = (low / high) ** 2
    return high * math.sqrt(math.sqrt(1 + square * square))


# where nothing was measured: work is counted in tokens
NOMINAL = Costs(layers=1, linear_token=1e-4)


@dataclasses.dataclass(slots=True)
class LaneLoad:
    """What one lane does in a step, so far."""

    decodes: int = 0
    context: float = 0.0  # of the decodes, on this lane
    longest: float = 0.0  # of these contexts
    chunks: int = 0  # of its own
    tokens: int = 0  # prefill tokens of its own
    tiles: int = 0  # rows that hold them
    attention: float = 0.0  # seconds per layer, of the chunks
    spread: int = 0  # spread tokens that it exchanges with the others, as Costs.kvp_token counts
    samples: int = 0
    # how the step's spread decodes reach KV on other lanes, the same on all lanes, if nothing else
    # is spread; None where there are none or no chooser says what it takes
    decode_exchange: Decision | None = None
    # the step's spread chunks, the same on all lanes, and seconds per layer of the attention and
    # exchange of those that bear on this one; None where no chooser says what they take
    chunks_spread: SpreadChunks | None = None
    exchange: float = 0.0
    strategy: str = "gather"


class ExchangedChunks(NamedTuple):
    """The spread chunks of a batch, the strategy by which they reach KV on other lanes, and what
    that takes with their attention: seconds per layer."""

    strategy: str
    seconds: float
    chunks: SpreadChunks


class Predictor:
    """Seconds of batches on a mesh. `reach` is how many tokens of a sequence a lane holds before
    the next one joins; dealt: longer prompts are dealt over all lanes from their first token on.
    `scale` is what the online correction has learnt: it starts at 1."""

    def __init__(
        self,
        costs: Costs,
        mesh: MeshConfig,
        reach: float = math.inf,
        memory: float = 0.05,
        exchange: ExchangeChooser | None = None,
        dealt: bool = False,
    ):
        self.mesh = mesh
        self.memory = memory
        self.reach = reach if mesh.kvp > 1 else math.inf
        self.costs = costs
        self.exchange = exchange if mesh.kvp > 1 else None
        # the same by size of the groups of lanes that meet
        self._choosers = (
            {}
            if self.exchange is None
            else {
                size: dataclasses.replace(self.exchange, lanes=size)
                for size in group_sizes(mesh.kvp)
            }
        )
        self.dealt = dealt
        self.layers = -(-costs.layers // mesh.spp)
        self.scale = 1.0
        self.calibrated = costs != NOMINAL  # whether its costs are seconds: NOMINAL counts work

    def early(self, seconds: float) -> float:
        """How long before its predicted end a step's successor is decided, so that it is issued in
        time: later, and the devices may wait; earlier, and requests that come in between do. At
        once where it is not calibrated."""
        return HOST_SECONDS + EARLY_SHARE * seconds if self.calibrated else math.inf

    # --- one step

    def stage(self, lanes: Sequence[LaneLoad]) -> float:
        """Seconds of a step in the slowest stage: the pace at which steps can follow each other."""
        return max(map(self.lane, lanes))

    def lane(self, lane: LaneLoad) -> float:
        """Seconds of a step on one lane."""
        layer = self._layer(lane)
        return (self.costs.launch + self.layers * layer) * self.scale + self.head(lane.samples)

    def _layer(self, lane: LaneLoad) -> float:
        """Seconds of one layer on one lane."""
        costs = self.costs
        context = lane.context
        count = lane.decodes
        chunks = lane.chunks_spread
        shape = costs.compiled(lane) if costs.shapes else None
        if chunks is not None and costs.spread_shapes:
            layer = costs.spread(lane, chunks.group_size)
        else:
            layer = shape.seconds if shape else costs.linear(count + lane.tokens)
        if costs.longest:
            context = lane.longest * (shape.decodes if shape else count)
        layer += costs.attention(
            lane.attention + lane.exchange, costs.attend_decodes(count, context)
        )
        if lane.spread and self.exchange is None:
            layer += costs.kvp + costs.kvp_token * lane.spread
        elif lane.decode_exchange is not None:
            decision = lane.decode_exchange
            layer += decision.seconds["gather" if lane.chunks else decision.strategy]
        if chunks is not None and costs.shared:
            layer *= costs.crowd(int(np.count_nonzero(chunks.lanes)), self.mesh.kvp)
        return layer

    def head(self, samples: int) -> float:
        """Seconds by which the last stage, where tokens are sampled, is slower than the others."""
        return (self.costs.head + self.costs.head_token * samples) * self.scale if samples else 0.0

    def hop(self, tokens: int) -> float:
        """Seconds from one stage to the next."""
        return self.costs.hop + self.costs.hop_token * tokens

    def latency(self, stage: float, tokens: int, samples: int) -> float:
        """Seconds from a step's start to its tokens, given `stage`, its tokens and how many a lane
        samples: through all stages, and the hops between them."""
        return stage + (self.mesh.spp - 1) * (stage - self.head(samples) + self.hop(tokens))

    def lanes(self, batch: Batch, exchanged: ExchangedChunks | None = None) -> list[LaneLoad]:
        """A batch as the work of each lane. exchanged: as `exchanged` said of it, if it was
        asked."""
        single = batch.length == 1
        out = self.decodes(
            batch.start[single],
            batch.lane[single],
            batch.group_size[single],
            batch.blocks_per_lane[single],
            alone=bool(single.all()),
        )
        known = self.exchange is not None
        for row in np.flatnonzero(~single).tolist():
            held = batch.blocks_per_lane[row].tolist() if batch.spread[row] else None
            if held is None or not known:
                self.add_chunk(
                    out, int(batch.lane[row]), held, int(batch.start[row]), int(batch.length[row])
                )
        return self._with_spread(out, batch, exchanged or self.exchanged(batch)) if known else out

    def _with_spread(
        self, lanes: list[LaneLoad], batch: Batch, exchanged: ExchangedChunks
    ) -> list[LaneLoad]:
        """The lanes with the batch's spread chunks, which are computed where their blocks are if
        they go round a ring."""
        strategy, seconds, chunks = exchanged
        count = int(np.count_nonzero(batch.spread & (batch.length > 1)))
        return [
            self._more(lane, own, 0.0, 0, chunks, seconds, strategy, count) if takes_part else lane
            for lane, own, takes_part in zip(lanes, chunks.computed(strategy), chunks.lanes)
        ]

    def exchanged(self, batch: Batch) -> ExchangedChunks:
        """Decides how a batch's spread chunks of more than one token reach KV on other lanes. Round
        a ring a token is sampled where its blocks are: they are gathered where that is not its
        home."""
        exchange = self.exchange
        assert exchange is not None
        chunks = exchange.nothing()
        settled = True
        at = 0
        for row in np.flatnonzero(batch.spread & (batch.length > 1)).tolist():
            start = int(batch.start[row])
            new = int(batch.length[row])
            first = start // exchange.block
            ends = np.arange(first, (start + new - 1) // exchange.block + 2) * exchange.block
            block_lane = batch.block_lane[at : at + len(ends) - 1]
            at += len(block_lane)
            tokens = np.bincount(block_lane, np.diff(ends.clip(start, start + new)), self.mesh.kvp)
            held = batch.blocks_per_lane[row]
            group = group_around(int(batch.lane[row]), int(batch.group_size[row]))
            chunks = chunks.plus(start, new, tokens / new, held / held.sum(), group)
            settled &= not batch.sample[row] or block_lane[-1] == batch.lane[row]
        if chunks.group_size == 1:
            return ExchangedChunks("gather", 0.0, chunks)
        decision = self._decide(chunks)
        strategy = decision.strategy if settled else "gather"
        return ExchangedChunks(strategy, decision.seconds[strategy], chunks)

    def decodes(
        self,
        context: np.ndarray,
        lane: np.ndarray,
        group_size: np.ndarray,
        held: np.ndarray,
        alone: bool = True,
    ) -> list[LaneLoad]:
        """What the lanes do for chunks of one token: context [n] tokens, home lane [n], group_size
        [n] lanes that meet, held [n, lanes] blocks. alone: whether no lane has another chunk so
        far; beside these, queries of decodes are gathered."""
        if self.mesh.kvp == 1:
            return [
                LaneLoad(
                    len(context),
                    float(context.sum()),
                    float(context.max(initial=0)),
                    samples=len(context),
                )
            ]
        count = np.bincount(lane, minlength=self.mesh.kvp).tolist()
        spread = group_size > 1
        here = np.bincount(lane, np.where(spread, 0, context), self.mesh.kvp)
        far = held[spread]
        tokens = context[spread]
        of_spread = (tokens[:, None] * far / np.maximum(far.sum(1, keepdims=True), 1)).sum(0)
        here = here + of_spread
        decision = None
        if self.exchange is not None and len(tokens):
            share = int(np.bincount(lane[spread]).max())
            decision = self._choosers[int(group_size.max())].decodes(share, float(of_spread.max()))
            if not alone:
                decision = dataclasses.replace(decision, strategy="gather")
        longest = [float(context[lane == index].max(initial=0)) for index in range(self.mesh.kvp)]
        return [
            LaneLoad(n, float(kv), most, spread=len(tokens), samples=n, decode_exchange=decision)
            for n, kv, most in zip(count, here, longest)
        ]

    def add_chunk(
        self, lanes: list[LaneLoad], home: int, held: Sequence[int] | None, cached: int, new: int
    ) -> None:
        """A prefill chunk joins what the lanes do. held: blocks on each lane of a spread sequence,
        None for a local one."""
        for index, lane in self.joined(lanes, home, held, cached, new):
            lanes[index] = lane

    def with_chunk(
        self, lanes: list[LaneLoad], home: int, held: Sequence[int] | None, cached: int, new: int
    ) -> float:
        """Seconds of the step, on the lanes that it bears on, if the chunk joined."""
        group = lanes_of(home, held)
        joined = self.joined(lanes, home, held, cached, new)
        return max(self.lane(lane) for index, lane in joined if index in group)

    def joined(
        self, lanes: list[LaneLoad], home: int, held: Sequence[int] | None, cached: int, new: int
    ) -> list[tuple[int, LaneLoad]]:
        """The lanes that a chunk bears on, with it, and others that have to know of it. The tokens
        of a spread one are dealt over the lanes of its group; each of them attends, for all of
        them, over what it holds."""
        if held is None:
            return [(home, self._more(lanes[home], new, self.costs.attend_chunk(cached, new), 0))]
        if self.exchange is not None:
            return self._joined_by_exchange(self.exchange, lanes, home, held, cached, new)
        group = lanes_of(home, held)
        own = -(-new // len(group))
        shares = _shares(held)
        return [
            (
                index,
                self._more(
                    lanes[index],
                    own,
                    self.costs.attend_chunk(cached * shares[index], new, new * shares[index]),
                    new if len(group) > 1 else 0,
                ),
            )
            for index in group
        ]

    def _joined_by_exchange(
        self,
        exchange: ExchangeChooser,
        lanes: list[LaneLoad],
        home: int,
        held: Sequence[int],
        cached: int,
        new: int,
    ) -> list[tuple[int, LaneLoad]]:
        """The same, by the exchange that the spread chunks so far and this one would choose."""
        group = lanes_of(home, held)
        shares = np.array(_shares(held))
        computed = self._computed(exchange, shares, new)
        before = lanes[home].chunks_spread or exchange.nothing()
        chunks = before.plus(cached, new, computed, shares, group)
        decision = self._decide(chunks)
        seconds = decision.seconds[decision.strategy]
        alone = exchange.nothing().plus(cached, new, computed, shares, group)
        own = alone.computed(decision.strategy)
        return [
            (
                index,
                self._more(lane, own[index], 0.0, 0, chunks, seconds, decision.strategy)
                if index in group
                else dataclasses.replace(lane, chunks_spread=chunks, strategy=decision.strategy),
            )
            for index, lane in enumerate(lanes)
        ]

    def _decide(self, chunks: SpreadChunks) -> Decision:
        """How the lanes of each group exchange what these chunks need."""
        return self._choosers[chunks.group_size].decide(chunks.work())

    def _computed(self, exchange: ExchangeChooser, held: np.ndarray, new: int) -> np.ndarray:
        """The share of a chunk's tokens that each lane is expected to compute round a ring, given
        the share of the context that it holds: whole blocks are dealt evenly, and where lanes fill
        one by one, all are on the last."""
        blocks = -(-new // exchange.block) if self.dealt else 1
        lanes = np.flatnonzero(held)
        if blocks >= len(lanes):
            return (held > 0) / len(lanes)
        return np.isin(np.arange(len(held)), lanes[:blocks]) / blocks

    def _more(
        self,
        lane: LaneLoad,
        tokens: int,
        attention: float,
        spread: int,
        chunks_spread: SpreadChunks | None = None,
        exchange: float = 0.0,
        strategy: str = "",
        chunks: int = 1,
    ) -> LaneLoad:
        tiles = lane.tiles - (-tokens // self.costs.tile)
        return LaneLoad(
            lane.decodes,
            lane.context,
            lane.longest,
            lane.chunks + chunks,
            lane.tokens + tokens,
            tiles,
            lane.attention + attention,
            lane.spread + spread,
            lane.samples,
            lane.decode_exchange,
            chunks_spread or lane.chunks_spread,
            exchange or lane.exchange,
            strategy or lane.strategy,
        )

    def seconds(self, batch: Batch, exchanged: ExchangedChunks | None = None) -> float:
        """A batch's pace: see `stage`. exchanged: see `lanes`. Pages change lanes beside the
        layers."""
        stage = self.stage(self.lanes(batch, exchanged))
        if self.exchange is None or not len(batch.moves):
            return stage
        exchange = self._choosers[int(batch.group_size.max())]
        return exchange.rates.beside(self.layers * exchange.move() * self.scale, stage)

    # --- a whole prompt

    def prefill(self, cached: float, total: int, chunk: int) -> float:
        """Seconds to prefill tokens `cached` to before `total` alone, in chunks of `chunk` for each
        lane that takes part: the sum of the steps' paces (Medha, Eq. 4)."""
        if total <= cached:
            return 0.0
        seconds = self.head(1)
        if self.dealt and total > self.reach:
            return seconds + self._chunks(cached, total, chunk * self.mesh.kvp, self.mesh.kvp)
        for lanes in group_sizes(self.mesh.kvp):  # as lanes join
            end = total if lanes == self.mesh.kvp else min(total, self.reach * lanes)
            seconds += self._chunks(cached, end, chunk * lanes, lanes)
            cached = max(cached, end)
        return seconds

    def prefill_on(self, lanes: int, cached: int, total: int, chunk: int) -> float:
        """The same where tokens `cached` to before `total` are dealt over so many lanes, as the
        ones before them are."""
        return self._chunks(cached, total, chunk * lanes, lanes) + self.head(1)

    def _chunks(self, cached: float, total: float, chunk: int, lanes: int) -> float:
        """The same on a group of `lanes` lanes, in chunks of so many tokens of all of them."""
        if total <= cached:
            return 0.0
        if lanes > 1 and self.exchange is not None:
            return self._exchanged_chunks(self.exchange, cached, total, chunk, lanes)
        costs = self.costs
        new = total - cached
        steps = math.ceil(new / chunk)
        size = new / steps
        context = _fullest(self.reach, lanes, cached, total) if lanes > 1 else (cached + total) / 2
        own = size / lanes
        layer = steps * (costs.linear(math.ceil(own)) + costs.chunk) + costs.chunk_token * new
        layer += smooth_max(costs.pair * context * new, costs.read * steps * (context + own / 2))
        if lanes > 1:
            layer += steps * costs.kvp + costs.kvp_token * new
        return (steps * costs.launch + self.layers * layer) * self.scale

    def _exchanged_chunks(
        self, exchange: ExchangeChooser, cached: float, total: float, chunk: int, lanes: int
    ) -> float:
        """Of steps whose chunks are exchanged: what they take at three lengths of the context,
        weighted as Simpson does, times their number."""
        steps = math.ceil((total - cached) / chunk)
        size = math.ceil((total - cached) / steps)
        layer = sum(
            weight * self._exchanged_layer(exchange, cached + at * (steps - 1) * size, size, lanes)
            for weight, at in ((1 / 6, 0.0), (2 / 3, 0.5), (1 / 6, 1.0))
        )
        return steps * (self.costs.launch + self.layers * layer) * self.scale

    def _exchanged_layer(
        self, exchange: ExchangeChooser, cached: float, new: int, lanes: int
    ) -> float:
        """One layer of a chunk alone in its step, dealt over so many lanes, or on lanes that were
        filled one by one."""
        if not self.dealt:
            lanes = min(lanes, math.ceil((cached + new) / self.reach))
        held = (np.arange(exchange.lanes) < lanes) / lanes
        computed = self._computed(exchange, held, new)
        group = group_around(0, size_around(range(lanes), exchange.lanes))
        chunks = exchange.nothing().plus(round(cached), new, computed, held, group)
        decision = self._decide(chunks)
        own = max(chunks.computed(decision.strategy))
        seconds = decision.seconds[decision.strategy]
        return self._layer(self._more(LaneLoad(), own, 0.0, 0, chunks, seconds, decision.strategy))

    # --- learning while serving

    def seen(self, predicted: float, seconds: float) -> None:
        """A step predicted to take so long took `seconds`: the scale follows, slowly, and never
        beyond a factor of 4 either way."""
        if predicted > 0 and seconds > 0:
            ratio = min(max(seconds / predicted * self.scale, 0.25), 4.0)
            self.scale *= (ratio / self.scale) ** self.memory
