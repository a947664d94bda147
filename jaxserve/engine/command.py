"""Border B: all that the host tells the devices, and all that comes back, as plain integers.

The engine decides and writes a `StepCommand`; a worker executes it, or many workers do, each its
own part, in the same order. Nothing else crosses: a recorded run, replayed by a fresh worker, gives
the same tokens. `encode` makes bytes of a command for a journey to another process, `decode` a
command of bytes. Their number depends on the batch, not on the context: padding, and page tables
whose entries follow each other, take the room of one entry.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxserve.api.batch import NO_COPIES, NO_STORES, PageStores
from jaxserve.api.request import KvSource
from jaxserve.cache.hashes import KEY_BYTES
from jaxserve.cache.tiers import Fetch, SourceBlocks
from jaxserve.engine.sampling_rows import SamplingAdmission
from jaxserve.engine.step_shapes import StepShape, delta_columns, layout

VERSION = 13  # of the byte form
NO_STEP = -1  # in place of a shape: nothing is computed, only what else the command says
NO_SAMPLING = -1  # in place of a variant: no token is sampled after this step
SAMPLE_LATER = -2  # tokens are sampled by a later command, once their masks are known
SCORES = 64  # prompt tokens whose log-probabilities or embeddings one launch computes
_HEAD = struct.Struct("<BBiiiiBHIIHHH")  # fields of `_Head`
_ARRAY = struct.Struct("<BBI")  # kind of number, how it is written, bytes
_WIDTH = struct.Struct("<I")
_RAW, _RUNS = 0, 1
_KINDS = (np.dtype("<i4"), np.dtype("<f4"), np.dtype("<u1"))
_KIND_OF = {np.dtype("<f4"): 1, np.dtype("<u1"): 2, np.dtype(bool): 2}  # others: integers
_MOST_ROWS = 1 << 24  # of an array that bytes may unfold to
_RESULT = struct.Struct("<BiBHH")
_SCALARS = ("lane", "slot", "fresh")  # fields of an admission
_NONE = np.zeros((0, 1), np.int32)


class CommandError(ValueError):
    """Bytes that are no command of this version."""


class DeviceError(Exception):
    """A step failed on the devices; what they held is lost."""


class WorkersLost(Exception):
    """Processes with devices are gone, and with them all that was computed; others may take their
    place."""


@dataclasses.dataclass(frozen=True, eq=False)
class StepCommand:
    """One step, or what else the devices must do between two. In this order a worker: forgets all
    that it holds (`reset`), sets the sampling state of new sequences, brings adapters to the
    devices (`adapter_loads`), reads pages that lower tiers are to keep (`stores`), writes pages
    that came from there, begins to fetch others, sets page-table entries, copies states from pages
    (`restores`), runs the layers, reads those of their pages that others want (`computed`, each
    group of layers as soon as it has run), copies states to pages (`saves`), samples, scores prompt
    tokens, and pools.

    shape: index of the compiled shape, or NO_STEP. rows [lanes, size]: the step's row of each lane,
    see `step_shapes.layout`. reads: the version of the sampled tokens that the step feeds (0:
    none).
    variant: index in VARIANTS, NO_SAMPLING or SAMPLE_LATER; with NO_STEP it samples for the newest
    step that was to be sampled later. groups: of layers of each stage, to be run now; 0: all. With
    NO_STEP they are the next ones of the step that is issued in part; what
    follows the layers follows the last group, and other steps may come in between, with other slots
    and pages. masks [lanes, samples, words]: bits of the tokens that may be
    sampled, for the guided variant. loads [m, 4]: ticket and number of a piece of a fetch, how many
    of its blocks are written, and whether that is the last of its fetch (`fetched_pieces`).
    table_updates [m, columns]: see `lanes.layout`. restores, saves [m, 2 + pages],
    adapter_loads [m, 2]: see `Batch`.
    scores [k, 2, lanes, SCORES]: tokens of the step, and the ids whose log-probabilities are
    wanted. pools [k, lanes, SCORES]: tokens of the step that prompts are embedded by, first those
    that are; the rest is negative.
    """

    number: int
    shape: int = NO_STEP
    reads: int = 0
    variant: int = NO_SAMPLING
    groups: int = 0
    reset: bool = False
    admissions: tuple[SamplingAdmission, ...] = ()
    adapter_loads: np.ndarray = dataclasses.field(default_factory=lambda: NO_COPIES)
    stores: PageStores = NO_STORES
    computed: PageStores = NO_STORES
    loads: np.ndarray = dataclasses.field(default_factory=lambda: _NONE)
    fetches: tuple[Fetch, ...] = ()
    table_updates: np.ndarray = dataclasses.field(default_factory=lambda: _NONE)
    restores: np.ndarray = dataclasses.field(default_factory=lambda: NO_COPIES)
    saves: np.ndarray = dataclasses.field(default_factory=lambda: NO_COPIES)
    rows: np.ndarray = dataclasses.field(default_factory=lambda: _NONE)
    masks: np.ndarray = dataclasses.field(default_factory=lambda: _NONE)
    scores: np.ndarray = dataclasses.field(default_factory=lambda: _NONE)
    pools: np.ndarray = dataclasses.field(default_factory=lambda: _NONE)


@dataclasses.dataclass(frozen=True, eq=False)
class StepResult:
    """Results of a step for the host. tokens [lanes, samples]: sampled ids, negative where logits
    were not finite; None where nothing was sampled. logprobs: of these tokens, where the variant
    gives them: chosen [lanes, samples], the likeliest and their ids [lanes, samples, k]. scores:
    per entry of the command's `scores` the same of the wanted ids. pooled: per entry of its `pools`
    the embeddings [lanes, m, D] f32 of its first m tokens, of all lanes' that are wanted."""

    number: int
    tokens: np.ndarray | None
    logprobs: tuple[np.ndarray, ...] = ()
    scores: tuple[tuple[np.ndarray, ...], ...] = ()
    pooled: tuple[np.ndarray, ...] = ()


