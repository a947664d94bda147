"""From a batch to what is sent to the devices: one row of int32 per lane."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxserve.api.batch import Batch
from jaxserve.engine.dealing import (
    ChunkSlice,
    RingSlice,
    StepDemand,
    deal,
    extent,
)
from jaxserve.engine.shapes import FEED, NOWHERE, StepShape, layout
from jaxserve.lanes.groups import group_around


@dataclasses.dataclass(frozen=True)
class StepArrays:
    """A batch in a shape: what is sent, and where on the devices its parts will be.

    rows [lanes, size]: see `shapes.layout`. last [n]: index of each chunk's last token among its
    home lane's tokens. sampled [n]: where among its lane's samples a chunk's token will be; -1: it
    samples none. slices: of the chunks of more than one token. early_updates [m, 5]: page-table
    entries (after a long prefix hit) for which the rows have no room.
    """

    shape: StepShape
    rows: np.ndarray
    last: np.ndarray
    sampled: np.ndarray
    slices: list[ChunkSlice]
    early_updates: np.ndarray


def to_arrays(
    batch: Batch,
    work: StepDemand,
    shape: StepShape,
    lanes: int,
    block: int,
    ring: Sequence[RingSlice] = (),
) -> StepArrays:
    """Writes a batch as the rows of a compiled shape. ring: `ring_rows`, where the shape has an
    exchange around one."""
    place = layout(shape, block)
    rows = np.zeros((lanes, place.size), np.int32)
    view = place.views(rows)
    last = np.zeros(len(batch.slot), np.int32)
    _fill_singles(batch, view, shape, last)
    _fill_moves(batch.moves, view["moves"], shape.group_size)
    slices = deal(work, shape, ring) if work.long else []
    if slices:
        _fill_slices(batch, view, shape, slices, last)
    sampled = _fill_samples(batch, view["samples"], last)
    early = _fill_deltas(batch.table_updates, view["deltas"])
    return StepArrays(shape, rows, last, sampled, slices, early)


def _fill_moves(moves: np.ndarray, out: np.ndarray, size: int) -> None:
    """Moves [m, 4] as [lanes, 2, size, most], see `page_moves.move_pages`."""
    out[:] = NOWHERE
    if not len(moves):
        return
    lane, page, to_lane, target = moves.T
    assert (lane // size == to_lane // size).all(), f"{moves} leave groups of {size} lanes"
    pair = lane * len(out) + to_lane
    order = np.argsort(pair, kind="stable")
    _, first, count = np.unique(pair[order], return_index=True, return_counts=True)
    nth = np.empty_like(order)  # of the moves of its pair
    nth[order] = np.arange(len(moves)) - np.repeat(first, count)
    out[lane, 0, to_lane % size, nth] = page
    out[to_lane, 1, lane % size, nth] = target


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
    spread = extent(shape.local)
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
                among = group_around(lane, shape.group_size)
                view["held"][lane, : len(mine)] = batch.blocks_per_lane[
                    mine, among.start : among.stop
                ]


def _fill_slices(
    batch: Batch,
    view: dict[str, np.ndarray],
    shape: StepShape,
    slices: list[ChunkSlice],
    last: np.ndarray,
) -> None:
    at = _tokens_at(batch)
    local_rows, local_tokens = extent(shape.local)
    for piece in slices:
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
            among = group_around(lane, shape.group_size)
            view["held"][lane, row] = batch.blocks_per_lane[chunk, among.start : among.stop]
        last[chunk] = token + size - 1
