"""The bytes of a block of KV outside the devices, in one layout whatever the mesh.

A block is [layers, kv heads, 2, block_size, head_dim] numbers, all layers of the model that have
pages and each of its own kv heads once, followed by the scales [layers, kv heads, 2, block_size] of
quantised ones. A process of several has a part of it: some of the layers, some of the heads.

Where layers are in page groups (`checkpoint.page_groups`), a page of any group is such a record of
its own, with a pool in the place of each layer: all pools, in the order of the stages and of the
groups of layers in them that run one after the other.
"""

from __future__ import annotations

import jax
import numpy as np

from jaxserve.engine.stage_plan import StagePlan
from jaxserve.kernels.kv_pages import KVPages
from jaxserve.store.block_part import BlockPart, PartBytes


class BlockLayout:
    """The bytes of a block, or of a part of it. kv_heads: the model's own, of which a plan for more
    ranks than heads has several copies each; see `StagePlan.block_heads`."""

    def __init__(
        self,
        plan: StagePlan,
        kv_heads: int,
        block_size: int | None = None,
        part: BlockPart | None = None,
    ):
        """block_size: tokens of a block; None: of a page. part: None for all of it."""
        pool = plan.pool()
        kv_heads = plan.block_heads(kv_heads)
        vectors, _, head_dim = pool.kv.shape[3:]
        self.whole = BlockPart(range(plan.pool_count), range(kv_heads))
        self.part = part or self.whole
        self.copies = pool.kv.shape[2] // kv_heads
        self.block_size = block_size or plan.block_size
        extent = len(self.part.layers), len(self.part.heads)
        self._kv = (*extent, vectors, self.block_size, head_dim)
        self._dtype = pool.kv.dtype
        self._kv_bytes = int(np.prod(self._kv)) * self._dtype.itemsize
        self._scales = None if pool.scales is None else pool.scales.dtype
        scale_bytes = 0
        if self._scales is not None:
            scale_bytes = int(np.prod(self._kv[2:-1])) * self._scales.itemsize
        self.by_part = PartBytes(self.part, self._kv_bytes // len(self.part), scale_bytes)
        self.bytes = self.by_part.bytes

    @property
    def name(self) -> str:
        """The part's name; '' for a whole block."""
        return "" if self.part == self.whole else str(self.part)

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