# --- the byte form


class _Head(NamedTuple):
    """Head of a command, before its arrays. samples, words: extent of the masks."""

    version: int
    reset: bool
    number: int
    shape: int
    reads: int
    variant: int
    groups: int
    admissions: int
    stores: int
    computed: int
    fetches: int
    samples: int
    words: int


class CommandCodec:
    """Makes bytes of commands and commands of bytes, for workers that compiled these shapes."""

    def __init__(
        self,
        shapes: Sequence[StepShape],
        lanes: int,
        block_size: int,
        page_groups: int = 1,
        state_pages: int = 0,
    ):
        self._layouts = [layout(shape, block_size, page_groups) for shape in shapes]
        self._lanes = lanes
        self._update_columns = 1 + delta_columns(page_groups)  # and the lane
        self._copy_columns = 2 + state_pages

    def encode(self, command: StepCommand) -> bytes:
        """The command's bytes. Integers are little-endian, and as wide at any length of context."""
        arrays = list(self._parts(command))
        head = _Head(
            VERSION,
            command.reset,
            command.number,
            command.shape,
            command.reads,
            command.variant,
            command.groups,
            len(command.admissions),
            len(command.stores),
            len(command.computed),
            len(command.fetches),
            *_extent(command.masks),
        )
        return _HEAD.pack(*head) + b"".join(_encoded(array) for array in arrays)

    def _parts(self, command: StepCommand) -> Iterator[np.ndarray]:
        """Everything that is an array, each with rows that resemble each other."""
        for stores in (command.stores, command.computed):
            if len(stores):
                yield from _store_rows(stores)
        yield command.adapter_loads.reshape(-1, 2)
        yield command.loads.reshape(-1, 4)
        for fetch in command.fetches:
            yield from _fetch_rows(fetch)
        yield command.table_updates.reshape(-1, self._update_columns)
        yield command.restores.reshape(-1, self._copy_columns)
        yield command.saves.reshape(-1, self._copy_columns)
        yield command.masks.reshape(-1, 1)
        yield command.scores.reshape(-1, 1)
        yield command.pools.reshape(-1, 1)
        if command.shape != NO_STEP:
            for view in self._layouts[command.shape].views(command.rows).values():
                yield view.reshape(-1, view.shape[-1] if view.ndim == 3 and view.size else 1)
        for admission in command.admissions:
            for field in dataclasses.fields(admission):
                yield np.atleast_1d(getattr(admission, field.name)).reshape(-1, 1)

    def decode(self, data: bytes) -> StepCommand:
        """A command of its bytes. Errors: CommandError."""
        try:
            return self._decode(memoryview(data))
        except (struct.error, IndexError, ValueError) as error:
            raise CommandError(f"not a command of version {VERSION}: {error}") from None

    def encode_result(self, result: StepResult) -> bytes:
        """The result's bytes."""
        tokens = () if result.tokens is None else (result.tokens,)
        scores = (part for parts in result.scores for part in parts)
        arrays = [*tokens, *result.logprobs, *result.pooled, *scores]
        counts = len(tokens), len(result.logprobs), len(result.pooled)
        head = _RESULT.pack(VERSION, result.number, *counts)
        return head + b"".join(_shape(array) + _encoded(array.reshape(-1, 1)) for array in arrays)

    def decode_result(self, data: bytes) -> StepResult:
        """A result of its bytes. Errors: CommandError."""
        try:
            version, number, sampled, scored, pooled = _RESULT.unpack_from(data)
            if version != VERSION:
                raise CommandError(f"version {version} is not {VERSION}")
            reader = _Reader(memoryview(data), _RESULT.size)
            arrays = []
            while not reader.ended:
                shape = reader.shape()
                arrays.append(reader.array().reshape(shape))
        except (struct.error, IndexError, ValueError) as error:
            raise CommandError(f"not a result of version {VERSION}: {error}") from None
        first = sampled + scored
        rest = arrays[first + pooled :]
        return StepResult(
            number,
            arrays[0] if sampled else None,
            tuple(arrays[sampled:first]),
            tuple(tuple(rest[at : at + 3]) for at in range(0, len(rest), 3)),
            tuple(arrays[first : first + pooled]),
        )

    def _decode(self, data: memoryview) -> StepCommand:
        head = _Head._make(_HEAD.unpack_from(data))
        if head.version != VERSION:
            raise CommandError(f"version {head.version} is not {VERSION}")
        if not NO_STEP <= head.shape < len(self._layouts):
            compiled = len(self._layouts)
            raise CommandError(f"shape {head.shape} is not among the {compiled} compiled")
        reader = _Reader(data, _HEAD.size)
        parts: dict[str, Any] = {  # in the order of `_parts`
            "stores": _stores(reader, head.stores),
            "computed": _stores(reader, head.computed),
            "adapter_loads": reader.array().reshape(-1, 2),
            "loads": reader.array().reshape(-1, 4),
            "fetches": tuple(_fetch(reader) for _ in range(head.fetches)),
            "table_updates": reader.array().reshape(-1, self._update_columns),
            "restores": reader.array().reshape(-1, self._copy_columns),
            "saves": reader.array().reshape(-1, self._copy_columns),
            "masks": self._masks(reader.array(), head),
            "scores": reader.array().reshape(-1, 2, self._lanes, SCORES),
            "pools": reader.array().reshape(-1, self._lanes, SCORES),
            "rows": self._rows(reader, head.shape),
            "admissions": tuple(_admission(reader) for _ in range(head.admissions)),
        }
        reader.end()
        return StepCommand(
            head.number,
            head.shape,
            head.reads,
            head.variant,
            head.groups,
            bool(head.reset),
            **parts,
        )

    def _masks(self, masks: np.ndarray, head: _Head) -> np.ndarray:
        return masks.reshape(self._lanes, head.samples, head.words) if head.samples else masks

    def _rows(self, reader: _Reader, shape: int) -> np.ndarray:
        if shape == NO_STEP:
            return _NONE
        place = self._layouts[shape]
        rows = np.zeros((self._lanes, place.size), np.int32)
        for view in place.views(rows).values():
            view[...] = reader.array().reshape(view.shape)
        return rows


