"""Writes a batch as rows of a compiled shape: what is sent to the devices, one row of int32 per
lane.

A local chunk's rows follow each other on its home lane; a spread chunk's rows are dealt over the
lanes of its group, the last one to its home lane, which samples for it, or, around a ring, to the
lanes that have its blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from jaxserve.api.batch import Batch
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.engine.step_demand import LaneSlice, StepDemand, cut
from jaxserve.engine.step_shapes import (
    ADAPTER,
    DELTA_SLOT,
    FEED,
    LENGTH,
    NOWHERE,
    SAMPLE_SLOT,
    SLOT,
    START,
    UPDATE_LANE,
    StepShape,
    layout,
)
from jaxserve.lanes.groups import group_around


@dataclasses.dataclass(frozen=True)
class ChunkSlice:
    """Place of a part of a chunk: `size` tokens from `offset` in the chunk are tokens `token`... of
    `lane`, in its row number `row`."""

    chunk: int
    offset: int
    size: int
    lane: int
    row: int
    token: int


@dataclasses.dataclass(frozen=True)
class StepArrays:
    """A batch in a shape: what is sent, and where on the devices its parts will be.

    rows [lanes, size]: see `step_shapes.layout`. last [n]: index of each chunk's last token among
    its home lane's tokens. sampled [n]: where among its lane's samples a chunk's token will be; -1:
    it samples none. slices: of the chunks of more than one token. early_updates [m, 5]: page-table
    entries that are set before the step: those (after a long prefix hit) for which the rows have no
    room, or all.
    """

    shape: StepShape
    rows: np.ndarray
    last: np.ndarray
    sampled: np.ndarray
    slices: list[ChunkSlice]
    early_updates: np.ndarray


class _Span(NamedTuple):
    """A group of rows of `width` tokens on a lane: numbers of its first row and first token."""

    row: int
    token: int
    width: int


class _Spans(NamedTuple):
    """The groups of a shape's rows."""

    decode: _Span
    prefill: _Span
    spread_decode: _Span
    spread_prefill: _Span


@functools.cache
def _spans(shape: StepShape) -> _Spans:
    spans = []
    row = token = 0
    for group in (shape.decode, shape.prefill, shape.spread_decode, shape.spread_prefill):
        spans.append(_Span(row, token, group.width))
        row += group.rows
        token += group.tokens
    return _Spans(*spans)


