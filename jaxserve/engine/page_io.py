"""Copies KV pages of the devices to host memory and back, in one layout whatever the mesh.

A block outside the devices is [layers, kv heads, 2, block_size, head_dim] numbers, all layers of
the model and each of its own kv heads once, followed by the scales [layers, kv heads, 2,
block_size] of quantised ones. So a block that a replica with one mesh wrote can be read by one with
another. Pages are read and written by programs that run in the order of the steps; they are few
and of fixed size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.engine.stage_plan import StagePlan
from jaxserve.engine.stage_programs import POOL_AXES, Named, Stage, lowered
from jaxserve.engine.stages import Stages
from jaxserve.engine.step_shapes import NOWHERE
from jaxserve.kernels.kv_pages import KVPages
from jaxserve.kernels.page_copy import read_pages, write_pages
from jaxserve.sharding.rules import sharding, spec

MOST_BYTES = 64 * 2**20  # of the blocks that one launch moves, on each lane
MOST_PAGES = 32  # that one launch moves, on each lane
BLOCK_AXES = ("lanes", None, None, "kv_heads")  # of blocks [lanes, pages, layers, kv heads, ...]


class BlockLayout:
    """The bytes of a block outside the devices. kv_heads: the model's own, of which a plan for
    more ranks than heads has several copies each."""

    def __init__(self, plan: StagePlan, kv_heads: int, block_size: int | None = None):
        """block_size: tokens of a block; None: of a page."""
        pool = plan.pool()
        vectors, _, head_dim = pool.kv.shape[3:]
        self.copies = plan.model.kv_heads // kv_heads
        self.block_size = block_size or plan.block_size
        self._kv = (plan.model.layers, kv_heads, vectors, self.block_size, head_dim)
        self._dtype = pool.kv.dtype
        self._kv_bytes = int(np.prod(self._kv)) * self._dtype.itemsize
        self._scales = None if pool.scales is None else pool.scales.dtype
        self.bytes = self._kv_bytes
        if self._scales is not None:
            self.bytes += int(np.prod(self._kv[:-1])) * self._scales.itemsize

    def parts(self, block: np.ndarray) -> list[np.ndarray]:
        """Views of what a block's bytes [bytes] uint8 are: [layers, heads, 2, block_size, ...]."""
        return jax.tree.leaves(self.view(block))

    def view(self, block: np.ndarray) -> KVPages:
        """A block's bytes [bytes] uint8 as the numbers and scales that they are."""
        kv = block[: self._kv_bytes].view(self._dtype).reshape(self._kv)
        if self._scales is None:
            return KVPages(kv)
        scales = block[self._kv_bytes :].view(self._scales).reshape(self._kv[:-1])
        return KVPages(kv, scales)