def _store_rows(stores: PageStores) -> Iterator[np.ndarray]:
    yield np.stack([stores.lanes, stores.pages, stores.retention], axis=1)
    yield np.frombuffer(b"".join(stores.keys), np.uint8).reshape(-1, KEY_BYTES)


def _stores(reader: _Reader, count: int) -> PageStores:
    if not count:
        return NO_STORES
    lanes, pages, retention = reader.array().reshape(count, 3).T
    keys = reader.array().reshape(count, KEY_BYTES)
    return PageStores(lanes, pages, retention, [key.tobytes() for key in keys])


def _fetch_rows(fetch: Fetch) -> Iterator[np.ndarray]:
    """Everything of a fetch: its numbers and keys, and those of another replica, where it has
    one."""
    source = fetch.source or KvSource("", 0)
    there = fetch.there or SourceBlocks([], 0, 0)
    numbers = fetch.ticket, source.blocks, source.block_size, there.size, there.skip
    yield np.array([numbers], np.int32)
    yield np.array([[fetch.time_left]], np.float32)
    yield fetch.places.reshape(-1, 2)
    yield _bytes(b"".join(fetch.keys), KEY_BYTES)
    yield _bytes(b"".join(there.keys), KEY_BYTES)
    yield _bytes(source.address.encode())
    yield _bytes(source.request_id.encode())


def _bytes(data: bytes, width: int = 1) -> np.ndarray:
    return np.frombuffer(data, np.uint8).reshape(-1, width)


def _fetch(reader: _Reader) -> Fetch:
    ticket, blocks, block_size, size, skip = reader.array().reshape(5).tolist()
    time_left = float(reader.array().reshape(()))
    places = reader.array().reshape(-1, 2)
    keys, far = ([key.tobytes() for key in reader.array().reshape(-1, KEY_BYTES)] for _ in range(2))
    address, request_id = (reader.array().tobytes().decode() for _ in range(2))
    source = KvSource(address, blocks, request_id, block_size) if address else None
    there = SourceBlocks(far, size, skip) if size else None
    return Fetch(ticket, keys, places, source, there, time_left)


