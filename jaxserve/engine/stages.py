"""The pipeline stages of a replica, each a sub-mesh with its weights, KV pages and page table.

The host issues a step to the first stage, passes its hidden states to the next, and so on: sequence
pipeline parallelism (Medha, section 3.3). Nothing here waits for a device. A step takes the tokens
that it feeds from the `sampled` array of the last step that sampled for their slots, so chunks of a
prompt follow each other through the stages without a gap.

Where a replica has several processes, each has the stages in whose mesh it has devices, and all
make the same calls in the same order: arrays pass between stages on devices (`hand_over`), and what
belongs to the last stage is None in processes that have no part of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxserve.checkpoint.specs import Declared
from jaxserve.engine import sampling_rows
from jaxserve.engine.adapter_pools import pool_shapes, pools_of, with_pools
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.engine.stage_programs import UPDATES, HeadStage, Stage, StagePrograms
from jaxserve.engine.step import HeadProgram, Weights
from jaxserve.engine.step_shapes import NOWHERE, StepShape, delta_columns
from jaxserve.models.adapters import Adapted, Pools
from jaxserve.models.decoder import parameters, stage_modules
from jaxserve.sharding.mesh import stage_meshes
from jaxserve.sharding.rules import sharding
from jaxserve.weights.adapters import Pair
from jaxserve.weights.kept import tree_of

KEPT = 16  # versions of `sampled` that later steps can read


@dataclasses.dataclass(frozen=True)
class HiddenStates:
    """Results of the last stage: hidden states of all tokens [lanes, T, D], those to sample from
    [lanes, S, D], and the token, slot, position and proposed token of each [lanes, S, 4].
    captured: those before layers that a draft head learns from, each [lanes, T, D]."""

    all: jax.Array
    picked: jax.Array
    ints: jax.Array
    captured: list[jax.Array]


@dataclasses.dataclass(frozen=True)
class SampledTokens:
    """Results of a head program, which may still be running: tokens [lanes, S]; log-probabilities
    of them [lanes, S], of the likeliest ids and those ids [lanes, S, k], or (); and the version of
    `sampled` that holds the tokens."""

    tokens: jax.Array
    logprobs: tuple[jax.Array, ...]
    version: int


def hidden_states(x: tuple[jax.Array, ...], captured: list[jax.Array]) -> HiddenStates:
    """Joins what the last group of layers returned, and what all of them captured."""
    every, picked, ints = x
    return HiddenStates(every, picked, ints, captured)


# declared parameters, their shardings -> arrays
Loader = Callable[[dict, dict], dict[str, jax.Array]]
WeightsByPath = dict[str, Any]  # trees of arrays, or of their shapes


class Stages:
    """All pipeline stages of a replica. Methods issue work to the devices and return at once.

    plan: shapes and sizes, which programs are compiled by. There is nothing on the devices before
    `load` and `reset`: programs can be compiled, and tuned, while the devices are empty.
    """

    def __init__(self, plan: StagePlan):
        self.plan = plan
        # of each group of layers
        self.meshes = [mesh for mesh in stage_meshes(plan.mesh) for _ in range(plan.layer_groups)]
        self.last_mesh = self.meshes[-1]
        self.has_last = bool(self.last_mesh.local_devices)
        self.head: HeadStage | None = None
        parts = enumerate(zip(self.meshes, plan.groups))
        self._local = {  # stages by index, where this process has devices
            i: self._stage(i, mesh, part) for i, (mesh, part) in parts if mesh.local_devices
        }
        self.stages = list(self._local.values())
        self.programs = StagePrograms(plan, self.stages, self.head)
        for stage in self.stages:
            self._set_pools(stage)
        self.sampling_state: Any = None
        self._sampled: deque[tuple[int, jax.Array | None]] = deque(maxlen=KEPT)
        self.newest: Any = None  # what the last stage here returned in the newest step
        self._fed: tuple[int, jax.Array | None] | None = None

    # --- arrays on the devices

    def _stage(self, index: int, mesh: Mesh, part: range) -> Stage:
        plan = self.plan
        module, head = stage_modules(plan.model, part, plan.mesh.tp, plan.captured)
        shapes = self._weight_shapes(mesh, part)
        if head is not None:
            paths = [path for path, _ in parameters(head)]
            # what the host reads is on the devices of each process that has a part of the stage
            to_all = mesh.is_multi_process
            program = HeadProgram(Weights.of(head), plan.model.vocab, to_all, plan.drafts)
            self.head = HeadStage(mesh, program, paths, [shapes[path] for path in paths])
        paths = [path for path, _ in parameters(module, part.start)]
        values = [shapes[path] for path in paths]
        return Stage(index, mesh, Weights.of(module), paths, values, part)

    def _set_pools(self, stage: Stage, pools: list[Pools] | None = None) -> None:
        """Puts the pools of adapters beside the weights of a stage; None: their shapes."""
        stage.values = self._with_pools(stage, stage.values, pools)

    def _with_pools(
        self, stage: Stage, values: list[Any], pools: list[Pools] | None = None
    ) -> list[Any]:
        changed = self.plan.factors(stage.layers)
        if pools is None:
            pools = pool_shapes(self.plan, stage.mesh, stage.layers, stage.paths)
        return with_pools(values, stage.paths, changed, pools)

    def _weight_shapes(self, mesh: Mesh, part: range) -> dict[str, Any]:
        """Returns the shapes of the weights of some layers, with their shardings, by path."""
        plan = self.plan

        def shape(d: Declared) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(
                d.shape, d.dtype(np.dtype(plan.dtype)), sharding=sharding(mesh, *d.axes)
            )

        declared = plan.parameters(part).items()
        return {path: jax.tree.map(shape, tree_of(d)) for path, d in declared}

    def load(self, load: Loader) -> None:
        """Puts the weights on the devices, in the place of their shapes. load: gives the arrays of
        declared parameters by path, of a stage at a time."""
        self.set_weights(self.read_weights(load))

    def weight_shapes(self) -> list[WeightsByPath]:
        """Returns the shapes of the weights of each stage here, with their shardings, by path."""
        return [self._weight_shapes(stage.mesh, stage.layers) for stage in self.stages]

    def read_weights(self, load: Loader) -> list[WeightsByPath]:
        """Puts weights on the devices, beside those that steps use; returns those of each stage
        here. load: see `load`. May run beside steps."""
        read = []
        for stage, shapes in zip(self.stages, self.weight_shapes()):
            places = jax.tree.map(lambda shape: shape.sharding, shapes)
            read.append(load(self.plan.parameters(stage.layers), places))
        return read

    def set_weights(self, weights: list[WeightsByPath]) -> None:
        """Has steps use these weights from now on: arrays, or shapes in place of those that are
        not on the devices. Adapters stay where they are."""
        for stage, arrays in zip(self.stages, weights):
            pools = pools_of(stage.values) or None
            # at once: programs are lowered from these meanwhile
            stage.values = self._with_pools(stage, [arrays[path] for path in stage.paths], pools)
            if self.head is not None and stage is self.stages[-1]:
                self.head.values = [arrays[path] for path in self.head.paths]

    def weights(self) -> list[WeightsByPath]:
        """Returns the weights of each stage here that steps use, by path."""
        found = []
        for stage in self.stages:
            values = [v.weight if isinstance(v, Adapted) else v for v in stage.values]
            by_path = dict(zip(stage.paths, values))
            if self.head is not None and stage is self.stages[-1]:
                by_path |= zip(self.head.paths, self.head.values)
            found.append(by_path)
        return found

    def drop_kv(self) -> None:
        """Takes pages, states, page tables, sampling state and adapters from the devices. No step
        may be in flight; `reset` makes empty ones."""
        self._sampled.clear()
        self.sampling_state = None
        self.newest = None
        self._fed = None
        for stage in self.stages:
            stage.caches = []
            stage.table = None
            self._set_pools(stage)

    def reset(self) -> None:
        """Replaces pages, states, page tables and sampling state by empty ones: at the start, and
        when those on the devices may be lost. No step may be in flight."""
        self.drop_kv()
        for stage in self.stages:
            stage.caches = jax.tree.map(_zeros, self.programs.cache_shapes(stage))
            stage.table = jax.tree.map(_zeros, self.programs.table_shape(stage))
            self._set_pools(stage, jax.tree.map(_zeros, pools_of(stage.values)))
        if not self.has_last:
            self._sampled.append((0, None))
            return
        self._sampled.append((0, _zeros(self.programs.sampled_shape(self.last_mesh))))
        self.sampling_state = jax.tree.map(_zeros, self.programs.sampling_shapes(self.last_mesh))

    # --- issuing work

    def step(
        self,
        shape: StepShape,
        rows: np.ndarray,
        reads: int,
        after: Callable[[Stage], None] = lambda stage: None,
    ) -> HiddenStates | None:
        """Issues a step to all stages. rows [lanes, size] int32: see `step_shapes.layout`. reads:
        the version of `sampled` with the newest token that this step feeds (0: none). after: called
        when a stage here was issued the step, and those behind it were not."""
        captured: list[jax.Array] = []
        groups = range(len(self.meshes))
        x = self.run(groups, shape, rows, self.feed(reads), captured, after)
        return hidden_states(x, captured) if self.has_last else None

    def run(
        self,
        groups: range,
        shape: StepShape,
        rows: np.ndarray,
        x: Any,
        captured: list[jax.Array],
        after: Callable[[Stage], None] = lambda stage: None,
    ) -> Any:
        """Issues some consecutive groups of a step's layers, of those of all stages. x: what the
        group before them returned; for the first one, what `feed` did. captured: takes their
        captured hidden states. Returns what the last of them does: the first fields of
        `HiddenStates` after all layers."""
        extent = (self.plan.mesh.kvp, shape.tokens, self.plan.model.d_model)
        for index in groups:
            target = self.meshes[index]
            source = self.meshes[max(index - 1, 0)]
            if target is not source:
                x = hand_over(x, source, target, extent, self.plan.dtype)
            stage = self._local.get(index)
            if stage is None:
                x = None
                continue
            program = self.programs.get(*self.programs.layers(stage, shape))
            arguments = stage.values, stage.caches, stage.table, rows, x
            x, stage.caches, stage.table, seen = program(*arguments)
            captured += seen
            self.newest = x
            after(stage)
        return x

    def feed(self, reads: int) -> jax.Array | None:
        """The sampled tokens on the first stage, of the version `reads` or a later one. What came
        there for a step before serves this one too, if it is new enough."""
        version, x = next(entry for entry in self._sampled if entry[0] >= reads)
        if self.plan.mesh.spp == 1:
            return x
        if self._fed is None or self._fed[0] < reads:
            tokens = (self.plan.mesh.kvp, self.plan.slots)
            self._fed = version, hand_over(x, self.last_mesh, self.meshes[0], tokens, np.int32)
        return self._fed[1]

    def sample(
        self, hidden: HiddenStates | None, variant: str, masks: np.ndarray | None = None
    ) -> SampledTokens | None:
        """Samples tokens from a step's hidden states, and makes the next version of `sampled`.
        masks [lanes, S, mask_words]: for the guided variant, see `sampling.sample`."""
        version = self._sampled[-1][0] + 1
        if hidden is None:
            self._sampled.append((version, None))
            return None
        program = self.programs.get(*self.programs.head(variant, hidden.picked.shape[1]))
        arguments: tuple = (self._head_values, hidden.picked, hidden.ints, self._sampled[-1][1])
        logprobs: tuple[jax.Array, ...] = ()
        if variant == "greedy":
            tokens, sampled = program(*arguments)
        elif variant == "drawn":
            tokens, sampled = program(*arguments, self.sampling_state)
        else:
            arguments += (self.sampling_state,)
            if variant == "guided":
                arguments += (masks,)
            tokens, sampled, self.sampling_state, logprobs = program(*arguments)
        self._sampled.append((version, sampled))
        return SampledTokens(tokens, logprobs, version)

    def score(
        self, hidden: HiddenStates, token: np.ndarray, target: np.ndarray
    ) -> tuple[jax.Array, ...]:
        """Log-probabilities of ids target [lanes, SCORES], each after the step's token number
        `token` [lanes, SCORES]: see `step.score`."""
        picked = self._pick(hidden, token)
        return self.programs.get(*self.programs.score())(self._head_values, picked, target)

    def pool(self, hidden: HiddenStates, token: np.ndarray) -> jax.Array:
        """Embeddings [lanes, SCORES, D] f32: final hidden states of the step's tokens number
        `token` [lanes, SCORES], of any where it is negative."""
        picked = self._pick(hidden, token)
        return self.programs.get(*self.programs.pool())(self._head_values, picked)

    @property
    def _head_values(self) -> list[jax.Array]:
        assert self.head is not None, "the last stage is in another process"
        return self.head.values

    def _pick(self, hidden: HiddenStates, token: np.ndarray) -> jax.Array:
        """Hidden states [lanes, SCORES, D] of some of a step's tokens."""
        return self.programs.get(*self.programs.pick(hidden.all.shape[1]))(hidden.all, token)

    def admit(self, admission: sampling_rows.SamplingAdmission) -> None:
        """Writes the sampling parameters of a slot."""
        if not self.has_last:
            return
        program = self.programs.get(*self.programs.admit())
        self.sampling_state = program(self.sampling_state, admission)

    def set_adapter(self, place: int, factors: Mapping[str, Pair]) -> None:
        """Issues the write of an adapter's factors to a place. factors: by path, of all layers
        here."""
        for stage in self.stages:
            new = [factors[path] for path in stage.paths if path in factors]
            program = self.programs.get(*self.programs.set_adapter(stage))
            self._set_pools(stage, program(pools_of(stage.values), new, np.int32(place)))

    def restore_states(self, copies: np.ndarray) -> None:
        """Issues copies of states from pages to slots. copies [m, 2 + pages]: see `Batch`."""
        for lane, slot, *pages in copies.tolist():
            ints = self._of_lane(lane, slot, pages, NOWHERE, np.zeros(len(pages), np.int32))
            for stage in self._with_states():
                pools, states = self.plan.pools_and_states(stage.layers, stage.caches)
                program = self.programs.get(*self.programs.restore_states(stage))
                stage.caches = [*pools, *program(states, pools, ints)]

    def save_states(self, stage: Stage, copies: np.ndarray) -> None:
        """Issues copies of a stage's states from slots to pages. copies [m, 2 + pages]: see
        `Batch`."""
        if not len(copies) or not self.plan.keeps_states(stage.layers):
            return
        for lane, slot, *pages in copies.tolist():
            nowhere = NOWHERE + np.arange(len(pages), dtype=np.int32)
            ints = self._of_lane(lane, slot, pages, 0, nowhere)
            pools, states = self.plan.pools_and_states(stage.layers, stage.caches)
            program = self.programs.get(*self.programs.save_states(stage))
            stage.caches = [*program(pools, states, ints), *states]

    def _of_lane(
        self,
        lane: int,
        slot: int,
        pages: list[int],
        other_slot: int | np.int32,
        other_pages: np.ndarray,
    ) -> np.ndarray:
        """Returns slot and pages of a copy on a lane, and those of all other lanes [lanes, 1 +
        pages]."""
        ints = np.empty((self.plan.mesh.kvp, 1 + len(pages)), np.int32)
        ints[:] = [other_slot, *other_pages]
        ints[lane] = [slot, *pages]
        return ints

    def _with_states(self) -> list[Stage]:
        return [stage for stage in self.stages if self.plan.keeps_states(stage.layers)]

    def set_table(self, updates: np.ndarray) -> None:
        """Sets page-table entries. updates [m, columns]: see `lanes.layout`."""
        columns = delta_columns(self.plan.page_groups)
        for at in range(0, len(updates), UPDATES):
            some = updates[at : at + UPDATES]
            ints = np.full((self.plan.mesh.kvp, UPDATES, columns), NOWHERE, np.int32)
            for lane in range(self.plan.mesh.kvp):
                mine = some[some[:, 0] == lane]
                ints[lane, : len(mine)] = mine[:, 1:]
            for stage in self.stages:
                program = self.programs.get(*self.programs.table(stage))
                stage.table = program(stage.table, ints)