class PageIo:
    """Reads and writes pages of all stages of a worker. kv_heads: see BlockLayout."""

    def __init__(self, stages: Stages, kv_heads: int):
        self.kv_heads = kv_heads
        self.layout = BlockLayout(stages.plan, kv_heads)
        self._stages = stages
        self._lanes = stages.plan.mesh.kvp
        self.most = max(1, min(MOST_PAGES, MOST_BYTES // self.layout.bytes))
        self.sizes = sorted({1, self.most})  # pages per lane of a launch

    def layout_of(self, block_size: int) -> BlockLayout:
        """The layout of blocks of another size."""
        return BlockLayout(self._stages.plan, self.kv_heads, block_size)

    def programs(self) -> Iterator[Named]:
        """Name and lowering of all programs."""
        for stage in self._stages.stages:
            for size in self.sizes:
                yield self._read_program(stage, size)
            yield self._write_program(stage)

    # --- from the devices

    def read(self, places: np.ndarray) -> Iterator[BlocksRead]:
        """Issues copies of pages out of the pools. places [n, 2] int32: lane, page."""
        for ints, rows in launches(places, self._lanes, self.most):
            valid = ints < NOWHERE
            size = next(size for size in self.sizes if size >= valid.sum(1).max())
            parts = []
            for stage in self._stages.stages:
                program = self._stages.programs.get(*self._read_program(stage, size))
                part = program(stage.caches, np.where(valid, ints, 0)[:, :size])
                for array in jax.tree.leaves(part):
                    array.copy_to_host_async()
                parts.append((stage.layers, part))
            yield BlocksRead(self.layout, parts, rows)

    def _read_program(self, stage: Stage, size: int) -> Named:
        def lower() -> Any:
            pages = self._stages.programs.cache_shapes(stage)
            out = jax.tree.map(lambda _: spec(*BLOCK_AXES), pages[0])
            return lowered(_read, stage.mesh, (pages, self._ids(stage, size)), out)

        return f"read_pages_{stage.index}_{size}", lower

    # --- to the devices

    def gather(self, blocks: Sequence[KVPages], places: np.ndarray) -> GatheredBlocks:
        """Puts blocks, one per place [n, 2] (lane, page), at most `most` per lane, together for a
        launch and on the devices; returns before they are there."""
        ((ints, rows),) = launches(places, self._lanes, self.most)
        parts = []
        for stage in self._stages.stages:
            values = jax.tree.map(
                lambda one: np.zeros(one.shape, one.dtype), self._blocks(stage, self.most)
            )
            for block, (lane, row) in zip(blocks, rows):
                jax.tree.map(functools.partial(self._place, stage, lane, row), values, block)
            parts.append(jax.device_put(values, sharding(stage.mesh, *BLOCK_AXES)))
        return GatheredBlocks(ints, parts)

    def _place(
        self, stage: Stage, lane: int, row: int, values: np.ndarray, block: np.ndarray
    ) -> None:
        part = block[stage.layers.start : stage.layers.stop]
        copies = self.layout.copies
        values[lane, row] = part if copies == 1 else np.repeat(part, copies, axis=1)

    def write(self, blocks: GatheredBlocks) -> None:
        """Issues copies of gathered blocks into the pools."""
        for stage, values in zip(self._stages.stages, blocks.parts):
            program = self._stages.programs.get(*self._write_program(stage))
            stage.caches = program(stage.caches, blocks.ids, values)

    def _write_program(self, stage: Stage) -> Named:
        def lower() -> Any:
            pages = self._stages.programs.cache_shapes(stage)
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
            extent = self._lanes, size, len(stage.layers), *pool.shape[2:]
            return jax.ShapeDtypeStruct(extent, pool.dtype, sharding=where)

        return jax.tree.map(shape, self._stages.plan.pool())


class BlocksRead:
    """Blocks on their way from the devices. rows [n]: lane and row of each in the launch."""

    def __init__(self, layout: BlockLayout, parts: list, rows: list[tuple[int, int]]):
        self._layout = layout
        self._parts = parts
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def wait(self) -> None:
        """Waits until they are in host memory. Errors: JaxRuntimeError where the device failed."""
        self._parts = [(layers, jax.tree.map(np.asarray, part)) for layers, part in self._parts]

    def copy(self, index: int, block: np.ndarray) -> None:
        """Writes block number `index` to its bytes [bytes] uint8; after `wait`."""
        lane, row = self._rows[index]
        target = self._layout.view(block)
        for layers, part in self._parts:
            for source, out in zip(jax.tree.leaves(part), jax.tree.leaves(target)):
                out[layers.start : layers.stop] = source[lane, row][:, :: self._layout.copies]


class GatheredBlocks:
    """Blocks on their way to the devices: ids [lanes, most] of their pages (see `launches`), and
    for each stage its part."""

    def __init__(self, ids: np.ndarray, parts: list[KVPages]):
        self.ids = ids
        self.parts = parts


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


def _read(pools: list[KVPages], ids: jax.Array) -> KVPages:
    """Inside shard_map: pages ids [1, n] of every layer, as [1, n, layers, kv heads, ...]."""
    read = [read_pages(pages.take(0), ids[0]) for pages in pools]
    return jax.tree.map(lambda *parts: jnp.stack(parts, axis=1)[None], *read)


def _write(pools: list[KVPages], ids: jax.Array, values: KVPages) -> list[KVPages]:
    """Inside shard_map: writes blocks [1, n, layers, kv heads, ...] to pages ids [1, n] of every
    layer; those out of range are skipped."""
    out = []
    for layer, pages in enumerate(pools):
        written = write_pages(pages.take(0), ids[0], values.take((0, slice(None), layer)))
        out.append(jax.tree.map(lambda pool: pool[None], written))
    return out
