"""The work of one lane in a step, and the spread chunks that lanes share."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from jaxserve.lanes.choice import Decision
from jaxserve.lanes.exchange import EXCHANGES
from jaxserve.lanes.work import ExchangeWork, pairs_of


class ChunkSums(NamedTuple):
    """Sums over the spread chunks of a lane's groups: [lanes] each, or numbers of one lane."""

    tokens: Any  # new ones
    context: Any  # tokens, cached and new
    pairs: Any  # of query and key
    even: Any  # new tokens of the lane where any lane of the group may compute them
    computed: Any  # new tokens of the lane that go to the lanes that have their blocks
    shard: Any  # tokens of KV on the lane
    shard_pairs: Any  # pairs of all queries and the lane's KV
    hop_pairs: Any  # pairs of the lane's queries and another lane's KV, at most
    touched: Any  # tokens of KV that the lane's queries are paired with in a hop, at most


@dataclasses.dataclass(frozen=True, slots=True)
class SpreadChunks:
    """The spread chunks of a step, each of which bears on the lanes of its group. table: a row
    [lanes] for each field of `ChunkSums`. group_size: lanes of the largest group; holders: most
    lanes that hold a chunk's sequence."""

    table: np.ndarray
    group_size: int = 1
    holders: int = 0

    @classmethod
    def none(cls, lanes: int) -> SpreadChunks:
        return cls(np.zeros((len(ChunkSums._fields), lanes)))

    @property
    def sums(self) -> ChunkSums:
        """The sums by lane."""
        return ChunkSums(*self.table)

    def plus(
        self, cached: int, new: int, computed: np.ndarray, shares: np.ndarray, group: range
    ) -> SpreadChunks:
        """Adds a chunk of `new` tokens after `cached` ones. computed, shares [lanes]: each lane's
        share of the new tokens and of all KV; group: the lanes that compute it."""
        context = cached + new
        pairs = pairs_of(cached, new)
        largest = shares.max()
        table = np.zeros_like(self.table)
        sums = ChunkSums(*table)
        lanes = slice(group.start, group.stop)
        sums.tokens[lanes] = new
        sums.context[lanes] = context
        sums.pairs[lanes] = pairs
        sums.even[lanes] = -(-new // len(group))
        sums.computed[:] = new * computed
        sums.shard[:] = context * shares
        sums.shard_pairs[:] = pairs * shares
        sums.hop_pairs[:] = pairs * largest * computed
        sums.touched[:] = context * largest * (computed > 0)
        return SpreadChunks(
            self.table + table,
            max(self.group_size, len(group)),
            max(self.holders, int(np.count_nonzero(shares))),
        )

    @property
    def lanes(self) -> np.ndarray:
        """[lanes] bool; those that some chunk bears on."""
        return self.sums.tokens > 0

    @property
    def busy(self) -> int:
        """Number of lanes that some chunk bears on."""
        return int(np.count_nonzero(self.lanes))

    def tokens_computed(self, exchange: str) -> list[int]:
        """New tokens that each lane computes: settled ones where their blocks are, others on all
        lanes of a group alike."""
        sums = self.sums
        tokens = sums.computed if EXCHANGES[exchange].settled else sums.even
        return np.ceil(tokens).astype(int).tolist()

    def work(self) -> ExchangeWork:
        """The sums, on the lane with the largest of each."""
        largest = ChunkSums(*self.table.max(1).tolist())
        return ExchangeWork(
            lanes=self.group_size,
            tokens=int(largest.tokens),
            context=int(largest.context),
            pairs=largest.pairs,
            share=math.ceil(largest.computed),
            shard=math.ceil(largest.shard),
            touched=largest.touched,
            even=int(largest.even),
            holders=self.holders,
            shard_pairs=largest.shard_pairs,
            hop_pairs=largest.hop_pairs,
        )


class ExchangedChunks(NamedTuple):
    """The spread chunks of a step, the exchange by which they reach KV on other lanes, and seconds
    per layer of that and of their attention."""

    strategy: str
    seconds: float
    chunks: SpreadChunks


@dataclasses.dataclass(slots=True)
class LaneLoad:
    """The work of one lane in a step, so far."""

    decodes: int = 0
    context: float = 0.0  # of the decodes, on this lane
    longest: float = 0.0  # of these contexts
    chunks: int = 0  # that the lane computes
    tokens: int = 0  # prefill tokens that it computes
    tiles: int = 0  # rows that hold them
    attention: float = 0.0  # seconds per layer, of the chunks
    spread: int = 0  # spread tokens that it exchanges with the others, as Costs.kvp_token counts
    samples: int = 0
    # how the step's spread decodes reach KV on other lanes, the same on all lanes, if nothing else
    # is spread; None where there are none or no rates are known
    decode_choice: Decision | None = None
    # the step's spread chunks, the same on all lanes; None where no rates are known
    exchanged: ExchangedChunks | None = None
    spread_seconds: float = 0.0  # per layer, of the spread chunks that bear on this lane

    def plus(self, tokens: int, tile: int, attention: float = 0.0, spread: int = 0) -> LaneLoad:
        """Returns the load with a chunk, of which the lane computes `tokens` tokens in rows of
        `tile`, with `attention` seconds per layer; spread: tokens that it exchanges for it."""
        return LaneLoad(
            decodes=self.decodes,
            context=self.context,
            longest=self.longest,
            chunks=self.chunks + 1,
            tokens=self.tokens + tokens,
            tiles=self.tiles - (-tokens // tile),
            attention=self.attention + attention,
            spread=self.spread + spread,
            samples=self.samples,
            decode_choice=self.decode_choice,
            exchanged=self.exchanged,
            spread_seconds=self.spread_seconds,
        )

    def plus_spread(
        self, tokens: int, tile: int, exchanged: ExchangedChunks, chunks: int = 1
    ) -> LaneLoad:
        """Returns the load with `chunks` more of the step's spread chunks, of which the lane
        computes `tokens` tokens in rows of `tile`."""
        load = self.plus(tokens, tile)
        load.chunks += chunks - 1
        load.exchanged = exchanged
        load.spread_seconds = exchanged.seconds
        return load

    def beside(self, exchanged: ExchangedChunks) -> LaneLoad:
        """Returns the load in a step whose spread chunks are on other lanes."""
        return dataclasses.replace(self, exchanged=exchanged)
