"""What the stages of a replica are made of: known before a device is asked for anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Set
from typing import Any

from jaxserve.checkpoint.model import ModelConfig, padded_vocab
from jaxserve.engine.command import CommandCodec
from jaxserve.engine.dealing import StepDemand
from jaxserve.engine.sampling_rows import mask_words
from jaxserve.engine.shapes import StepShape
from jaxserve.kernels.kv_pages import KVPages, pool_shapes
from jaxserve.settings.schema import MeshConfig


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """What the stages need to know: the model (after `with_tp`), the mesh, the pools, what is
    compiled."""

    model: ModelConfig
    mesh: MeshConfig
    dtype: Any
    kv_dtype: Any
    pages: int  # per lane
    block_size: int
    slots: int
    width: int  # page table entries per slot and lane
    shapes: list[StepShape]
    samples: list[int]

    def shape_for(
        self,
        work: StepDemand,
        exchange: str = "gather",
        rows: int = 0,
        but: Set[StepShape] = frozenset(),
    ) -> StepShape | None:
        """Finds the cheapest shape with this exchange that holds `work`; None where none does.
        Every batch of the scheduler fits one that gathers queries.

        rows: rows of spread chunks that it has room for on a lane. but: shapes to leave out, which
        are not compiled yet.
        """
        for shape in self.shapes:
            if shape in but:
                continue
            if shape.exchange == exchange and rows <= shape.spread_prefill[0] and work.fits(shape):
                return shape
        return None

    @property
    def moves(self) -> int:
        """Pages that a step may move from a lane to another; 0 where none ever moves."""
        return max(shape.moves for shape in self.shapes)

    def decode_ring_for(
        self, work: StepDemand, but: Set[StepShape] = frozenset()
    ) -> StepShape | None:
        """Finds the cheapest shape that holds `work` and sends queries of decodes round a ring;
        None where none does. but: shapes to leave out, which are not compiled yet."""
        rings = (shape for shape in self.shapes if shape.decode_ring and shape not in but)
        return next(filter(work.fits, rings), None)

    def codec(self) -> CommandCodec:
        """Makes bytes of commands for workers with this plan."""
        return CommandCodec(self.shapes, self.mesh.kvp, self.block_size)

    @property
    def mask_words(self) -> int:
        """Words of 32 bits in the mask of the tokens that may be sampled."""
        return mask_words(padded_vocab(self.model, self.mesh.tp))

    def pool(self) -> KVPages:
        """Shapes of one layer's pages, on all lanes."""
        vectors = self.mesh.kvp, self.pages, self.model.kv_heads, 2, self.block_size
        return pool_shapes((*vectors, self.model.head_dim), self.kv_dtype)
