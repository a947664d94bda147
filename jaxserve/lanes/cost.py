"""Costs of lanes: attention over KV on other lanes, and messages.

`LaneCosts` is of one lane, where nothing is spread; `GatherCosts` of lanes that gather queries, at
the costs of a profile; `ExchangeCosts` of lanes that choose an exchange by rates that were
measured. `lane_costs` makes the right one, so that callers need not tell them apart.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from jaxserve.api.batch import DEFAULT_EXCHANGE, Batch
from jaxserve.lanes.choice import CHOOSERS, DecodeChoice, ExchangeChooser
from jaxserve.lanes.dealing import PromptLanes
from jaxserve.lanes.exchange import EXCHANGES
from jaxserve.lanes.groups import ChunkPlace, group_around, group_sizes, size_around, size_of_step
from jaxserve.lanes.load import ExchangedChunks, LaneLoad, SpreadChunks
from jaxserve.lanes.placement import Grow
from jaxserve.lanes.rates import AttentionCosts
from jaxserve.lanes.work import most_visits

MOVED_PER_TOKEN = 4  # tokens of KV that a step moves to another lane for each that a lane computes
MOST_MOVES = 256  # blocks that a lane sends to all lanes of a replica in a step


def moves_per_pair(chunk_tokens: int, block: int, lanes: int, page_groups: int = 1) -> int:
    """Pages that a step moves from each lane to each, at most. chunk_tokens: that a lane computes
    in a step; block: tokens of a page; lanes: of a replica. page_groups: pages of a block, which
    have the bytes of one page together.

    A token's KV is sent in far less time than its linear layers take: with 4 KiB a layer at 200
    GB/s in 0.02 us, beside 0.7 us on an H100 for Llama-3 8B.
    """
    blocks = max(1, min(MOVED_PER_TOKEN * chunk_tokens // block, MOST_MOVES // lanes))
    return blocks * page_groups


class StepCosts(AttentionCosts, Protocol):
    """Seconds of a step's parts: see `costs.coefficients.Costs`."""

    @property
    def launch(self) -> float: ...
    @property
    def tile(self) -> int: ...
    def linear(self, tokens: float) -> float: ...
    def attend_chunk(self, cached: float, new: int, part: float | None = None) -> float: ...
    def gathered(self, tokens: float, times: int = 1) -> float: ...
    def chunks(self, steps: int, new: float, context: float, part: float) -> float: ...
    def layer(self, load: LaneLoad, messages: float) -> float: ...


class PrefillPart(NamedTuple):
    """Tokens `start` to before `stop` of a prompt, computed on a group of `lanes` lanes."""

    lanes: int
    start: float
    stop: float


