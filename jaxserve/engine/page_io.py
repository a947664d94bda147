"""Copies KV pages of the devices to host memory and back, in one layout whatever the mesh
(`block_layout`), so that a block that a replica with one mesh wrote can be read by one with
another.

Pages are read and written by programs that run in the order of the steps; they are few and of fixed
size. Where a replica has several processes, each reads and writes the layers and heads that its
devices have, of the pages of all lanes: lanes of other processes send theirs, so that a block can
come back to any lane.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve.engine.block_layout import BlockLayout
from jaxserve.engine.stage_programs import POOL_AXES, Named, Stage, lowered
from jaxserve.engine.stages import Stages
from jaxserve.engine.step_shapes import NOWHERE
from jaxserve.kernels.kv_pages import KVPages
from jaxserve.kernels.page_copy import read_pages, write_pages
from jaxserve.sharding.mesh import KVP
from jaxserve.sharding.rules import sharding, spec
from jaxserve.store.block_part import BlockPart

MOST_BYTES = 64 * 2**20  # of the blocks that one launch moves, on each lane
MOST_PAGES = 32  # that one launch moves, on each lane
BLOCK_AXES = ("lanes", None, None, "kv_heads")  # of blocks [lanes, pages, layers, kv heads, ...]


class PartMissing(Exception):
    """Layers of a block that were never read from the devices."""


class PageIo:
    """Reads and writes pages of all stages of a worker: of each block the part that is on the
    devices of this process. kv_heads: see BlockLayout."""

    def __init__(self, stages: Stages, kv_heads: int):
        self.kv_heads = kv_heads
        whole = BlockLayout(stages.plan, kv_heads)
        self._heads = _local_heads(stages)  # of the pools
        self.layout = BlockLayout(
            stages.plan, kv_heads, part=_local_part(stages, self._heads, whole.copies)
        )
        self._stages = stages
        self._lanes = stages.plan.mesh.kvp
        # the same in all processes, whatever their parts
        self.most = max(1, min(MOST_PAGES, MOST_BYTES // whole.bytes))
        self.sizes = sorted({1, self.most})  # pages per lane of a launch

    def layout_of(self, block_size: int) -> BlockLayout:
        """The layout of blocks of another size."""
        return BlockLayout(self._stages.plan, self.kv_heads, block_size, self.layout.part)

    @property
    def layer_groups(self) -> list[range]:
        """The layers of a block that each stage here has, see BlockLayout."""
        return [self._pools(stage) for stage in self.stages]

    def _pools(self, stage: Stage) -> range:
        return self._stages.plan.pools(stage.layers)

    def _caches(self, stage: Stage) -> slice:
        """Returns which of a stage's caches are pools of pages."""
        return slice(len(self._pools(stage)))

    def programs(self) -> Iterator[Named]:
        """Name and lowering of all programs."""
        for stage in self.stages:
            for size in self.sizes:
                yield self._read_program(stage, size)
            yield self._write_program(stage)

    # --- from the devices

    def reads(self, places: np.ndarray) -> Iterator[BlocksRead]:
        """Yields the blocks on pages, a launch's at a time, of which nothing is read yet. places
        [n, 2] int32: lane, page."""
        for ints, rows in launches(places, self._lanes, self.most):
            issue = functools.partial(self._issue_read, ints)
            yield BlocksRead(self.layout, self._heads, rows, len(self.stages), issue)

    @property
    def stages(self) -> list[Stage]:
        """Returns the stages that have devices here."""
        return self._stages.stages

    def _issue_read(self, ints: np.ndarray, stage: Stage) -> tuple[range, KVPages]:
        """Issues copies of pages ints [lanes, most] out of a stage's pools, which it names."""
        valid = ints < NOWHERE
        size = next(size for size in self.sizes if size >= valid.sum(1).max())
        program = self._stages.programs.get(*self._read_program(stage, size))
        pages = stage.caches[self._caches(stage)]
        part = program(pages, np.where(valid, ints, 0)[:, :size])
        for array in jax.tree.leaves(part):
            array.copy_to_host_async()
        return self._pools(stage), part

    def _read_program(self, stage: Stage, size: int) -> Named:
        def lower() -> Any:
            pages = self._stages.programs.cache_shapes(stage)[self._caches(stage)]
            to_all = _lanes_apart(stage.mesh)
            axes = (None, *BLOCK_AXES[1:]) if to_all else BLOCK_AXES
            out = jax.tree.map(lambda _: spec(*axes), pages[0])
            f = functools.partial(_read, to_all=to_all)
            return lowered(f, stage.mesh, (pages, self._ids(stage, size)), out)

        return f"read_pages_{stage.index}_{size}", lower

    # --- to the devices

    def gather(self, blocks: Sequence[KVPages], places: np.ndarray) -> GatheredBlocks:
        """Puts blocks, one per place [n, 2] (lane, page), at most `most` per lane, together for a
        launch and on the devices; returns before they are there."""
        ((ints, rows),) = launches(places, self._lanes, self.most)
        parts = []
        for stage in self.stages:
            shapes = self._blocks(stage, self.most)
            values = jax.tree.map(self._local_zeros, shapes)
            for block, (lane, row) in zip(blocks, rows):
                jax.tree.map(functools.partial(self._place, stage, lane, row), values, block)
            parts.append(jax.tree.map(self._put, shapes, values))
        return GatheredBlocks(ints, parts, rows)

    def _local_zeros(self, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        """Zeros for the heads of an array of blocks that are here."""
        lanes, rows, layers, _, *rest = shape.shape
        return np.zeros((lanes, rows, layers, len(self._heads), *rest), shape.dtype)

    def _put(self, shape: jax.ShapeDtypeStruct, values: np.ndarray) -> jax.Array:
        """Puts an array of blocks, of which the heads that are here are given, on the devices."""
        if shape.sharding.is_fully_addressable:
            return jax.device_put(values, shape.sharding)
        first = self._heads.start

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            start, stop, _ = index[3].indices(shape.shape[3])
            return values[(*index[:3], slice(start - first, stop - first))]

        return jax.make_array_from_callback(shape.shape, shape.sharding, part)

    def _place(
        self, stage: Stage, lane: int, row: int, values: np.ndarray, block: np.ndarray
    ) -> None:
        first = self.layout.part.layers.start
        pools = self._pools(stage)
        part = block[pools.start - first : pools.stop - first]
        copies = self.layout.copies
        if copies > 1:
            mine = [head // copies - self.layout.part.heads.start for head in self._heads]
            part = part[:, mine]
        values[lane, row] = part

    def write(self, blocks: GatheredBlocks) -> None:
        """Issues copies of gathered blocks into the pools."""
        for stage, values in zip(self.stages, blocks.parts):
            program = self._stages.programs.get(*self._write_program(stage))
            pools = self._caches(stage)
            stage.caches[pools] = program(stage.caches[pools], blocks.ids, values)

    def _write_program(self, stage: Stage) -> Named:
        def lower() -> Any:
            pages = self._stages.programs.cache_shapes(stage)[self._caches(stage)]
            arguments = (pages, self._ids(stage, self.most), self._blocks(stage, self.most))
            pools = [spec(*POOL_AXES)] * len(pages)
            return lowered(_write, stage.mesh, arguments, pools, donate=(0,))

        return f"write_pages_{stage.index}", lower

    def _ids(self, stage: Stage, size: int) -> jax.ShapeDtypeStruct:
        lanes = sharding(stage.mesh, "lanes")
        return jax.ShapeDtypeStruct((self._lanes, size), jnp.int32, sharding=lanes)

    def _blocks(self, stage: Stage, size: int) -> KVPages:
        """Shapes of blocks of a stage's layers, `size` on each lane."""
        where = sharding(stage.mesh, *BLOCK_AXES)

        def shape(pool: Any) -> jax.ShapeDtypeStruct:
            extent = self._lanes, size, len(self._pools(stage)), *pool.shape[2:]
            return jax.ShapeDtypeStruct(extent, pool.dtype, sharding=where)

        return jax.tree.map(shape, self._stages.plan.pool())


class PartRead(NamedTuple):
    """Pages of blocks as some layers have them, in host memory."""

    layers: range
    pages: KVPages


class BlocksRead:
    """Blocks on their way from the devices. heads: of the pools, that are here. rows [n]: lane and
    row of each in the launch. stages: from how many they are read. issue: copies their pages out
    of the pools of one, and names its layers of the blocks."""

    def __init__(
        self,
        layout: BlockLayout,
        heads: range,
        rows: list[tuple[int, int]],
        stages: int,
        issue: Callable[[Stage], tuple[range, KVPages]],
    ):
        self._layout = layout
        copies = layout.copies
        # the first copy here of each of the model's own heads
        self._heads = [max(n * copies, heads.start) - heads.start for n in layout.part.heads]
        self._rows = rows
        self._stages = stages
        self._issue = issue
        self._issued: queue.SimpleQueue[tuple[range, KVPages] | None] = queue.SimpleQueue()
        self._arrived: list[PartRead] = []

    def __len__(self) -> int:
        return len(self._rows)

    def issue(self, stage: Stage) -> None:
        """Issues the copies of a stage's part of the blocks."""
        self._issued.put(self._issue(stage))

    def end(self) -> None:
        """Notes that nothing more is issued, after an error too: then parts are missing."""
        self._issued.put(None)

    def parts(self) -> Iterator[PartRead]:
        """Yields the part of each stage once it is in host memory. Errors: JaxRuntimeError where
        the device failed, PartMissing where a part was never issued."""
        for _ in range(self._stages):
            issued = self._issued.get()
            if issued is None:
                raise PartMissing("a step ended before all its layers were issued")
            layers, pages = issued
            yield PartRead(layers, jax.tree.map(_local, pages))

    def wait(self) -> None:
        """Waits until they are in host memory. Errors: as of `parts`."""
        self._arrived = list(self.parts())

    def copy(self, index: int, block: np.ndarray) -> None:
        """Writes block number `index` to its bytes [bytes] uint8; after `wait`."""
        for part in self._arrived:
            self.copy_part(part, index, block)

    def copy_part(self, part: PartRead, index: int, block: np.ndarray) -> None:
        """Writes a part of block number `index` to the block's bytes [bytes] uint8."""
        lane, row = self._rows[index]
        target = self._layout.view(block)
        first = self._layout.part.layers.start
        layers = slice(part.layers.start - first, part.layers.stop - first)
        for source, out in zip(jax.tree.leaves(part.pages), jax.tree.leaves(target)):
            read = source[lane, row]
            if self._layout.copies > 1:
                read = read[:, self._heads]
            out[layers] = read


class GatheredBlocks:
    """Blocks on their way to the devices: ids [lanes, most] of their pages (see `launches`), for
    each stage its part, and lane and row of each block."""

    def __init__(self, ids: np.ndarray, parts: list[KVPages], rows: list[tuple[int, int]]):
        self.ids = ids
        self.parts = parts
        self._rows = rows

    def first(self, count: int) -> GatheredBlocks:
        """The first blocks of these, without the others."""
        ids = self.ids.copy()
        for lane, row in self._rows[count:]:
            ids[lane, row] = NOWHERE + row
        return GatheredBlocks(ids, self.parts, self._rows[:count])


def launches(
    places: np.ndarray, lanes: int, most: int
) -> Iterator[tuple[np.ndarray, list[tuple[int, int]]]]:
    """Cuts places [n, 2] (lane, page), in their order, into launches of at most `most` per lane:
    ids [lanes, most] of pages, numbers from NOWHERE on for none, and the lane and row of each."""
    none = np.broadcast_to(NOWHERE + np.arange(most, dtype=np.int32), (lanes, most))
    ids = none.copy()
    rows: list[tuple[int, int]] = []
    count = [0] * lanes
    for lane, page in places.tolist():
        if count[lane] == most:
            yield ids, rows
            ids = none.copy()
            rows = []
            count = [0] * lanes
        ids[lane, count[lane]] = page
        rows.append((lane, count[lane]))
        count[lane] += 1
    if rows:
        yield ids, rows


def _local_heads(stages: Stages) -> range:
    """The kv heads of the pools that the devices of this process have; of whole stages all."""
    mesh = stages.stages[0].mesh
    here = [device.process_index == jax.process_index() for device in mesh.devices.flat]
    ranks = np.nonzero(np.reshape(here, mesh.devices.shape).any(0))[0]
    each = stages.plan.pool().kv.shape[2] // mesh.devices.shape[1]
    return range(int(ranks[0]) * each, (int(ranks[-1]) + 1) * each)


def _local_part(stages: Stages, heads: range, copies: int) -> BlockPart:
    """The part of each block that the devices of this process have."""
    pools = [stages.plan.pools(stage.layers) for stage in (stages.stages[0], stages.stages[-1])]
    layers = range(pools[0].start, pools[1].stop)
    return BlockPart(layers, range(heads.start // copies, -(-heads.stop // copies)))


def _lanes_apart(mesh: Mesh) -> bool:
    """Returns whether the lanes of a stage are on several processes."""
    return any(len({device.process_index for device in rank}) > 1 for rank in mesh.devices.T)


def _local(array: jax.Array) -> np.ndarray:
    """Blocks [lanes, n, layers, kv heads, ...] as host memory has them: the heads that are here."""
    if array.is_fully_addressable:
        return np.asarray(array)
    shards = {shard.index[3].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)], axis=3)


def _read(pools: list[KVPages], ids: jax.Array, to_all: bool) -> KVPages:
    """Inside shard_map: pages ids [1, n] of every layer, as [1, n, layers, kv heads, ...]. to_all:
    those of all lanes, on each."""
    read = [read_pages(pages, ids[0]) for pages in pools]
    blocks = jax.tree.map(lambda *parts: jnp.stack(parts, axis=1)[None], *read)
    if not to_all:
        return blocks
    return jax.tree.map(lambda x: jax.lax.all_gather(x, KVP, axis=0, tiled=True), blocks)


def _write(pools: list[KVPages], ids: jax.Array, values: KVPages) -> list[KVPages]:
    """Inside shard_map: writes blocks [1, n, layers, kv heads, ...] to pages ids [1, n] of every
    layer; those out of range are skipped."""
    out = []
    for layer, pages in enumerate(pools):
        out.append(write_pages(pages, ids[0], values.take((0, slice(None), layer))))
    return out
