"""The work of one lane in a step, and the spread chunks that lanes share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.lanes.choice import DecodeChoice
from jaxserve.lanes.exchange import EXCHANGES
from jaxserve.lanes.work import ExchangeWork, pairs_of


class LaneSums(NamedTuple):
    """Sums over the spread chunks of the groups that a lane is in."""

    tokens: float = 0  # new ones
    context: float = 0  # tokens, cached and new
    pairs: float = 0.0  # of query and key
    even: float = 0  # new tokens of the lane where any lane of the group may compute them
    computed: float = 0.0  # new tokens of the lane where those compute them that have their blocks
    shard: float = 0.0  # tokens of KV on the lane
    shard_pairs: float = 0.0  # pairs of all queries and the lane's KV
    hop_pairs: float = 0.0  # pairs of the lane's queries and another lane's KV, at most
    touched: float = 0.0  # tokens of KV that the lane's queries are paired with in a hop, at most
    visits: float = 0  # of `even`, new tokens of each other lane whose sequences this one holds


@dataclasses.dataclass(frozen=True, slots=True)
class SpreadChunks:
    """The spread chunks of a step, each of which bears on the lanes of its group. sums: by lane.
    group_size: lanes of the largest group; holders: most lanes that hold a chunk's sequence."""

    sums: tuple[LaneSums, ...]
    group_size: int = 1
    holders: int = 0

    @classmethod
    def none(cls, lanes: int) -> SpreadChunks:
        return cls((LaneSums(),) * lanes)

    def plus(
        self,
        cached: int,
        new: int,
        computed: Sequence[float],
        shares: Sequence[float],
        group: range,
        dealt: range,
    ) -> SpreadChunks:
        """Adds a chunk of `new` tokens after `cached` ones. computed, shares [lanes]: each lane's
        share of the new tokens, where they are settled, and of all KV, none outside of `group`, the
        lanes that meet; dealt: of these, the lanes that compute it where it is not settled."""
        context = cached + new
        pairs = pairs_of(cached, new)
        largest = max(shares)
        part_of_all = -(-new // len(dealt))
        sums = []
        for lane, (earlier, part, share) in enumerate(zip(self.sums, computed, shares)):
            if lane not in group:
                sums.append(earlier)
                continue
            sums.append(
                LaneSums(
                    tokens=earlier.tokens + new,
                    context=earlier.context + context,
                    pairs=earlier.pairs + pairs,
                    even=earlier.even + part_of_all * (lane in dealt),
                    computed=earlier.computed + new * part,
                    shard=earlier.shard + context * share,
                    shard_pairs=earlier.shard_pairs + pairs * share,
                    hop_pairs=earlier.hop_pairs + pairs * largest * part,
                    touched=earlier.touched + context * largest * (part > 0),
                    visits=earlier.visits + part_of_all * (share > 0),
                )
            )
        holders = sum(share > 0 for share in shares)
        return SpreadChunks(
            tuple(sums), max(self.group_size, len(group)), max(self.holders, holders)
        )

    @property
    def busy(self) -> list[int]:
        """The lanes that some chunk bears on."""
        return [lane for lane, sums in enumerate(self.sums) if sums.tokens]

    def tokens_computed(self, exchange: str) -> list[int]:
        """New tokens that each lane computes: settled ones where their blocks are, others on all
        lanes of a group alike."""
        if EXCHANGES[exchange].settled:
            return [math.ceil(sums.computed) for sums in self.sums]
        return [math.ceil(sums.even) for sums in self.sums]

    def work(self) -> ExchangeWork:
        """The sums, on the lane with the largest of each."""
        largest = LaneSums(*map(max, zip(*self.sums)))
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
            visits=min(largest.visits / max(largest.even, 1), 1.0),
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
    samples: int = 0
    # how the step's spread decodes reach KV on other lanes, the same on all lanes; None where there
    # are none or no rates are known
    decode_choice: DecodeChoice | None = None
    # the step's spread chunks, the same on all lanes; None where no rates are known
    exchanged: ExchangedChunks | None = None
    spread_seconds: float = 0.0  # per layer, of the spread chunks that bear on this lane
    chunks: int = 0  # that the lane computes
    tokens: int = 0  # prefill tokens that it computes
    tiles: int = 0  # rows that hold them
    attention: float = 0.0  # seconds per layer, of the chunks
    spread: int = 0  # spread tokens that it exchanges with the others, as Costs.kvp_token counts

    def plus(self, tokens: int, tile: int, attention: float = 0.0, spread: int = 0) -> LaneLoad:
        """Returns the load with a chunk, of which the lane computes `tokens` tokens in rows of
        `tile`, with `attention` seconds per layer; spread: tokens that it exchanges for it."""
        load = LaneLoad(self.decodes, self.context, self.longest, self.samples, self.decode_choice)
        load.exchanged = self.exchanged
        load.spread_seconds = self.spread_seconds
        load.chunks = self.chunks + 1
        load.tokens = self.tokens + tokens
        load.tiles = self.tiles - (-tokens // tile)
        load.attention = self.attention + attention
        load.spread = self.spread + spread
        return load

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