class LaneCosts:
    """Costs of one lane, on which nothing is spread; the base of those of several. prompts: the
    lanes on which prompts lie; default: lanes join as they are full, which they never are.
    `chooser`: by which lanes exchange what spread chunks need; None: they gather queries."""

    chooser: ExchangeChooser | None = None

    def __init__(self, costs: StepCosts, lanes: int = 1, prompts: PromptLanes | None = None):
        self.costs = costs
        self.lanes = lanes
        self.prompts = prompts or PromptLanes(Grow(lanes), 1)

    # --- one step

    def decodes(
        self,
        context: np.ndarray,
        lane: np.ndarray,
        group_size: np.ndarray,
        blocks: np.ndarray,
    ) -> list[LaneLoad]:
        """Loads of chunks of one token: context [n] tokens, home lane [n], group_size [n] lanes
        that meet, blocks [n, lanes] on each."""
        count = len(context)
        if not count:
            return [LaneLoad()]
        longest = float(np.maximum.reduce(context))
        return [LaneLoad(count, float(np.add.reduce(context)), longest, samples=count)]

    def decodes_ahead(self, count: int, context: float, mean: float, longest: float) -> LaneLoad:
        """The load of a lane with an even share of decodes to come: `count` of them, and `context`
        tokens of KV. mean, longest: tokens of a sequence."""
        return LaneLoad(count, context, longest, samples=count)

    def joined(
        self, loads: list[LaneLoad], place: ChunkPlace, cached: int, new: int
    ) -> list[tuple[int, LaneLoad]]:
        """The lanes that a prefill chunk bears on with it, and others that have to know of it."""
        if place.blocks is not None:
            return self._spread(loads, place, place.blocks, cached, new)
        attention = self.costs.attend_chunk(cached, new)
        return [(place.home, loads[place.home].plus(new, self.costs.tile, attention))]

    def _spread(
        self,
        loads: list[LaneLoad],
        place: ChunkPlace,
        blocks: Sequence[int],
        cached: int,
        new: int,
    ) -> list[tuple[int, LaneLoad]]:
        """The lanes that a spread chunk bears on, with it; one lane computes it as a local one."""
        return self.joined(loads, ChunkPlace(place.home), cached, new)

    def exchanged(self, batch: Batch) -> ExchangedChunks | None:
        """Decides how a batch's spread chunks of more than one token reach KV on other lanes; None
        where no rates are known to decide by."""
        return None

    def loads(self, batch: Batch, exchanged: ExchangedChunks | None = None) -> list[LaneLoad]:
        """A batch as the work of each lane. exchanged: the result of `exchanged`, if it was
        called."""
        single = batch.length == 1
        loads = self.decodes(
            batch.start[single],
            batch.lane[single],
            batch.group_size[single],
            batch.blocks_per_lane[single],
        )
        for row in self._separate(batch, ~single).tolist():
            blocks = batch.blocks_per_lane[row].tolist() if batch.spread[row] else None
            place = ChunkPlace(int(batch.lane[row]), blocks, batch.dealt.get(row))
            chunk = int(batch.start[row]), int(batch.length[row])
            for index, load in self.joined(loads, place, *chunk):
                loads[index] = load
        return loads

    def _separate(self, batch: Batch, long: np.ndarray) -> np.ndarray:
        """Rows of the `long` chunks of a batch that join one by one."""
        return np.flatnonzero(long)

    def messages(self, load: LaneLoad) -> float:
        """Seconds per layer of messages that no attention is part of."""
        return 0.0

    def exposed_moves(self, batch: Batch, loads: Sequence[LaneLoad], layers: int) -> float:
        """Seconds of a step's `layers` layers in which pages change lanes and nothing else runs.
        loads: of the batch."""
        return 0.0

    def growth(self, before: int, after: int, history: float, chunk: int, layers: int) -> float:
        """Seconds of exposed moves, in steps of `chunk` tokens for each lane, as `history` tokens
        of a prompt are dealt out over `after` lanes instead of `before` of these."""
        return 0.0

    # --- a whole prompt

    def parts(self, cached: float, total: float) -> Iterable[PrefillPart]:
        """The parts of a prompt's tokens `cached` to before `total` as lanes join."""
        return (PrefillPart(1, cached, total),)

    def prefill(self, part: PrefillPart, chunk: int, layers: int) -> float:
        """Seconds of a part alone, in steps of `chunk` tokens for each of its lanes, in `layers`
        layers: the sum of the steps' paces (Medha, Eq. 4)."""
        lanes, start, stop = part
        new = stop - start
        steps = math.ceil(new / (chunk * lanes))
        layer = self.costs.chunks(steps, new, self._context(part), new / steps / lanes)
        if lanes > 1:
            layer += self.costs.gathered(new, steps)
        return steps * self.costs.launch + layers * layer

    def _context(self, part: PrefillPart) -> float:
        """Tokens on the fullest lane, on average while a context grows."""
        return (part.start + part.stop) / 2


