"""Which rows of which lanes the chunks of a batch become.

A prefill chunk is cut into rows of a shape's width. A local chunk's rows follow each other on its
home lane; a spread chunk's rows are dealt over the lanes, the last one to its home lane, which
samples for it, or, around a ring, to the lanes that hold its blocks.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from jaxserve.api.batch import Batch
from jaxserve.engine.shapes import MOVES, NOWHERE, StepShape


@dataclasses.dataclass(frozen=True)
class StepDemand:
    """What of a batch bears on its shape. `long` are the chunks of more than one token: (row of the
    batch, lane, length, spread)."""

    local: int  # most local chunks of one token on a lane
    spread: int  # most spread ones
    long: tuple[tuple[int, int, int, bool], ...]
    lanes: int

    @classmethod
    def of(cls, batch: Batch, lanes: int) -> StepDemand:
        at = np.flatnonzero(batch.length != 1)
        if lanes == 1:
            local = len(batch.slot) - len(at)
            spread = 0
        else:
            single = batch.length == 1
            place = batch.lane[single] + lanes * batch.spread[single]
            local, spread = (
                np.bincount(place, minlength=2 * lanes).reshape(2, lanes).max(1).tolist()
            )
        long = zip(*(field[at].tolist() for field in (batch.lane, batch.length, batch.spread)))
        return cls(
            local, spread, tuple((row, *chunk) for row, chunk in zip(at.tolist(), long)), lanes
        )

    def fits(self, shape: StepShape) -> bool:
        """Whether the shape holds it; rows of a ring are dealt by where blocks are (`settled`),
        which is looked at elsewhere."""
        if self.local > shape.decode[0] or self.spread > shape.spread_decode[0]:
            return False
        return not self.long or (
            self._fits(shape.prefill, False) and self._fits(shape.spread_prefill, True)
        )

    def _fits(self, group: tuple[int, int], spread: bool) -> bool:
        chunks = [(lane, length) for _, lane, length, flag in self.long if flag == spread]
        if not chunks:
            return True
        rows, width = group
        if not rows:
            return False
        need = [0] * self.lanes
        for lane, length in chunks:
            need[lane] += 1 if spread else -(-length // width)
        total = sum(-(-length // width) for _, length in chunks)
        return max(need) <= rows and total <= rows * self.lanes


@dataclasses.dataclass(frozen=True)
class ChunkSlice:
    """Where part of a chunk went: `size` tokens from `offset` in the chunk are tokens `token`... of
    `lane`."""

    chunk: int
    offset: int
    size: int
    lane: int
    token: int


def launches(moves: np.ndarray, lanes: int, most: int = MOVES) -> Iterator[tuple[np.ndarray, int]]:
    """Cuts page moves [m, 4] (lane, page, to lane, page) into launches of at most `most` per pair
    of lanes: ints [lanes, 2, lanes, most], see `sharding.page_moves`, and how many moves they are.
    In their order: a launch ends before a move that reads, or writes, what another one of it
    writes."""
    ints = np.full((lanes, 2, lanes, most), NOWHERE, np.int32)
    count = Counter[tuple[int, int]]()
    written = set[tuple[int, int]]()
    for lane, page, to, new in moves.tolist():
        if count[lane, to] == most or not written.isdisjoint({(lane, page), (to, new)}):
            yield ints, sum(count.values())
            ints = np.full_like(ints, NOWHERE)
            count = Counter()
            written = set()
        nth = count[lane, to]
        ints[lane, 0, to, nth] = page
        ints[to, 1, lane, nth] = new
        count[lane, to] += 1
        written.add((to, new))
    if written:
        yield ints, sum(count.values())


RingSlice = tuple[int, int, int, int]  # chunk, offset in it, size, lane


def settled(batch: Batch, work: StepDemand, width: int, block: int) -> list[RingSlice]:
    """The spread chunks of more than one token in rows of at most `width` tokens, each on the lane
    that holds its blocks. Rows end where lanes change and where whole rows from the start of the
    sequence do."""
    out = []
    at = 0
    for chunk, _, length, spread in work.long:
        if not spread:
            continue
        start = int(batch.start[chunk])
        offset = 0
        first = start // block
        lanes = batch.block_lane[at : at + (start + length - 1) // block - first + 1]
        at += len(lanes)
        changes = (np.flatnonzero(np.diff(lanes)) + 1 + first) * block - start
        ends = np.unique(
            np.concatenate([changes, np.arange(width - start % width, length, width), [length]])
        )
        for end in ends.tolist():
            out.append((chunk, offset, end - offset, int(lanes[(start + offset) // block - first])))
            offset = end
    return out


def ring_rows(batch: Batch, work: StepDemand, width: int, block: int) -> list[RingSlice]:
    """Rows dealt by where blocks are; none where a ring cannot be: nothing is spread but decodes,
    or a token is sampled elsewhere than at home."""
    rows = settled(batch, work, width, block)
    ends = {chunk: lane for chunk, _, _, lane in rows}
    return (
        []
        if any(batch.sample[chunk] and batch.lane[chunk] != lane for chunk, lane in ends.items())
        else rows
    )


def fullest(rows: list[RingSlice]) -> int:
    """Rows of the lane that has most."""
    return int(np.bincount([lane for *_, lane in rows]).max())


def group_sizes(groups: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    return sum(rows for rows, _ in groups), sum(rows * width for rows, width in groups)


def deal(
    work: StepDemand, shape: StepShape, lanes: int, ring: Sequence[RingSlice]
) -> list[ChunkSlice]:
    """Rows for the long chunks. A local chunk's rows follow each other on its lane; a spread one's
    go where most rows are free, or around a ring where its blocks are."""
    out = []
    tokens = {False: shape.decode[0], True: group_sizes(shape.local)[1] + shape.spread_decode[0]}
    for flag, (rows, width) in ((False, shape.prefill), (True, shape.spread_prefill)):
        chunks = [
            (chunk, lane, length) for chunk, lane, length, spread in work.long if spread == flag
        ]
        used = [0] * lanes
        if flag and shape.exchange != "gather":
            for chunk, offset, size, lane in ring:
                out.append(ChunkSlice(chunk, offset, size, lane, tokens[flag] + used[lane] * width))
                used[lane] += 1
            continue
        # rows for last pieces
        kept = [sum(lane == home for _, home, _ in chunks) if flag else 0 for lane in range(lanes)]
        for chunk, home, length in chunks:
            for offset in range(0, length, width):
                final = offset + width >= length
                kept[home] -= flag and final
                lane = (
                    home
                    if final or not flag
                    else max(range(lanes), key=lambda x: (rows - used[x] - kept[x], x == home))
                )
                out.append(
                    ChunkSlice(
                        chunk,
                        offset,
                        min(width, length - offset),
                        lane,
                        tokens[flag] + used[lane] * width,
                    )
                )
                used[lane] += 1
    return out
