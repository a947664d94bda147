"""From a batch to what is sent: the choice of a compiled shape, and the step as one row of int32
per lane.

A lane's tokens are rows of equal length in up to four groups: single tokens and prefill rows of
local sequences, then of spread ones. A `StepShape` is how many rows of how many tokens each group has;
the short list of shapes is all that is ever compiled. A prefill chunk is cut into rows; a spread
chunk's rows are dealt over the lanes, the last one to its home lane, which samples for it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from jaxserve.scheduling import Batch
from jaxserve.settings.schema import SchedulerConfig

NOWHERE = np.int32(2**30)  # a slot that no table has: writes to it are dropped
MOVES = 32  # pages that one launch moves from each lane to each
FEED = -1  # in place of a token id: the one sampled last for the row's slot


@dataclasses.dataclass(frozen=True)
class StepShape:
    """Everything static about a step, per lane: (rows, tokens per row) of each group; (0, 0) is an
    empty group."""

    decode: tuple[int, int] = (0, 0)
    prefill: tuple[int, int] = (0, 0)
    spread_decode: tuple[int, int] = (0, 0)
    spread_prefill: tuple[int, int] = (0, 0)
    samples: int = 1  # tokens it may sample per lane
    # how spread rows and blocks on other lanes meet: see sharding.exchange
    exchange: str = "gather"
    moves: int = 0  # pages that it may move from each lane to each, beside its layers

    @property
    def local(self) -> tuple[tuple[int, int], ...]:
        return tuple(group for group in (self.decode, self.prefill) if group[0])

    @property
    def spread(self) -> tuple[tuple[int, int], ...]:
        return tuple(group for group in (self.spread_decode, self.spread_prefill) if group[0])

    @property
    def rows(self) -> int:
        return sum(rows for rows, _ in self.local + self.spread)

    @property
    def tokens(self) -> int:
        return sum(rows * width for rows, width in self.local + self.spread)

    def __str__(self) -> str:
        return self._name

    @functools.cached_property
    def _name(self) -> str:
        name = lambda groups: "+".join(f"{rows}x{width}" for rows, width in groups)
        exchange = "" if self.exchange == "gather" else f"_{self.exchange}"
        moves = "_moves" if self.moves else ""
        return name(self.local) + (
            f"_spread_{name(self.spread)}{exchange}{moves}" if self.spread else ""
        )


def shapes(config: SchedulerConfig, lanes: int) -> list[StepShape]:
    """All shapes of an engine, cheapest first. Every batch that the scheduler may start fits the
    last of them."""
    most = (config.max_seqs, 1)
    tile = config.tile
    tiles = config.tiles
    wide = [(1, width) for width in _powers(tile, tile * tiles, 2) if width > 1]
    many = [(tiles, tile)] if tiles > 1 else []
    out = [StepShape((rows, 1)) for rows in _powers(1, config.max_seqs, 2)]
    out += [StepShape(decode, group) for group in wide + many for decode in ((0, 0), most)]
    out += [StepShape(most, (rows, tile)) for rows in _powers(2, tiles, 2) if rows < tiles]
    if lanes > 1:
        dealt = -(-tiles // lanes)
        out += [
            StepShape(most, (0, 0), most),
            StepShape(most, (0, 0), most, (dealt, tile)),
            StepShape(most, (tiles, tile), most, (dealt, tile)),
        ]
        out += [StepShape(most, (tiles, tile), most, (tiles, tile))]
        # cut where lanes change: some rows are short
        ring = [(min(tiles, dealt + 1), tile), (tiles, tile)] if tile > 1 else []
        out += [
            StepShape(most, local, most, group, exchange=exchange)
            for group in ring
            for local in ((0, 0), (tiles, tile))
            for exchange in rings(config)
        ]
    if lanes > 1 and config.planner != "none":
        out += [dataclasses.replace(shape, moves=MOVES) for shape in out if shape.spread_prefill[0]]
    sizes = sample_sizes(config)
    fit = lambda shape: next((size for size in sizes if size >= shape.rows), sizes[-1])
    out = [dataclasses.replace(shape, samples=fit(shape)) for shape in dict.fromkeys(out)]
    return sorted(out, key=lambda shape: (bool(shape.spread), shape.tokens, shape.rows))


def rings(config: SchedulerConfig) -> tuple[str, ...]:
    """The exchanges around a ring that steps may choose."""
    both = "pass_q", "pass_kv"
    return (
        ()
        if config.exchange == "gather"
        else (config.exchange,)
        if config.exchange in both
        else both
    )


def sample_sizes(config: SchedulerConfig) -> list[int]:
    """How many tokens a head program may sample per lane: its compiled sizes. A sequence samples
    one token of a step at most."""
    return list(_powers(1, config.max_seqs, 2))


def _powers(low: int, high: int, factor: int) -> Iterator[int]:
    while low < high:
        yield low
        low *= factor
    yield high


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each field of a step lies in a lane's row of int32. Field -> (offset, shape)."""

    fields: dict[str, tuple[int, tuple[int, ...]]]
    size: int

    def views(self, ints):
        """Per field, its part of `ints` [..., size], numpy or jax."""
        return {
            name: ints[..., at : at + math.prod(shape)].reshape(*ints.shape[:-1], *shape)
            for name, (at, shape) in self.fields.items()
        }


