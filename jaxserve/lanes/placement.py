"""Chooses the lane on which a sequence's next block goes: one class per policy.

Attention gives the same answer wherever a block lies, so a placement decides speed and room, never
tokens. A new one is a subclass of `Placement` and a row of `PLACEMENTS`, from which settings take
their choices; what schedulers, costs and planners ask of it are its attributes.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from hashlib import blake2b

from jaxserve.lanes.groups import group_around, group_sizes, lanes_of, size_around
from jaxserve.lanes.layout import SequenceLayout

UNLIMITED = 2**31  # blocks of a sequence on a lane
NODE_LANES = 8  # that a node has at most: beyond, links are slow
# history, as a multiple of new tokens, after which a lane that computes the last of these has at
# most a seventh more pairs of query and key than the mean
EVEN_HISTORY = 3


class Placement:
    """Chooses lanes for the blocks of one cache's sequences.

    lanes: how many there are. limit: blocks of a sequence on a lane before the next lane joins.
    stripe: consecutive blocks on a lane, where a prompt is dealt out. pool: lanes of the aligned
    groups over which prompts are dealt out, for placements that have `pools`.
    """

    # lanes to which blocks of a long prompt go, for help texts
    help: str
    # lanes share a long prompt's blocks from its first ones on; else they fill one after the other
    deals = False
    # the lanes of a prompt may be chosen by a planner; without one `limit` says which prompts are
    # dealt out
    planned = False
    # all prompts, short ones too, are dealt out over the lanes of a pool
    scatters = False
    # they are dealt out by segments over the lanes of an aligned group, of a size that is given
    pools = False

    def __init__(self, lanes: int, limit: int = UNLIMITED, stripe: int = 1, pool: int = 1):
        self.lanes = lanes
        self.limit = limit
        self.stripe = stripe
        self.pool = pool

    def dealt_over(self, home: int, blocks: int) -> tuple[int, ...]:
        """Returns the lanes that share a prompt of `blocks` blocks from its first ones on, if no
        planner chooses them; none where lanes fill one after the other, or one holds the
        prompt."""
        return ()

    def drawn(self, blocks: int) -> int:
        """Returns the number of segments of a dealt prompt of `blocks` blocks whose lanes are drawn
        one by one; 0 where blocks are dealt evenly."""
        return 0

    def dealt(self, layout: SequenceLayout, blocks: int) -> list[int]:
        """Returns the lanes for the next `blocks` blocks of `layout`, those of one chunk, in their
        order; none where `next_lane` chooses them one by one, as it does for a block whose lane has
        no page."""
        return []

    def next_lane(self, layout: SequenceLayout, available: list[int]) -> int:
        """Returns the lane for the block behind those of `layout`, whose key `layout.key` gives.
        available: pages that can be had on each lane, of which one has some; the lane that is
        returned has."""
        raise NotImplementedError


class Grow(Placement):
    """Stays on a lane until the sequence's limit there is reached, then goes to a lane of the
    smallest group with which some lane can join, of these to that with the most pages available
    (Medha's dynamic growth, M5).

    Decoded blocks of a spread sequence go round the lanes of its group that are below the limit.
    Once every lane with room holds as many blocks as the limit says, they go round all lanes of the
    group, and others to where most pages are available: the limit says when lanes join, not what
    fits.
    """

    help = "the next lane once one holds lane_tokens"

    def next_lane(self, layout: SequenceLayout, available: list[int]) -> int:
        lane = next_of_round(layout, available, self.limit)
        if lane is not None:
            return lane
        held = layout.by_lane
        if available[layout.last_lane] and held[layout.last_lane] < self.limit:
            return layout.last_lane
        lanes = [lane for lane, pages in enumerate(available) if pages]
        joining = [lane for lane in lanes if held[lane] < self.limit]
        if not joining:
            lane = next_of_round(layout, available)
            return max(lanes, key=available.__getitem__) if lane is None else lane
        members = [lane for lane, blocks in enumerate(held) if blocks or lane == layout.home]
        size = lambda lane: size_around((*members, lane), self.lanes)
        return min(joining, key=lambda lane: (size(lane), -available[lane], lane))


class Striped(Grow):
    """Goes stripe by stripe over the lanes of the group, for prompts that are dealt out; `Grow` for
    others.

    Each chunk is dealt out for itself, wherever in the prompt it is: whole rounds of stripes, and
    of what is left an equal piece for each lane. So all lanes have as much to compute, of few new
    tokens too, and hold as much: odd blocks go to lanes that hold less. The prompt's last block is
    at home, where the token after it is sampled; decoded blocks go round the group, whatever its
    lanes hold.
    """

    help = (
        "evenly over all lanes if it is longer than lane_tokens, or over those that a planner "
        "chooses, from the first to the last again and again"
    )
    deals = True
    planned = True

    def dealt_over(self, home: int, blocks: int) -> tuple[int, ...]:
        return tuple(range(self.lanes)) if blocks > self.limit else ()

    def rounds(self, before: int, blocks: int, lanes: int) -> int:
        """Returns how many pieces each lane gets of the last `blocks` blocks of a chunk, which are
        fewer than two stripes for each of `lanes` lanes; `before`: blocks of the sequence before
        these."""
        return 1 if blocks <= lanes * self.stripe else 2

    def order(self, lanes: list[int], rounds: int) -> list[int]:
        """Returns the lanes of consecutive pieces, in `rounds` rounds."""
        return lanes * rounds

    def dealt(self, layout: SequenceLayout, blocks: int) -> list[int]:
        if not layout.group or layout.decoding:
            return []
        first = len(layout.pages)
        count = len(layout.group)
        sizes, rounds = self._pieces(first, blocks, count)
        places = self.order([*range(count)], rounds)[: len(sizes)]
        lanes = self._lanes_of_places(layout, places, sizes)
        if first + blocks == layout.prompt_blocks and layout.home in lanes:
            here = lanes.index(layout.home)
            lanes[here], lanes[places[-1]] = lanes[places[-1]], layout.home
        return [lanes[place] for place, size in zip(places, sizes) for _ in range(size)]

    def _lanes_of_places(
        self, layout: SequenceLayout, places: list[int], sizes: list[int]
    ) -> list[int]:
        """Returns the lane of each place in the order: a place that gets more blocks than others
        is for a lane that holds fewer. places: of pieces of `sizes` blocks."""
        count = len(layout.group)
        blocks = [0] * count
        for place, size in zip(places, sizes):
            blocks[place] += size
        most_first = sorted(range(count), key=lambda place: -blocks[place])
        lanes = [0] * count
        for place, lane in zip(most_first, sorted(layout.group, key=layout.by_lane.__getitem__)):
            lanes[place] = lane
        return lanes

    def _pieces(self, first: int, blocks: int, lanes: int) -> tuple[list[int], int]:
        """Returns the blocks of each piece of a chunk of `blocks` blocks from number `first` on,
        and the number of rounds that they take."""
        whole, left = divmod(blocks, 2 * lanes * self.stripe)
        sizes = [self.stripe] * (2 * lanes * whole)
        rounds = 2 * whole
        if left:
            more = self.rounds(first + blocks - left, left, lanes)
            size, larger = divmod(left, more * lanes)
            sizes += [size + 1] * larger + [size] * (more * lanes - larger if size else 0)
            rounds += more
        return sizes, rounds

    def next_lane(self, layout: SequenceLayout, available: list[int]) -> int:
        if layout.group and layout.decoding:
            lane = next_of_round(layout, available)
            if lane is not None:
                return lane
        return super().next_lane(layout, available)


class Zigzag(Striped):
    """Goes stripe by stripe over the lanes of the group and back again, for prompts that are dealt
    out; `Grow` for others.

    So each lane has as many early tokens of a chunk as late ones, which see all before them: causal
    attention takes every lane equally long (context parallel paper, 3.5.1). Of few tokens after
    many each lane has one piece: they see about as much wherever they are.
    """

    help = "the same, but there and back again"

    def rounds(self, before: int, blocks: int, lanes: int) -> int:
        if before < EVEN_HISTORY * blocks:
            return 2
        return super().rounds(before, blocks, lanes)

    def order(self, lanes: list[int], rounds: int) -> list[int]:
        return [*lanes, *reversed(lanes)] * (rounds // 2) + lanes * (rounds % 2)


class RoundRobin(Placement):
    """Goes block by block over the lanes, skipping full ones."""

    help = "block after block to the next lane"
    deals = True
    scatters = True

    def dealt_over(self, home: int, blocks: int) -> tuple[int, ...]:
        return tuple(range(self.lanes))

    def next_lane(self, layout: SequenceLayout, available: list[int]) -> int:
        block = len(layout.pages)
        turns = (number % self.lanes for number in range(block, block + self.lanes))
        return next(lane for lane in turns if available[lane])


class Random(RoundRobin):
    """Draws any lane, but the same one in every run."""

    help = "to any lane at random"

    def drawn(self, blocks: int) -> int:
        return blocks

    def next_lane(self, layout: SequenceLayout, available: list[int]) -> int:
        lanes = [lane for lane, pages in enumerate(available) if pages]
        return random.Random(layout.slot * 1_000_003 + len(layout.pages)).choice(lanes)


class Hashed(Grow):
    """Goes segment by segment, each a stripe long, to the lane of the group around home that the
    key of the segment's first block says: equal prefixes come to lie on equal lanes, and hot ones
    spread evenly over the group (TokenLake, 4.3). `Grow` for prompts of one segment.

    Blocks without a key, as decoded ones, hang on the last block before that has one. Where a lane
    is full, another one of the group is drawn by the same hash, beyond it any.
    """

    help = (
        "segment by segment of segment_tokens to the lane that its hash says, of a group of "
        "pool_lanes lanes"
    )
    deals = True
    scatters = True
    pools = True

    def dealt_over(self, home: int, blocks: int) -> tuple[int, ...]:
        return tuple(group_around(home, self.pool)) if blocks > self.stripe else ()

    def drawn(self, blocks: int) -> int:
        return -(-blocks // self.stripe)

    def next_lane(self, layout: SequenceLayout, available: list[int]) -> int:
        group = layout.group
        if not group:
            return super().next_lane(layout, available)
        block = len(layout.pages)
        number = segment_hash(layout, block - block % self.stripe)
        lane = group[number % len(group)]
        if available[lane]:
            return lane
        lanes = [lane for lane in group if available[lane]]
        if not lanes:
            lanes = [lane for lane, pages in enumerate(available) if pages]
        return lanes[(number >> 32) % len(lanes)]


def segment_hash(layout: SequenceLayout, first: int) -> int:
    """Returns 64 bits by the key of a segment's `first` block: of the last block before that has a
    key and the distance from it, where it has none; of the slot, where no block has. Mixed, so
    that segments in a row are not on lanes in a row."""
    known = min(first, layout.prompt_blocks - 2)  # the prompt's last block may not be full
    key = layout.key(known) if known >= 0 else None
    if key is None:
        known = -1
        key = layout.slot.to_bytes(8, "little")
    distance = (first - known).to_bytes(8, "little", signed=True)
    return int.from_bytes(blake2b(key + distance, digest_size=8).digest(), "little")


def default_pool(lanes: int) -> int:
    """Returns the lanes of the largest aligned groups that lie in a node."""
    return max(size for size in group_sizes(lanes) if size <= NODE_LANES or size == 1)


def next_of_round(
    layout: SequenceLayout, available: list[int], limit: int = UNLIMITED
) -> int | None:
    """Returns the lane for a decoded block of a spread sequence: block by block round the lanes of
    its group that have a page and hold fewer than `limit` of its blocks. None for other blocks, and
    where no lane has.

    So KV grows evenly over a group, and the group stays as it is (context parallel paper, Alg. 4,
    which goes round token by token; here KV lies in pages, so a block is the unit). A round begins
    where most pages are available: at another lane for each sequence of a batch, so that lanes fill
    evenly over the batch too.
    """
    if not layout.decoding:
        return None
    group: Collection[int] = lanes_of(layout.home, layout.by_lane)
    if layout.group == (layout.home,):
        group = layout.group  # blocks elsewhere are on their way home
    elif len(group) == 1:
        return None
    lanes = [lane for lane in group if available[lane] and layout.by_lane[lane] < limit]
    if len(layout.pages) == layout.prompt_blocks:
        return max(lanes, key=available.__getitem__, default=None)
    distance = lambda lane: (lane - layout.last_lane - 1) % len(group)
    return min(lanes, key=distance, default=None)


PLACEMENTS: dict[str, type[Placement]] = {
    "grow": Grow,
    "striped": Striped,
    "zigzag": Zigzag,
    "round_robin": RoundRobin,
    "random": Random,
    "hashed": Hashed,
}