class StepRows:
    """The rows of a batch, in a shape that holds its demand, on all lanes. block: tokens of a page.
    page_groups: number of them. early: whether all page-table entries are set before the step, for
    all of its layers."""

    def __init__(
        self,
        batch: Batch,
        demand: StepDemand,
        shape: StepShape,
        block: int,
        early: bool = False,
        page_groups: int = 1,
    ):
        place = layout(shape, block, page_groups)
        self._batch = batch
        self._demand = demand
        self._shape = shape
        self._early = early
        self._lanes = demand.lanes
        self._spans = _spans(shape)
        self._rows = np.zeros((demand.lanes, place.size), np.int32)
        self._view = place.views(self._rows)
        # index of each chunk's last token among its home lane's tokens
        self._last = np.zeros(len(batch.slot), np.int32)
        self._adapters = np.zeros(len(batch.slot), np.int32)  # of each chunk, 1 + its place
        if len(batch.adapters):
            self._adapters = batch.adapters + 1

    def arrays(self) -> StepArrays:
        """Writes all rows."""
        self._write_singles()
        slices: list[ChunkSlice] = []
        if self._demand.long:
            slices = [*self._local_slices(), *self._spread_slices()]
            self._write_slices(slices)
        self._write_moves()
        sampled = self._write_samples()
        early = self._write_updates()
        return StepArrays(self._shape, self._rows, self._last, sampled, slices, early)

    # --- chunks of one token

    def _write_singles(self) -> None:
        batch = self._batch
        single = batch.length == 1
        ids = np.full(len(batch.slot), FEED, np.int32)
        if len(batch.tokens):
            fresh = np.flatnonzero(single & ~batch.is_decode)
            ids[fresh] = batch.tokens[self._first_ids[fresh]]
        spread = batch.spread
        for lane, chunks in self._by_lane(np.flatnonzero(single & ~spread)):
            self._write_lane(chunks, lane, self._spans.decode, ids)
        if self._demand.spread_singles:
            for lane, chunks in self._by_lane(np.flatnonzero(single & spread)):
                self._write_lane(chunks, lane, self._spans.spread_decode, ids)
                self._write_entries(chunks, lane, self._spans.spread_decode.row)

    def _by_lane(self, chunks: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the lanes that are home to some of these chunks, and which."""
        if self._lanes == 1:
            yield 0, chunks
        elif len(chunks):
            homes = self._batch.lane[chunks]
            for lane in range(self._lanes):
                yield lane, chunks[homes == lane]

    def _write_lane(self, chunks: np.ndarray, lane: int, span: _Span, ids: np.ndarray) -> None:
        """Writes chunks of one token to the first rows of a span of their home lane."""
        count = len(chunks)
        rows = self._view["rows"][lane, span.row : span.row + count]
        rows[:, SLOT] = self._batch.slot[chunks]
        rows[:, START] = self._batch.start[chunks]
        rows[:, LENGTH] = 1
        rows[:, ADAPTER] = self._adapters[chunks]
        self._view["tokens"][lane, span.token : span.token + count] = ids[chunks]
        self._last[chunks] = np.arange(span.token, span.token + count)

    def _write_entries(self, chunks: np.ndarray, lane: int, row: int) -> None:
        """Writes how many page-table entries each lane of the group has, and which one is home,
        from a spread row on."""
        row -= self._spans.spread_decode.row
        group = group_around(lane, self._shape.group_size)
        entries = self._batch.blocks_per_lane[chunks, group.start : group.stop]
        self._view["held"][lane, row : row + len(chunks)] = entries
        self._view["homes"][lane, row : row + len(chunks)] = self._batch.lane[chunks] - group.start

    # --- chunks of more tokens

    @functools.cached_property
    def _first_ids(self) -> np.ndarray:
        """Number of each chunk's first id among the batch's tokens."""
        count = np.where(self._batch.is_decode, 0, self._batch.length)
        return np.cumsum(count) - count

    def _local_slices(self) -> Iterator[ChunkSlice]:
        local = [chunk for chunk in self._demand.long if not chunk.spread]
        parts = (part for chunk in local for part in cut(chunk, self._shape.prefill.width))
        return self._placed(parts, self._spans.prefill)

    def _spread_slices(self) -> Iterator[ChunkSlice]:
        parts: Iterable[LaneSlice] = self._demand.ring
        if not self._shape.prefill_ring:
            parts = self._demand.dealt(self._shape.spread_prefill)
        return self._placed(parts, self._spans.spread_prefill)

    def _placed(self, parts: Iterable[LaneSlice], span: _Span) -> Iterator[ChunkSlice]:
        """Gives each part the next row of its lane."""
        used = [0] * self._lanes
        for part in parts:
            number = used[part.lane]
            used[part.lane] += 1
            yield ChunkSlice(*part, span.row + number, span.token + number * span.width)

    def _write_slices(self, slices: list[ChunkSlice]) -> None:
        batch = self._batch
        for part in slices:
            chunk, lane = part.chunk, part.lane
            first = self._first_ids[chunk] + part.offset
            start = batch.start[chunk] + part.offset
            end = part.token + part.size
            row = batch.slot[chunk], start, part.size, self._adapters[chunk]
            self._view["rows"][lane, part.row] = row
            self._view["tokens"][lane, part.token : end] = batch.tokens[first : first + part.size]
            if batch.spread[chunk]:
                self._write_entries(np.array([chunk]), lane, part.row)
            self._last[chunk] = end - 1

    # --- besides tokens

    def _write_moves(self) -> None:
        """Writes moves [m, 4] as [lanes, 2, group size, most], see `page_moves.move_pages`."""
        out = self._view["moves"]
        moves = self._batch.moves
        size = self._shape.group_size
        out[:] = NOWHERE
        if not len(moves):
            return
        lane, page, to_lane, target = moves.T
        assert (lane // size == to_lane // size).all(), f"{moves} leave groups of {size} lanes"
        pair = lane * self._lanes + to_lane
        order = np.argsort(pair, kind="stable")
        _, first, count = np.unique(pair[order], return_index=True, return_counts=True)
        nth = np.empty_like(order)  # of the moves of its pair
        nth[order] = np.arange(len(moves)) - np.repeat(first, count)
        out[lane, 0, to_lane % size, nth] = page
        out[to_lane, 1, lane % size, nth] = target

    def _write_samples(self) -> np.ndarray:
        """Returns where among its lane's samples each chunk's token will be; -1: it samples
        none."""
        batch = self._batch
        out = self._view["samples"]
        out[:, :, SAMPLE_SLOT] = NOWHERE
        place = np.full(len(batch.slot), -1, np.int32)
        expected = np.full(len(batch.slot), FEED, np.int32)
        sampled = np.flatnonzero(batch.sample)
        if batch.drafts:
            sampled = sampled[np.lexsort((batch.start[sampled], batch.slot[sampled]))]
            is_draft = np.isin(sampled[1:], batch.drafts)
            expected[sampled[:-1][is_draft]] = batch.tokens[self._first_ids[sampled[1:][is_draft]]]
        for lane, chunks in self._by_lane(sampled):
            place[chunks] = np.arange(len(chunks))
            position = batch.start[chunks] + batch.length[chunks]
            out[lane, : len(chunks)] = np.array(
                (self._last[chunks], batch.slot[chunks], position, expected[chunks])
            ).T
        return place

    def _write_updates(self) -> np.ndarray:
        """Writes the newest updates of page tables; returns those that are set before the step."""
        out = self._view["deltas"]
        updates = self._batch.table_updates
        out[:, :, DELTA_SLOT] = NOWHERE
        if self._early or not len(updates):
            return updates
        early = []
        for lane in range(self._lanes):
            mine = updates[updates[:, UPDATE_LANE] == lane]
            riding = mine[max(0, len(mine) - out.shape[1]) :]
            out[lane, : len(riding)] = riding[:, UPDATE_LANE + 1 :]
            early.append(mine[: len(mine) - len(riding)])
        return np.concatenate(early)


def token_places(
    plan: StagePlan, shape: StepShape, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the slots and positions [lanes * T] of a step's tokens, lane after lane, as its
    programs find them; position -1: padding. rows [lanes, size]: see `step_shapes.layout`."""
    view = layout(shape, plan.block_size, plan.page_groups).views(rows)["rows"]
    slots = []
    positions = []
    row = 0
    for count, width in shape.local + shape.spread:
        some = view[:, row : row + count, None]
        offset = np.arange(width, dtype=np.int32)
        position = np.where(offset < some[..., LENGTH], some[..., START] + offset, np.int32(-1))
        positions.append(position.reshape(len(rows), -1))
        slots.append(np.broadcast_to(some[..., SLOT], position.shape).reshape(len(rows), -1))
        row += count
    return np.concatenate(slots, 1).ravel(), np.concatenate(positions, 1).ravel()
