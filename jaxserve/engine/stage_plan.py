"""Plan of a replica's stages, which is known before a device is asked for anything."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from jaxserve.api.batch import DEFAULT_EXCHANGE, Batch
from jaxserve.checkpoint.adapters import Factors, declare_factors
from jaxserve.checkpoint.delta_net import DeltaNetSpec
from jaxserve.checkpoint.model import ModelConfig, declare, layers_of, padded_vocab, split
from jaxserve.checkpoint.page_groups import (
    ONE_GROUP,
    PagePlace,
    Windows,
    page_places,
    pool_count,
    pool_page,
)
from jaxserve.checkpoint.specs import Declared
from jaxserve.checkpoint.state_pages import state_pages
from jaxserve.engine.command import CommandCodec
from jaxserve.engine.sampling_rows import mask_words
from jaxserve.engine.step_demand import StepDemand
from jaxserve.engine.step_shapes import StepShape
from jaxserve.kernels.kv_pages import KVPages, pool_shapes
from jaxserve.models.decoder import LayerCache
from jaxserve.models.deltanet import state_shapes
from jaxserve.settings.schema import ConfigError, MeshConfig
from jaxserve.settings.schema.adapters import AdapterRoom
from jaxserve.weights.kept import KeptParameter


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """Everything that the stages are made of: the model (after `with_tp`), the mesh, the pools,
    what is compiled."""

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
    kept: Mapping[str, KeptParameter]  # of all layers, by path
    layer_groups: int = 1  # of each stage, which run one after the other
    attention: str | None = None  # a name in `ops.ATTEND`; None: chosen by shape
    windows: Windows = ONE_GROUP  # of the page groups behind the first
    drafts: bool = False  # steps may check proposed tokens
    adapters: AdapterRoom | None = None  # None: steps have none
    captured: tuple[int, ...] = ()  # layers before which hidden states are kept for a draft head

    @functools.cached_property
    def groups(self) -> list[range]:
        """The groups of layers of all stages, in order. Errors: ConfigError for more groups than a
        stage has layers."""
        stages = layers_of(self.model, self.mesh.spp)
        least = min(map(len, stages))
        if self.layer_groups > least:
            raise ConfigError(
                "layer_groups", f"{self.layer_groups} is above {least}, the layers of a stage"
            )
        return [group for stage in stages for group in split(stage, self.layer_groups)]

    def parameters(self, layers: range) -> dict[str, Declared | KeptParameter]:
        """Declares the parameters of the stage with these layers by path."""
        declared = declare(self.model, layers, self.mesh.tp)
        return {path: self.kept.get(path, parameter) for path, parameter in declared.items()}

    def factors(self, layers: range) -> dict[str, Factors]:
        """Declares the factors of an adapter on the stage with these layers by the paths of the
        parameters that it changes; none where steps have no adapters."""
        if self.adapters is None:
            return {}
        return declare_factors(self.model, layers, self.adapters.rank)

    def demand(self, batch: Batch) -> StepDemand:
        """Counts what a batch needs of a shape."""
        return StepDemand.of(batch, self.mesh.kvp, self.tile, self.block_size)

    def shape_for(
        self,
        demand: StepDemand,
        exchange: str = DEFAULT_EXCHANGE,
        decode_exchange: str = DEFAULT_EXCHANGE,
        but: Set[StepShape] = frozenset(),
    ) -> StepShape | None:
        """Finds the cheapest shape with these exchanges of spread chunks and of spread decodes that
        holds a demand; None where none does. Every batch of the scheduler fits one that gathers
        queries. but: shapes to leave out, which are not compiled yet."""
        for shape in self.shapes:
            if shape.exchange != exchange or shape in but:
                continue
            if demand.spread_singles and shape.decode_exchange != decode_exchange:
                continue
            if demand.fits(shape):
                return shape
        return None

    @functools.cached_property
    def tile(self) -> int:
        """Tokens of a row of a spread chunk."""
        return max((shape.spread_prefill.width for shape in self.shapes), default=0) or 1

    @property
    def moves(self) -> int:
        """Pages that a step may move from a lane to another; 0 where none ever moves."""
        return max(shape.moves for shape in self.shapes)

    def codec(self) -> CommandCodec:
        """Makes bytes of commands for workers with this plan."""
        return CommandCodec(
            self.shapes, self.mesh.kvp, self.block_size, self.page_groups, self.state_pages
        )

    @property
    def mask_words(self) -> int:
        """Words of 32 bits in the mask of the tokens that may be sampled."""
        return mask_words(padded_vocab(self.model, self.mesh.tp))

    @functools.cached_property
    def state_pages(self) -> int:
        """Pages of a checkpoint of a sequence's states; 0 where no layer has some, or none can be
        kept."""
        return state_pages(
            self.model,
            self.groups,
            self.windows,
            self.block_size,
            np.dtype(self.kv_dtype).itemsize,
            np.dtype(self.dtype).itemsize,
        )

    def keeps_states(self, layers: range) -> bool:
        """Returns whether checkpoints have states of these layers of a stage."""
        stateful = any(not self.model.mixer(layer).has_pages for layer in layers)
        return self.state_pages > 0 and stateful

    def pools_and_states(
        self, layers: range, caches: Sequence[LayerCache]
    ) -> tuple[list[Any], list[Any]]:
        """Splits what `caches` lists for these layers into pools of pages and states."""
        pools = pool_count(self.model, self.windows, layers)
        return list(caches[:pools]), list(caches[pools:])

    @property
    def page_groups(self) -> int:
        """Number of groups of layers with page tables of their own."""
        return 1 + len(self.windows)

    def pools(self, layers: range) -> range:
        """Returns the numbers of the pools of a group of layers, among those of all groups: where
        a page's bytes of these layers are outside the devices."""
        counts = [pool_count(self.model, self.windows, group) for group in self.groups]
        number = self.groups.index(layers)
        first = sum(counts[:number])
        return range(first, first + counts[number])

    @property
    def pool_count(self) -> int:
        """Number of the pools of pages of all layers."""
        return self.pools(self.groups[-1]).stop

    def places(self, layers: range) -> list[PagePlace]:
        """Returns of each of these layers of a stage the page group, and its number in `caches`;
        those with states are in the first group."""
        of_pages = page_places(self.model, self.windows, layers)
        states = itertools.count(pool_count(self.model, self.windows, layers))
        places = [of_pages.get(layer) for layer in layers]
        return [PagePlace(0, next(states)) if place is None else place for place in places]

    def caches(self, layers: range) -> list[LayerCache]:
        """Shapes of what these layers of a stage keep of sequences, on all lanes: the pools of
        pages, then the states of each layer that has some."""
        by_place = {place.pool: layer for layer, place in zip(layers, self.places(layers))}
        return [self.cache(by_place[number]) for number in sorted(by_place)]

    def cache(self, layer: int) -> LayerCache:
        """Shapes of what a layer keeps of sequences, on all lanes: pages, or states of all
        slots."""
        mixer = self.model.mixer(layer)
        if isinstance(mixer, DeltaNetSpec):
            return state_shapes(mixer, self.mesh.kvp, self.slots, self.dtype)
        return self.pool()

    def block_heads(self, own: int) -> int:
        """Returns the kv heads of a block outside the devices: the model's own, each once. Pages
        that have parts of states, or of layers of several sizes, have all those of the pools, for
        each rank has parts by itself."""
        if self.model.has_states or self.model.layer_sizes:
            return self.pool().kv.shape[2]
        return own

    def pool(self) -> KVPages:
        """Shapes of the pages of a layer that has some, on all lanes."""
        page = pool_page(self.model)
        tokens = self.mesh.kvp, self.pages, page.heads, page.vectors, self.block_size
        return pool_shapes((*tokens, page.numbers), self.kv_dtype)