def hand_over(
    x: jax.Array | None, source: Mesh, target: Mesh, shape: tuple[int, ...], dtype: Any
) -> jax.Array | None:
    """Passes an array [lanes, ...] of this shape from the devices of one stage to those of another.
    x: None in a process that has no device of the source. Returns None in one that has none of the
    target. Across processes all must call it in the same order, also those with no part in it: XLA
    counts the transfers between them."""
    lanes = _lanes(target)
    if _processes(source) == _processes(target):  # nothing crosses
        return None if x is None else jax.device_put(x, lanes)
    if x is None:
        x = jax.make_array_from_single_device_arrays(shape, _lanes(source), [], dtype=dtype)
    moved = jax.device_put(x, lanes)
    return moved if target.local_devices else None


@functools.cache
def _lanes(mesh: Mesh) -> NamedSharding:
    """Made once: every step hands over."""
    return sharding(mesh, "lanes")


@functools.cache
def _processes(mesh: Mesh) -> frozenset[int]:
    return frozenset(device.process_index for device in mesh.devices.flat)


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    return _zeros_program(like.sharding, like.shape, np.dtype(like.dtype))()


@functools.cache
def _zeros_program(
    where: jax.sharding.Sharding, shape: tuple[int, ...], dtype: np.dtype
) -> Callable[[], jax.Array]:
    """Compiles a program that makes zeros, once for all arrays of this kind: a replica has many,
    and a reset makes them again."""
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=where)