def _extent(masks: np.ndarray) -> tuple[int, int]:
    return (masks.shape[1], masks.shape[2]) if masks.size else (0, 0)


def _admission(reader: _Reader) -> SamplingAdmission:
    values = {}
    for field in dataclasses.fields(SamplingAdmission):
        array = reader.array().reshape(-1)
        values[field.name] = array.reshape(()) if field.name in _SCALARS else array
    values["fresh"] = values["fresh"].astype(bool)
    return SamplingAdmission(**values)


def _encoded(array: np.ndarray) -> bytes:
    """Rows [n, k] of one kind of number, whole or as runs of rows with equal differences."""
    kind = _kind(array)
    if not array.size:
        return _empty(kind, array.shape[1])
    raw = np.ascontiguousarray(array, _KINDS[kind])
    body = _runs(raw.view(np.int32)) if len(raw) > 2 and kind != 2 else None
    written = _RUNS
    if body is None:
        written = _RAW
        body = _WIDTH.pack(raw.shape[1]) + raw.tobytes()
    return _ARRAY.pack(kind, written, len(body)) + body


@functools.cache
def _empty(kind: int, width: int) -> bytes:
    return _ARRAY.pack(kind, _RAW, _WIDTH.size) + _WIDTH.pack(width)


def _kind(array: np.ndarray) -> int:
    return _KIND_OF.get(array.dtype, 0)


def _runs(rows: np.ndarray) -> bytes | None:
    """The first row, then runs: how many rows follow by the same difference, and that difference.
    None where the rows as they are take fewer bytes. Differences wrap as int32 does, so that
    floats' bits come back too."""
    width = rows.shape[1]
    flat = rows.reshape(-1)
    steps = flat[width:] - flat[:-width]
    changed = np.flatnonzero(steps[width:] != steps[:-width])
    changed //= width
    if (len(changed) // width + 1) * (width + 1) >= flat.size:
        return None
    starts = np.empty(len(changed) + 1, np.int64)
    starts[0] = 0
    np.add(changed, 1, out=starts[1:])
    if width > 1:  # a row that changes in several columns was found several times
        starts = starts[np.flatnonzero(np.diff(starts, prepend=-1))]
    if len(starts) * (width + 1) + width >= flat.size:
        return None
    table = np.empty((len(starts), 1 + width), "<i4")
    table[:-1, 0] = starts[1:] - starts[:-1]
    table[-1, 0] = len(rows) - 1 - starts[-1]
    table[:, 1:] = steps.reshape(-1, width)[starts]
    return _WIDTH.pack(width) + flat[:width].tobytes() + table.tobytes()


def _shape(array: np.ndarray) -> bytes:
    return struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)


class _Reader:
    """Arrays one after the other."""

    def __init__(self, data: memoryview, at: int):
        self._data = data
        self._at = at

    def array(self) -> np.ndarray:
        """The next array [n, k]. Errors: CommandError."""
        kind, written, size = _ARRAY.unpack_from(self._data, self._at)
        self._at += _ARRAY.size
        body = self._data[self._at : self._at + size]
        if len(body) != size or kind >= len(_KINDS):
            raise CommandError("it ends in the middle of an array")
        self._at += size
        (width,) = _WIDTH.unpack_from(body)
        dtype = _KINDS[kind]
        if written == _RAW:
            return np.frombuffer(body[4:], dtype).reshape(-1, width).copy()
        ints = np.frombuffer(body[4:], "<i4")
        table = ints[width:].reshape(-1, 1 + width)
        counts = table[:, 0]
        if (counts < 0).any() or int(counts.astype(np.int64).sum()) > _MOST_ROWS:
            raise CommandError(f"an array has more than {_MOST_ROWS} rows")
        with np.errstate(over="ignore"):
            steps = np.concatenate([ints[None, :width], np.repeat(table[:, 1:], counts, axis=0)])
            return np.cumsum(steps, axis=0, dtype=np.int32).view(dtype)

    def shape(self) -> tuple[int, ...]:
        """The next array's shape, where one is written."""
        (count,) = struct.unpack_from("<B", self._data, self._at)
        shape = struct.unpack_from(f"<{count}I", self._data, self._at + 1)
        self._at += 1 + 4 * count
        return shape

    @property
    def ended(self) -> bool:
        return self._at >= len(self._data)

    def end(self) -> None:
        """Checks that all was read. Errors: CommandError."""
        if self._at != len(self._data):
            raise CommandError(f"{len(self._data) - self._at} bytes too many")