@functools.cache
def layout(shape: StepShape, lanes: int, block: int) -> Layout:
    """deltas: slot, index, page, block. tokens: ids or FEED. rows: slot, start, length. held: of
    spread rows, entries per lane. samples: token (of the lane's tokens) to sample after, slot,
    position of the sampled token. moves: see `rebalance.move`."""
    spread = sum(rows for rows, _ in shape.spread)
    new = lambda groups: sum(
        rows * (1 if width == 1 else -(-width // block) + 1) for rows, width in groups
    )
    sizes: dict[str, tuple[int, ...]] = {
        "deltas": (new(shape.local) + lanes * new(shape.spread), 4),
        "tokens": (shape.tokens,),
        "rows": (shape.rows, 3),
        "held": (spread, lanes),
        "samples": (shape.samples, 3),
        "moves": (2, lanes, shape.moves),
    }
    ends = list(itertools.accumulate(math.prod(size) for size in sizes.values()))
    return Layout(
        {name: (end - math.prod(size), size) for (name, size), end in zip(sizes.items(), ends)},
        ends[-1],
    )


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


def launches(moves: np.ndarray, lanes: int, most: int = MOVES) -> Iterator[np.ndarray]:
    """Moves [m, 4], in launches of at most `most` per pair of lanes: [lanes, 2, lanes, most], see
    `rebalance.move`. In their order: a launch ends before a move that reads, or writes, what
    another one of it writes."""
    ints = np.full((lanes, 2, lanes, most), NOWHERE, np.int32)
    count = Counter[tuple[int, int]]()
    written = set[tuple[int, int]]()
    for lane, page, to, new in moves.tolist():
        if count[lane, to] == most or not written.isdisjoint({(lane, page), (to, new)}):
            yield ints
            ints = np.full_like(ints, NOWHERE)
            count = Counter()
            written = set()
        nth = count[lane, to]
        ints[lane, 0, to, nth] = page
        ints[to, 1, lane, nth] = new
        count[lane, to] += 1
        written.add((to, new))
    if written:
        yield ints


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


@dataclasses.dataclass(frozen=True)
class Arrays:
    """A batch in a shape."""

    shape: StepShape
    ints: np.ndarray  # [lanes, size], see `layout`
    last: np.ndarray  # [n] index of each chunk's last token among its home lane's tokens
    # [n] where among its lane's samples a chunk's token will be; -1: it samples none
    sampled: np.ndarray
    pieces: list[ChunkSlice]  # of the chunks of more than one token
    # [m, 5] table entries (after a long prefix hit) that must be sent before the step
    early: np.ndarray
    moves: list[np.ndarray]  # launches of moves before the step: those that do not ride with it


def to_arrays(
    batch: Batch,
    work: StepDemand,
    shape: StepShape,
    lanes: int,
    block: int,
    ring: Sequence[RingSlice] = (),
) -> Arrays:
    """ring: `ring_rows`, where the shape has an exchange around one."""
    lay = layout(shape, lanes, block)
    ints = np.zeros((lanes, lay.size), np.int32)
    view = lay.views(ints)
    last = np.zeros(len(batch.slot), np.int32)
    _fill_singles(batch, view, shape, last)
    moves = list(launches(batch.moves, lanes))
    if shape.moves:
        view["moves"][:] = moves.pop() if moves else NOWHERE
    pieces = _deal(work, shape, lanes, ring) if work.long else []
    if pieces:
        _fill_pieces(batch, view, shape, pieces, last)
    return Arrays(
        shape,
        ints,
        last,
        _fill_samples(batch, view["samples"], last),
        pieces,
        _fill_deltas(batch.table_updates, view["deltas"]),
        moves,
    )


def _per_lane(rows: np.ndarray, lane: np.ndarray, lanes: int) -> list[np.ndarray]:
    """`rows` of which `lane` says the lane of each, lane by lane."""
    return [rows] if lanes == 1 else [rows[lane == index] for index in range(lanes)]


def _fill_samples(batch: Batch, out: np.ndarray, last: np.ndarray) -> np.ndarray:
    out[:, :, 1] = NOWHERE
    place = np.full(len(batch.slot), -1, np.int32)
    chunks = np.flatnonzero(batch.sample)
    for lane, mine in enumerate(_per_lane(chunks, batch.lane[chunks], len(out))):
        place[mine] = np.arange(len(mine))
        out[lane, : len(mine)] = np.array(
            (last[mine], batch.slot[mine], batch.start[mine] + batch.length[mine])
        ).T
    return place


def _fill_deltas(deltas: np.ndarray, out: np.ndarray) -> np.ndarray:
    """The newest entries ride with the step."""
    out[:, :, 0] = NOWHERE
    if not len(deltas):
        return deltas
    rest = []
    for lane, mine in enumerate(_per_lane(deltas, deltas[:, 0], len(out))):
        riding = mine[max(0, len(mine) - out.shape[1]) :]
        out[lane, : len(riding)] = riding[:, 1:]
        rest.append(mine[: len(mine) - len(riding)])
    return np.concatenate(rest)


def _tokens_at(batch: Batch) -> np.ndarray:
    """Where each chunk's ids begin in batch.tokens."""
    own = np.where(batch.is_decode, 0, batch.length)
    return np.cumsum(own) - own


def _fill_singles(
    batch: Batch, view: dict[str, np.ndarray], shape: StepShape, last: np.ndarray
) -> None:
    lanes = len(view["rows"])
    single = batch.length == 1
    ids = np.full(len(batch.slot), FEED, np.int32)
    if len(batch.tokens):
        given = np.flatnonzero(single & ~batch.is_decode)
        ids[given] = batch.tokens[_tokens_at(batch)[given]]
    local = (0, 0)
    spread = _sizes(shape.local)
    for flag, (row, token), (rows, _) in (
        (False, local, shape.decode),
        (True, spread, shape.spread_decode),
    ):
        group = np.flatnonzero(single & (batch.spread == flag)) if rows else np.empty(0, np.intp)
        for lane, mine in enumerate(
            _per_lane(group, batch.lane[group], lanes) if len(group) else ()
        ):
            where = view["rows"][lane, row : row + len(mine)]
            where[:, 0] = batch.slot[mine]
            where[:, 1] = batch.start[mine]
            where[:, 2] = 1
            view["tokens"][lane, token : token + len(mine)] = ids[mine]
            last[mine] = np.arange(token, token + len(mine))
            if flag:
                view["held"][lane, : len(mine)] = batch.blocks_per_lane[mine]


def _sizes(groups: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    return sum(rows for rows, _ in groups), sum(rows * width for rows, width in groups)


def _deal(
    work: StepDemand, shape: StepShape, lanes: int, ring: Sequence[RingSlice]
) -> list[ChunkSlice]:
    """Rows for the long chunks. A local chunk's rows follow each other on its lane; a spread one's
    go where most rows are free, or around a ring where its blocks are."""
    out = []
    tokens = {False: shape.decode[0], True: _sizes(shape.local)[1] + shape.spread_decode[0]}
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


def _fill_pieces(
    batch: Batch,
    view: dict[str, np.ndarray],
    shape: StepShape,
    pieces: list[ChunkSlice],
    last: np.ndarray,
) -> None:
    at = _tokens_at(batch)
    local_rows, local_tokens = _sizes(shape.local)
    for piece in pieces:
        chunk = piece.chunk
        lane = piece.lane
        token = piece.token
        size = piece.size
        spread = bool(batch.spread[chunk])
        singles, width = (
            (shape.spread_decode[0], shape.spread_prefill[1])
            if spread
            else (shape.decode[0], shape.prefill[1])
        )
        # within the local or the spread rows
        row = singles + (token - singles - spread * local_tokens) // width
        first = at[chunk] + piece.offset
        view["rows"][lane, row + spread * local_rows] = (
            batch.slot[chunk],
            batch.start[chunk] + piece.offset,
            size,
        )
        view["tokens"][lane, token : token + size] = batch.tokens[first : first + size]
        if spread:
            view["held"][lane, row] = batch.blocks_per_lane[chunk]
        last[chunk] = token + size - 1