class GatherCosts(LaneCosts):
    """Costs of lanes that gather queries, as a profile's coefficients say."""

    def decodes(
        self,
        context: np.ndarray,
        lane: np.ndarray,
        group_size: np.ndarray,
        blocks: np.ndarray,
    ) -> list[LaneLoad]:
        """Loads of chunks of one token: see `LaneCosts.decodes`."""
        lanes = range(self.lanes)
        count = np.bincount(lane, minlength=self.lanes).tolist()
        spread = group_size > 1
        local = np.bincount(lane, np.where(spread, 0, context), self.lanes)
        blocks = blocks[spread]
        tokens = context[spread]
        shards = (tokens[:, None] * blocks / np.maximum(blocks.sum(1, keepdims=True), 1)).sum(0)
        choice = None
        if len(tokens):
            share = int(np.bincount(lane[spread]).max())
            visits = most_visits(lane[spread], blocks) / share
            size = int(group_size.max())
            choice = self._decode_choice(size, share, float(shards.max()), visits)
        longest = [float(context[lane == index].max(initial=0)) for index in lanes]
        return [
            LaneLoad(n, float(kv), most, spread=len(tokens), samples=n, decode_choice=choice)
            for n, kv, most in zip(count, local + shards, longest)
        ]

    def decodes_ahead(self, count: int, context: float, mean: float, longest: float) -> LaneLoad:
        """The load of a lane with decodes to come: see `LaneCosts.decodes_ahead`. They are spread
        where a sequence of their mean length is."""
        load = super().decodes_ahead(count, context, mean, longest)
        size = int(self.prompts.meeting(np.array(mean)))
        if size > 1:
            load.context *= size * max(self.prompts.shares(context * size, size))
            load.spread = count * self.lanes
            load.decode_choice = self._decode_choice(size, count, load.context, 1.0)
        return load

    def _decode_choice(
        self, size: int, share: int, kv: float, visits: float
    ) -> DecodeChoice | None:
        """Returns the choice of how spread decodes exchange in groups of `size` lanes; None where
        no rates are known. share: decodes of the lane that is home to most; kv: tokens of their KV
        on the fullest lane; visits: see `work_of_decodes`."""
        return None

    def _spread(
        self,
        loads: list[LaneLoad],
        place: ChunkPlace,
        blocks: Sequence[int],
        cached: int,
        new: int,
    ) -> list[tuple[int, LaneLoad]]:
        """Deals the tokens of a spread chunk over its lanes; each of its group attends, for all of
        them, over what it holds."""
        group = place.group
        lanes = place.lanes
        part = -(-new // len(lanes))
        spread = new * (len(group) > 1)
        total = sum(blocks) or 1
        out = []
        for index in group:
            share = blocks[index] / total
            attention = self.costs.attend_chunk(cached * share, new, new * share)
            tokens = part * (index in lanes)
            out.append((index, loads[index].plus(tokens, self.costs.tile, attention, spread)))
        return out

    def messages(self, load: LaneLoad) -> float:
        """Seconds per layer in which queries are gathered and partials come home."""
        if not load.spread:
            return 0.0
        return self.costs.gathered(load.spread)

    def parts(self, cached: float, total: float) -> Iterable[PrefillPart]:
        """The parts of a prompt's tokens `cached` to before `total` as lanes join."""
        dealt = self.prompts.dealt_over(total)
        if dealt > 1:
            yield PrefillPart(dealt, cached, total)
            return
        for lanes in group_sizes(self.lanes):
            stop = min(total, self.prompts.reach * lanes)
            if lanes == self.lanes:
                stop = total
            if stop > cached:
                yield PrefillPart(lanes, cached, stop)
                cached = stop

    def _context(self, part: PrefillPart) -> float:
        """Tokens on the fullest lane, on average while a context grows: its share where they are
        dealt; else `reach`, and once all hold that, a share."""
        lanes, start, stop = part
        context = super()._context(part)
        if lanes == 1:
            return context
        if self.prompts.deals:
            return context * max(self.prompts.shares(context, lanes))
        reach = self.prompts.reach
        even = min(max(start, reach * lanes), stop)  # from here on all lanes hold as much
        shared = (stop - even) * (even + stop) / 2 / lanes
        return (reach * (even - start) + shared) / (stop - start)


class ExchangeCosts(GatherCosts):
    """Costs of lanes that choose how they exchange what a step needs."""

    def __init__(
        self, costs: StepCosts, chooser: ExchangeChooser, prompts: PromptLanes | None = None
    ):
        super().__init__(costs, chooser.lanes, prompts)
        self.chooser: ExchangeChooser = chooser
        self._block = chooser.block
        self._nothing = SpreadChunks.none(chooser.lanes)
        self._choosers = {  # by size of the groups of lanes that meet
            size: chooser.for_groups(size) for size in group_sizes(chooser.lanes)
        }

    def _decide(self, chunks: SpreadChunks, settled: bool = True) -> ExchangedChunks:
        """Decides how the lanes of each group exchange what these chunks need. settled: whether
        tokens can be sampled where their blocks are; if not, settled exchanges are none to
        choose."""
        decision = self._choosers[chunks.group_size].decide(chunks.work())
        strategy = decision.strategy
        if not settled and EXCHANGES[strategy].settled:
            strategy = DEFAULT_EXCHANGE
        return ExchangedChunks(strategy, decision.seconds[strategy], chunks)

    def _decode_choice(self, size: int, share: int, kv: float, visits: float) -> DecodeChoice:
        return DecodeChoice(self._choosers[size], share, kv, visits)

    def _spread(
        self,
        loads: list[LaneLoad],
        place: ChunkPlace,
        blocks: Sequence[int],
        cached: int,
        new: int,
    ) -> list[tuple[int, LaneLoad]]:
        """Adds a spread chunk by the exchange that the spread chunks so far and this one would
        choose; of that all lanes have to know."""
        group = place.group
        lanes = place.lanes
        total = sum(blocks) or 1
        shares = [count / total for count in blocks]
        computed = self._computed(shares, new)
        chunks = self._nothing
        if earlier := loads[place.home].exchanged:
            chunks = earlier.chunks
        exchanged = self._decide(chunks.plus(cached, new, computed, shares, group, lanes))
        part = -(-new // len(lanes))
        tokens = [part * (lane in lanes) for lane in range(self.lanes)]
        if EXCHANGES[exchanged.strategy].settled:
            tokens = [math.ceil(new * part) for part in computed]
        return [
            (index, load.plus_spread(tokens[index], self.costs.tile, exchanged))
            if index in group
            else (index, dataclasses.replace(load, exchanged=exchanged))
            for index, load in enumerate(loads)
        ]

    def _computed(self, shares: list[float], new: int) -> list[float]:
        """The share of a chunk's tokens that each lane is expected to compute where their blocks
        are, given its share of the context: whole blocks are dealt evenly, and where lanes fill one
        by one, all are on the last."""
        lanes = [lane for lane, share in enumerate(shares) if share]
        lanes = lanes[: -(-new // self._block) if self.prompts.deals else 1]
        computed = [0.0] * len(shares)
        for lane in lanes:
            computed[lane] = 1 / len(lanes)
        return computed

    def exchanged(self, batch: Batch) -> ExchangedChunks:
        """Decides how a batch's spread chunks of more than one token reach KV on other lanes. A
        settled token is sampled where its blocks are: the chunks are gathered where that is not its
        home."""
        chunks = self._nothing
        settled = True
        first = 0  # of the chunk's blocks in `block_lane`
        for row in np.flatnonzero(batch.spread & (batch.length > 1)).tolist():
            start = int(batch.start[row])
            new = int(batch.length[row])
            block = start // self._block
            ends = np.arange(block, (start + new - 1) // self._block + 2) * self._block
            lanes = batch.block_lane[first : first + len(ends) - 1]
            first += len(lanes)
            tokens = np.bincount(lanes, np.diff(ends.clip(start, start + new)), self.lanes)
            blocks = batch.blocks_per_lane[row]
            group = group_around(int(batch.lane[row]), int(batch.group_size[row]))
            shares = (blocks / blocks.sum()).tolist()
            dealt = batch.dealt.get(row, group)
            chunks = chunks.plus(start, new, (tokens / new).tolist(), shares, group, dealt)
            settled &= not batch.sample[row] or lanes[-1] == batch.lane[row]
        if chunks.group_size == 1:
            return ExchangedChunks(DEFAULT_EXCHANGE, 0.0, chunks)
        return self._decide(chunks, settled)

    def loads(self, batch: Batch, exchanged: ExchangedChunks | None = None) -> list[LaneLoad]:
        """A batch as the work of each lane, spread chunks as they are exchanged together: settled
        ones are computed where their blocks are."""
        loads = super().loads(batch)
        exchanged = exchanged or self.exchanged(batch)
        count = int(np.count_nonzero(batch.spread & (batch.length > 1)))
        tokens = exchanged.chunks.tokens_computed(exchanged.strategy)
        for index in exchanged.chunks.busy:
            load = loads[index]
            loads[index] = load.plus_spread(tokens[index], self.costs.tile, exchanged, count)
        return loads

    def _separate(self, batch: Batch, long: np.ndarray) -> np.ndarray:
        return np.flatnonzero(long & ~batch.spread)

    def messages(self, load: LaneLoad) -> float:
        """Seconds per layer of what spread decodes send."""
        choice = load.decode_choice
        if choice is None:
            return 0.0
        beside = None if load.exchanged is None else load.exchanged.strategy
        decision = choice.beside(beside)
        return decision.seconds[decision.strategy]

    def exposed_moves(self, batch: Batch, loads: Sequence[LaneLoad], layers: int) -> float:
        """Seconds of a step's `layers` layers in which pages change lanes and nothing else runs:
        see `LaneCosts.exposed_moves`. The linear parts beside them are those of the lane with most
        tokens."""
        if not len(batch.moves):
            return 0.0
        size = size_of_step(batch.group_size, batch.moves, self.lanes)
        linear = self.costs.linear(max(load.decodes + load.tokens for load in loads))
        return self._choosers[size].exposed_moves(linear, layers)

    def growth(self, before: int, after: int, history: float, chunk: int, layers: int) -> float:
        """Seconds of exposed moves as a group of lanes grows: see `LaneCosts.growth`. Each of the
        `before` lanes sends to those that join; one step more moves what the last of these steps
        computes, unless settled chunks let nothing move ahead (`scheduling.history_moves`)."""
        limit = self.chooser.moves
        if not limit:
            return 0.0  # nothing moves
        pages = self.chooser.pages_of(math.ceil(history / self._block))
        steps = math.ceil(pages / (before * after * limit))
        exchange = self.chooser.chooser
        if not isinstance(exchange, str) or exchange in CHOOSERS or not EXCHANGES[exchange].settled:
            steps += 1
        return steps * self._choosers[after].exposed_moves(self.costs.linear(chunk), layers)

    # --- a whole prompt

    def prefill(self, part: PrefillPart, chunk: int, layers: int) -> float:
        """Seconds of a part's steps: of three at different lengths of the context, weighted as
        Simpson does, times their number."""
        if part.lanes == 1:
            return super().prefill(part, chunk, layers)
        new = part.stop - part.start
        steps = math.ceil(new / (chunk * part.lanes))
        size = math.ceil(new / steps)
        layer_at = lambda place, settled=True: self._chunk_alone(
            part.start + place * (steps - 1) * size, size, part.lanes, settled
        )
        layer = sum(
            weight * layer_at(place) for weight, place in ((1 / 6, 0.0), (2 / 3, 0.5), (1 / 6, 1.0))
        )
        seconds = steps * (self.costs.launch + layers * layer)
        if not self.prompts.ends_at_home:
            seconds += layers * (layer_at(1.0, settled=False) - layer_at(1.0))
        return seconds

    def _chunk_alone(self, cached: float, new: int, lanes: int, settled: bool) -> float:
        """Seconds of one layer of a chunk alone in its step, dealt over `lanes` lanes, or on those
        that were filled one by one. settled: see `_decide`."""
        shares = self.prompts.shares(cached + new, lanes)
        group = group_around(0, size_around(range(len(shares)), self.lanes))
        shares += [0.0] * (self.lanes - len(shares))
        computed = self._computed(shares, new)
        chunks = self._nothing.plus(round(cached), new, computed, shares, group, group)
        exchanged = self._decide(chunks, settled)
        tokens = max(exchanged.chunks.tokens_computed(exchanged.strategy))
        return self.costs.layer(LaneLoad().plus_spread(tokens, self.costs.tile, exchanged), 0.0)


def lane_costs(
    costs: StepCosts,
    lanes: int,
    chooser: ExchangeChooser | None = None,
    prompts: PromptLanes | None = None,
) -> LaneCosts:
    """Returns the costs of `lanes` lanes; without a chooser they gather queries. prompts: see
    `LaneCosts`."""
    if lanes == 1:
        return LaneCosts(costs)
    if chooser is None:
        return GatherCosts(costs, lanes, prompts)
    return ExchangeCosts(costs, chooser, prompts)
