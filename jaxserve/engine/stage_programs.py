"""The programs that run on the stages: their names, and how they are lowered.

Programs are lowered by the shapes of what steps replace, also while others run.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxserve.checkpoint.model import padded_vocab
from jaxserve.engine import sampling, sampling_rows
from jaxserve.engine.adapter_pools import factor_shapes, pool_shapes
from jaxserve.engine.command import SCORES
from jaxserve.engine.programs import Lower, Programs
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.engine.state_copies import restore_states, save_states
from jaxserve.engine.step import HeadProgram, LayersProgram, Weights, write_table
from jaxserve.engine.step_shapes import SAMPLE_COLUMNS, StepShape, delta_columns, layout
from jaxserve.models.adapters import set_adapter
from jaxserve.models.decoder import LayerCache
from jaxserve.sharding.exchange import compiler_options
from jaxserve.sharding.mesh import KVP
from jaxserve.sharding.rules import sharding, spec

# what CUDA graphs may hold
GRAPH_OPTION = "xla_gpu_enable_command_buffer"
GRAPHED = (
    *("FUSION", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "DYNAMIC_SLICE_FUSION"),
    *("COLLECTIVES", "WHILE", "CONDITIONAL"),
)
UPDATES = 1024  # page-table entries set by one launch of the table program
POOL_AXES = ("lanes", None, "kv_heads")
LANES = spec("lanes")
Named = tuple[str, Lower]  # a program's name, and how to lower it


@dataclasses.dataclass
class Stage:
    """A pipeline stage, or a group of its layers: a sub-mesh of lanes and ranks, and the arrays on
    it. index: counts all groups of all stages. paths, values: of the weights; their shapes, with
    shardings, until they are loaded."""

    index: int
    mesh: Mesh
    weights: Weights
    paths: list[str]
    values: list[Any]
    layers: range
    caches: list[LayerCache] = dataclasses.field(default_factory=list)  # see `StagePlan.caches`
    table: Any = None  # of each page group [lanes, 2, slots, W]


@dataclasses.dataclass
class HeadStage:
    """Final norm, head and sampling, on the mesh of the last stage. paths, values: see `Stage`."""

    mesh: Mesh
    program: HeadProgram
    paths: list[str]
    values: list[Any]

    @property
    def read(self) -> PartitionSpec:
        """Returns how what the host reads is sharded."""
        return PartitionSpec() if self.program.to_all else LANES


class StagePrograms(Programs):
    """Compiled programs of the stages that have devices here. head: where the last stage is among
    them."""

    def __init__(self, plan: StagePlan, stages: list[Stage], head: HeadStage | None):
        super().__init__()
        self._plan = plan
        self._stages = stages
        self._head = head

    def all(self, variants: tuple[str, ...] = sampling_rows.VARIANTS) -> Iterator[Named]:
        """Yields every program that a request can need."""
        yield from dict(self.of_shapes(self._plan.shapes, variants)).items()
        yield from self.of_all_shapes()

    def of_shapes(
        self, shapes: Iterable[StepShape], variants: tuple[str, ...] = sampling_rows.VARIANTS
    ) -> Iterator[Named]:
        """Yields the programs of steps with these shapes, what every step needs first; one may come
        twice."""
        shapes = list(shapes)
        for shape in shapes:
            for stage in self._stages:
                yield self.layers(stage, shape)
        if self._head is None:
            return
        for variant in variants:
            for shape in shapes:
                yield self.head(variant, shape.samples)
        for shape in shapes:
            yield self.pick(shape.tokens)

    def of_all_shapes(self) -> Iterator[Named]:
        """Yields the programs that do not depend on a step's shape."""
        if self._head is not None:
            yield self.score()
            yield self.pool()
            yield self.admit()
        for stage in self._stages:
            yield self.table(stage)
            if self._plan.adapters is not None:
                yield self.set_adapter(stage)
            if self._plan.keeps_states(stage.layers):
                yield self.restore_states(stage)
                yield self.save_states(stage)

    # --- by name

    def layers(self, stage: Stage, shape: StepShape) -> Named:
        """The layers of a stage."""
        lower = functools.partial(self._lower_layers, stage, shape)
        return f"layers_{stage.index}_{shape}", lower

    def table(self, stage: Stage) -> Named:
        """Sets UPDATES entries of a stage's page table."""
        return f"table_{stage.index}", functools.partial(self._lower_table, stage)

    def set_adapter(self, stage: Stage) -> Named:
        """Writes an adapter to a place on a stage."""
        return f"adapter_{stage.index}", functools.partial(_lower_adapter, self._plan, stage)

    def restore_states(self, stage: Stage) -> Named:
        """Copies the states of a slot on each lane from pages."""
        return f"restore_states_{stage.index}", functools.partial(self._lower_restore, stage)

    def save_states(self, stage: Stage) -> Named:
        """Copies the states of a slot on each lane to pages."""
        return f"save_states_{stage.index}", functools.partial(self._lower_save, stage)

    def head(self, variant: str, size: int) -> Named:
        """Samples up to `size` tokens per lane."""
        return f"head_{variant}_{size}", functools.partial(self._lower_head, variant, size)

    def score(self) -> Named:
        """Log-probabilities of SCORES tokens per lane."""
        return "score", self._lower_score

    def pool(self) -> Named:
        """Embeddings of SCORES tokens per lane."""
        return "pool", self._lower_pool

    def pick(self, tokens: int) -> Named:
        """Picks SCORES hidden states per lane, of those of `tokens` tokens."""
        return f"pick_of_{tokens}", functools.partial(self._lower_pick, tokens)

    def admit(self) -> Named:
        """Writes the sampling parameters of a slot."""
        return "admit", self._lower_admit

    # --- shapes of arrays

    def cache_shapes(self, stage: Stage) -> list[LayerCache]:
        """Pages and states of the layers of a stage."""
        pool = sharding(stage.mesh, *POOL_AXES)
        on_mesh = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=pool)
        return [jax.tree.map(on_mesh, cache) for cache in self._plan.caches(stage.layers)]

    def table_shape(self, stage: Stage) -> list[jax.ShapeDtypeStruct]:
        """Page tables of a stage, by page group."""
        shape = self._on_lanes(stage.mesh, 2, self._plan.slots, self._plan.width)
        return [shape] * self._plan.page_groups

    def sampled_shape(self, mesh: Mesh) -> jax.ShapeDtypeStruct:
        """Last sampled token of each slot."""
        return self._on_lanes(mesh, self._plan.slots)

    def sampling_shapes(self, mesh: Mesh) -> sampling.SamplingState:
        """State of sampling."""
        plan = self._plan
        vocab = padded_vocab(plan.model, plan.mesh.tp)
        axes = dataclasses.asdict(sampling.STATE_AXES)
        fields = sampling.empty_state(plan.mesh.kvp, plan.slots, vocab)
        return sampling.SamplingState(
            **{
                name: jax.ShapeDtypeStruct(*value, sharding=sharding(mesh, *axes[name]))
                for name, value in fields.items()
            }
        )

    def _on_lanes(self, mesh: Mesh, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        """An array with this shape on each lane."""
        lanes = sharding(mesh, "lanes")
        return jax.ShapeDtypeStruct((self._plan.mesh.kvp, *shape), dtype, sharding=lanes)

    def _hidden(self, mesh: Mesh, tokens: int) -> jax.ShapeDtypeStruct:
        return self._on_lanes(mesh, tokens, self._plan.model.d_model, dtype=self._plan.dtype)

    # --- lowering

    def _lower_layers(self, stage: Stage, shape: StepShape) -> Any:
        plan = self._plan
        x = self._hidden(stage.mesh, shape.tokens)
        if stage.layers.start == 0:
            x = self.sampled_shape(stage.mesh)
        place = layout(shape, plan.block_size, plan.page_groups)
        ints = self._on_lanes(stage.mesh, place.size)
        last = stage.layers.stop == plan.model.layers
        caches = self.cache_shapes(stage)
        return lowered(
            LayersProgram(
                stage.weights,
                shape,
                last,
                plan.dtype,
                plan.pages,
                plan.block_size,
                plan.attention,
                tuple(plan.places(stage.layers)),
                plan.adapters is not None,
            ).run,
            stage.mesh,
            (stage.values, caches, self.table_shape(stage), ints, x),
            ((LANES,) * 3 if last else LANES, _specs(caches), LANES, LANES),
            donate=(1, 2),
            exchanges=shape.exchanges,
        )

    def _lower_table(self, stage: Stage) -> Any:
        f = lambda table, deltas: write_table(table, deltas[0])
        columns = delta_columns(self._plan.page_groups)
        arguments = (self.table_shape(stage), self._on_lanes(stage.mesh, UPDATES, columns))
        return lowered(f, stage.mesh, arguments, LANES, donate=(0,))

    def _lower_restore(self, stage: Stage) -> Any:
        pools, states = self._plan.pools_and_states(stage.layers, self.cache_shapes(stage))
        arguments = (states, pools, self._on_lanes(stage.mesh, 1 + self._plan.state_pages))
        return lowered(restore_states, stage.mesh, arguments, _specs(states), donate=(0,))

    def _lower_save(self, stage: Stage) -> Any:
        pools, states = self._plan.pools_and_states(stage.layers, self.cache_shapes(stage))
        arguments = (pools, states, self._on_lanes(stage.mesh, 1 + self._plan.state_pages))
        return lowered(save_states, stage.mesh, arguments, _specs(pools), donate=(0,))

    @property
    def _last(self) -> HeadStage:
        assert self._head is not None, "the last stage is in another process"
        return self._head

    def _lower_head(self, variant: str, size: int) -> Any:
        mesh = self._last.mesh
        read = self._last.read
        arguments: tuple[Any, ...] = (
            self._last.values,
            self._hidden(mesh, size),
            self._on_lanes(mesh, size, SAMPLE_COLUMNS),
            self.sampled_shape(mesh),
        )
        f = functools.partial(self._last.program.sample, variant)
        if variant == "greedy":
            return lowered(f, mesh, arguments, (read, LANES))
        state = self.sampling_shapes(mesh)
        arguments += (state,)
        if variant == "drawn":
            return lowered(f, mesh, arguments, (read, LANES))
        scored = (read,) * 3 if variant in sampling_rows.SCORED else ()
        if variant == "guided":
            arguments += (self._on_lanes(mesh, size, self._plan.mask_words),)
        return lowered(f, mesh, arguments, (read, LANES, _specs(state), scored), donate=(4,))

    def _lower_score(self) -> Any:
        last = self._last
        scores = self._on_lanes(last.mesh, SCORES)
        arguments = (last.values, self._hidden(last.mesh, SCORES), scores)
        return lowered(last.program.score, last.mesh, arguments, (last.read,) * 3)

    def _lower_pool(self) -> Any:
        last = self._last
        arguments = (last.values, self._hidden(last.mesh, SCORES))
        return lowered(last.program.pool, last.mesh, arguments, last.read)

    def _lower_pick(self, tokens: int) -> Any:
        mesh = self._last.mesh
        f = lambda x, index: x[0][index[0]][None]
        return lowered(f, mesh, (self._hidden(mesh, tokens), self._on_lanes(mesh, SCORES)), LANES)

    def _lower_admit(self) -> Any:
        state = self.sampling_shapes(self._last.mesh)
        arguments = (state, sampling_rows.blank_admission())
        return lowered(sampling.admit, self._last.mesh, arguments, _specs(state), donate=(0,))


def _lower_adapter(plan: StagePlan, stage: Stage) -> Any:
    of_stage = plan, stage.mesh, stage.layers, stage.paths
    pools = pool_shapes(*of_stage)
    arguments = (pools, factor_shapes(*of_stage), np.int32(0))
    return lowered(set_adapter, stage.mesh, arguments, _specs(pools), donate=(0,))


def lowered(
    f: Callable,
    mesh: Mesh,
    arguments: tuple,
    out_specs: Any,
    donate: tuple[int, ...] = (),
    exchanges: Collection[str] = (),
) -> Any:
    """Lowers `f`, which runs on each device of the mesh, for arguments: arrays or shapes with
    shardings; without a sharding they are on all devices. donate: arguments whose memory the
    results may take. exchanges: between lanes, if any."""
    options = None
    if mesh.devices.flat[0].platform == "gpu":
        options = graph_options()
        if mesh.shape[KVP] > 1:
            options |= compiler_options(exchanges)
    specs = _specs(arguments)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, donate_argnums=donate, compiler_options=options).lower(*arguments)


def graph_options() -> dict[str, Any]:
    """Returns options for GPUs by which a step is one CUDA graph: without loops, branches and
    collectives, which XLA leaves out by default, it is a graph for every piece between two of them,
    which the host launches one by one. Nothing where XLA_FLAGS chooses."""
    if f"--{GRAPH_OPTION}=" in os.environ.get("XLA_FLAGS", ""):
        return {}
    return {GRAPH_OPTION: ",".join(GRAPHED)}


def _specs(arrays: Any) -> Any:
    """Returns how arrays, or shapes of arrays, are sharded."""
    of = lambda x: x.sharding.spec if hasattr(x, "sharding") else PartitionSpec()
    return jax.tree.map(of, arrays)
