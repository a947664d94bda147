"""Steps of a draft model's worker: what its places compute next, and what they sampled.

A place is a row of the worker's tables with pages of its own that never change: the table is
written once, and a step is sent as a few rows of integers.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from jaxserve.api.batch import Batch
from jaxserve.engine.command import NO_SAMPLING, StepCommand
from jaxserve.engine.command_builder import DRAWN
from jaxserve.engine.executor import CommandExecutor
from jaxserve.engine.sampling_rows import SamplingAdmission
from jaxserve.engine.step_rows import StepRows
from jaxserve.engine.step_shapes import layout

SAMPLE_POSITION = 2  # column of the field `samples`


class Rows(NamedTuple):
    """Rows of a step [n], each of `length` tokens of a `place` from position `start` on. tokens:
    those of all rows, one row after the other; empty: rows take what was sampled last for their
    place. sample: after which rows a token is sampled. first: position in the text of the place's
    position 0, for what is drawn depends on it."""

    place: np.ndarray
    start: np.ndarray
    length: np.ndarray
    tokens: np.ndarray
    sample: np.ndarray
    first: np.ndarray


class DraftSteps:
    """Issues steps to a worker of one lane, which does nothing else, and reads their tokens.
    blocks: of each place. `rows`: most of a step of single tokens; `tokens`: most of a step with
    one long row."""

    def __init__(self, worker: CommandExecutor, blocks: int):
        self._worker = worker
        self._plan = worker.plan
        self._blocks = blocks
        self._issued: deque[tuple[np.ndarray, np.ndarray]] = deque()
        self.rows = max(shape.decode.rows for shape in self._plan.shapes)
        self.tokens = max(shape.prefill.tokens for shape in self._plan.shapes)
        self.reset()

    def reset(self) -> None:
        """Has the device hold nothing but the table. Errors: DeviceError."""
        self._version = 0
        self._issued.clear()
        self._worker.execute(StepCommand(number=0, reset=True, table_updates=self._table()))

    @property
    def waiting(self) -> int:
        """Number of steps that were issued and not read."""
        return len(self._issued)

    def _table(self) -> np.ndarray:
        """Returns the page-table entries of all places."""
        blocks = self._blocks
        groups = self._plan.page_groups
        place, block = (each.reshape(-1) for each in np.indices((self._plan.slots, blocks)))
        page = (place * blocks + block) * groups
        others = [page + group for group in range(1, groups)]
        return np.stack([0 * place, place, block, page, block, *others], 1).astype(np.int32)

    def admit(self, admissions: list[SamplingAdmission]) -> None:
        """Sets how a place samples."""
        self._worker.execute(StepCommand(number=0, admissions=tuple(admissions)))

    def issue(self, rows: Rows) -> None:
        """Issues a step; waits for nothing. Errors: DeviceError."""
        batch = self._batch(rows)
        plan = self._plan
        demand = plan.demand(batch)
        shape = plan.shape_for(demand, but=self._worker.uncompiled)
        assert shape is not None, f"no compiled shape holds {demand}"
        groups = plan.page_groups
        arrays = StepRows(batch, demand, shape, plan.block_size, page_groups=groups).arrays()
        samples = layout(shape, plan.block_size, groups).views(arrays.rows)["samples"][0]
        sampled = np.flatnonzero(rows.sample)
        at = arrays.sampled[sampled]
        samples[at, SAMPLE_POSITION] += rows.first[sampled]
        command = StepCommand(
            number=0,
            shape=plan.shapes.index(shape),
            reads=0 if len(rows.tokens) else self._version,
            variant=DRAWN if len(sampled) else NO_SAMPLING,
            rows=arrays.rows,
        )
        self._worker.execute(command)
        self._issued.append((rows.place[sampled], at))
        self._version += len(sampled) > 0

    def _batch(self, rows: Rows) -> Batch:
        count = len(rows.place)
        stop = rows.start + rows.length
        return Batch(
            number=0,
            seq=rows.place.astype(np.int64),
            slot=rows.place,
            lane=np.zeros(count, np.int32),
            start=rows.start,
            length=rows.length,
            is_decode=np.full(count, not len(rows.tokens)),
            sample=rows.sample,
            group_size=np.ones(count, np.int32),
            blocks_per_lane=-(-stop[:, None] // self._plan.block_size),
            block_lane=np.empty(0, np.int32),
            tokens=rows.tokens,
            moves=np.empty((0, 4), np.int32),
            table_updates=np.empty((0, 5), np.int32),
            seconds=0.0,
            admitted=(),
        )

    def read(self) -> list[dict[int, int]]:
        """Waits for all steps; returns the sampled tokens of each that sampled some, by place.
        Errors: DeviceError."""
        found = []
        while self._issued:
            places, at = self._issued.popleft()
            tokens = self._worker.wait().tokens
            if tokens is not None and len(places):
                found.append(dict(zip(places.tolist(), tokens[0, at].tolist())))
        return found
