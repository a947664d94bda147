"""The pipeline stages of a replica, each a sub-mesh with its weights, KV pages and page table, and
the programs that run on them.

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
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.checkpoint.model import declare, layers_of, padded_vocab
from jaxserve.engine import sampling, sampling_rows
from jaxserve.engine.command import SCORES
from jaxserve.engine.programs import Lower, Programs
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.engine.step import Weights, head, layers, pool, score, write_table
from jaxserve.engine.step_shapes import NOWHERE, StepShape, layout
from jaxserve.kernels.kv_pages import KVPages
from jaxserve.models.decoder import parameters, stage_modules
from jaxserve.sharding.exchange import COMPILER_OPTIONS
from jaxserve.sharding.mesh import KVP, stage_meshes
from jaxserve.sharding.rules import sharding, spec

UPDATES = 1024  # page-table entries set by one launch of the table program
KEPT = 16  # versions of `sampled` that later steps can read
POOL_AXES = ("lanes", None, "kv_heads")


@dataclasses.dataclass
class Stage:
    """One pipeline stage: a sub-mesh of lanes and ranks, and the arrays on it."""

    index: int
    mesh: Mesh
    lanes: NamedSharding  # of arrays split over lanes and equal on all ranks
    weights: Weights
    values: list[jax.Array]
    layers: range
    pages: list[KVPages] = dataclasses.field(default_factory=list)
    table: Any = None  # [lanes, 2, slots, W]


@dataclasses.dataclass(frozen=True)
class HiddenStates:
    """Results of the last stage: hidden states of all tokens [lanes, T, D], those to sample from
    [lanes, S, D], and the token, slot and position of each [lanes, S, 3]."""

    all: jax.Array
    picked: jax.Array
    ints: jax.Array


@dataclasses.dataclass(frozen=True)
class SampledTokens:
    """Results of a head program, which may still be running: tokens [lanes, S]; log-probabilities
    of them [lanes, S], of the likeliest ids and those ids [lanes, S, k], or (); and the version of
    `sampled` that holds the tokens."""

    tokens: jax.Array
    logprobs: tuple[jax.Array, ...]
    version: int


# declared parameters, their shardings -> arrays
Loader = Callable[[dict, dict], dict[str, jax.Array]]


class Stages:
    """All pipeline stages of a replica. Methods issue work to the devices and return at once.

    plan: shapes and sizes. load: gives the arrays of declared parameters by path.
    """

    def __init__(self, plan: StagePlan, load: Loader):
        self.plan = plan
        self.programs = Programs()
        self.meshes = stage_meshes(plan.mesh)
        self.last_mesh = self.meshes[-1]
        self.has_last = bool(self.last_mesh.local_devices)
        # what the host reads is on the devices of each process that has a part of the last stage
        self._to_all = self.last_mesh.is_multi_process
        self._read = PartitionSpec() if self._to_all else spec("lanes")
        self.sampling_state: Any = None
        parts = enumerate(zip(self.meshes, layers_of(plan.model, plan.mesh.spp)))
        self._local = {  # stages by index, where this process has devices
            i: self._stage(i, mesh, part, load) for i, (mesh, part) in parts if mesh.local_devices
        }
        self.stages = list(self._local.values())
        self._sampled: deque[tuple[int, jax.Array | None]] = deque(maxlen=KEPT)
        self.newest: Any = None  # what the last stage here returned in the newest step
        self._fed: tuple[int, jax.Array | None] | None = None
        self.reset()

    # --- arrays on the devices

    def _stage(self, index: int, mesh: Mesh, part: range, load: Loader) -> Stage:
        plan = self.plan
        module, head = stage_modules(plan.model, part, plan.mesh.tp)
        declared = declare(plan.model, part, plan.mesh.tp)
        arrays = load(declared, {path: sharding(mesh, *d.axes) for path, d in declared.items()})
        if head is not None:
            self.head, self.head_values = (
                Weights.of(head),
                [arrays[path] for path, _ in parameters(head)],
            )
        values = [arrays[path] for path, _ in parameters(module, part.start)]
        return Stage(index, mesh, sharding(mesh, "lanes"), Weights.of(module), values, part)

    def reset(self) -> None:
        """Replaces pages, page tables and sampling state by empty ones; for when those on the
        devices may be lost. No step may be in flight."""
        self._sampled.clear()
        self.sampling_state = None
        for stage in self.stages:
            stage.pages = []
            stage.table = None
        for stage in self.stages:
            stage.pages = jax.tree.map(_zeros, self._page_shapes(stage))
            stage.table = _zeros(self._table_shape(stage))
        self._fed = None
        if not self.has_last:
            self._sampled.append((0, None))
            return
        self._sampled.append((0, _zeros(self._sampled_shape())))
        self.sampling_state = jax.tree.map(_zeros, self._sampling_shapes())

    # --- shapes of what steps replace: programs are lowered by them, also while others run

    def _page_shapes(self, stage: Stage) -> list[KVPages]:
        pool = sharding(stage.mesh, *POOL_AXES)
        one = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=pool), self.plan.pool()
        )
        return [one] * len(stage.layers)

    def _table_shape(self, stage: Stage) -> jax.ShapeDtypeStruct:
        return self._last((2, self.plan.slots, self.plan.width), jnp.int32, stage.mesh)

    def _sampled_shape(self) -> jax.ShapeDtypeStruct:
        return self._last((self.plan.slots,), jnp.int32, self.last_mesh)

    def _sampling_shapes(self) -> sampling.SamplingState:
        plan = self.plan
        vocab = padded_vocab(plan.model, plan.mesh.tp)
        fields = sampling.empty_state(plan.mesh.kvp, plan.slots, vocab)
        axes = dataclasses.asdict(sampling.STATE_AXES)
        return sampling.SamplingState(
            **{
                name: jax.ShapeDtypeStruct(*value, sharding=sharding(self.last_mesh, *axes[name]))
                for name, value in fields.items()
            }
        )

    # --- issuing work

    def step(self, shape: StepShape, rows: np.ndarray, reads: int) -> HiddenStates | None:
        """Issues a step to all stages. rows [lanes, size] int32: see `step_shapes.layout`. reads:
        the version of `sampled` with the newest token that this step feeds (0: none)."""
        x: Any = self._feed(reads)
        extent = (self.plan.mesh.kvp, shape.tokens, self.plan.model.d_model)
        for index in range(self.plan.mesh.spp):
            if index > 0:
                before, here = self.meshes[index - 1], self.meshes[index]
                x = hand_over(x, before, here, extent, self.plan.dtype)
            stage = self._local.get(index)
            if stage is None:
                x = None
                continue
            program = self.programs.get(
                f"layers_{index}_{shape}",
                functools.partial(self._lower_layers, stage, shape),
            )
            x, stage.pages, stage.table = program(stage.values, stage.pages, stage.table, rows, x)
            self.newest = x
        return HiddenStates(*x) if self.has_last else None

    def _feed(self, reads: int) -> jax.Array | None:
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
        self, hidden: HiddenStates | None, variant: str, mask: np.ndarray | None = None
    ) -> SampledTokens | None:
        """Samples tokens from a step's hidden states, and makes the next version of `sampled`. mask
        [lanes, S, mask_words]: for the guided variant, see `sampling.sample`."""
        version = self._sampled[-1][0] + 1
        if hidden is None:
            self._sampled.append((version, None))
            return None
        program = self.programs.get(*self._head_program(variant, hidden.picked.shape[1]))
        arguments = (self.head_values, hidden.picked, hidden.ints, self._sampled[-1][1])
        if variant == "greedy":
            (tokens, sampled), logprobs = program(*arguments), ()
        else:
            tokens, sampled, self.sampling_state, logprobs = program(
                *arguments, self.sampling_state, *([] if mask is None else [mask])
            )
        self._sampled.append((version, sampled))
        return SampledTokens(tokens, logprobs, version)

    def score(
        self, hidden: HiddenStates, token: np.ndarray, target: np.ndarray
    ) -> tuple[jax.Array, ...]:
        """Log-probabilities of ids target [lanes, SCORES], each after the step's token number
        `token` [lanes, SCORES]: see `step.score`."""
        picked = self._pick(hidden, token)
        return self.programs.get(*self._score_program())(self.head_values, picked, target)

    def pool(self, hidden: HiddenStates, token: np.ndarray) -> jax.Array:
        """Embeddings [lanes, SCORES, D] f32: final hidden states of the step's tokens number
        `token` [lanes, SCORES], of any where it is negative."""
        picked = self._pick(hidden, token)
        return self.programs.get(*self._pool_program())(self.head_values, picked)

    def _pick(self, hidden: HiddenStates, token: np.ndarray) -> jax.Array:
        """Hidden states [lanes, SCORES, D] of some of a step's tokens."""
        return self.programs.get(*self._pick_program(hidden.all.shape[1]))(hidden.all, token)

    def admit(self, admission: sampling_rows.SamplingAdmission) -> None:
        """Writes the sampling parameters of a slot."""
        if not self.has_last:
            return
        self.sampling_state = self.programs.get(*self._admit_program())(
            self.sampling_state, admission
        )

    def set_table(self, updates: np.ndarray) -> None:
        """Sets page-table entries. updates [m, 5]: lane, slot, index, page, block."""
        for at in range(0, len(updates), UPDATES):
            some = updates[at : at + UPDATES]
            ints = np.full((self.plan.mesh.kvp, UPDATES, 4), NOWHERE, np.int32)
            for lane in range(self.plan.mesh.kvp):
                mine = some[some[:, 0] == lane]
                ints[lane, : len(mine)] = mine[:, 1:]
            for stage in self.stages:
                program = self.programs.get(*self._table_program(stage))
                stage.table = program(stage.table, ints)

    # --- programs: name, and how to lower it

    def all_programs(
        self, variants: tuple[str, ...] = sampling_rows.VARIANTS
    ) -> Iterator[tuple[str, Lower]]:
        """Name and lowering of every program that a request can need."""
        yield from dict(self.programs_of(self.plan.shapes, variants)).items()
        yield from self.programs_of_all_shapes()

    def programs_of(
        self, shapes: Iterable[StepShape], variants: tuple[str, ...] = sampling_rows.VARIANTS
    ) -> Iterator[tuple[str, Lower]]:
        """Name and lowering of the programs of steps with these shapes; one may come twice."""
        for shape in shapes:
            for stage in self.stages:
                yield (
                    f"layers_{stage.index}_{shape}",
                    functools.partial(self._lower_layers, stage, shape),
                )
            if self.has_last:
                for variant in variants:
                    yield self._head_program(variant, shape.samples)
                yield self._pick_program(shape.tokens)

    def programs_of_all_shapes(self) -> Iterator[tuple[str, Lower]]:
        """Name and lowering of the programs that do not depend on a step's shape."""
        if self.has_last:
            yield self._score_program()
            yield self._pool_program()
            yield self._admit_program()
        for stage in self.stages:
            yield self._table_program(stage)

    def _lower_layers(self, stage: Stage, shape: StepShape) -> Any:
        plan = self.plan
        lane = spec("lanes")
        pool = [spec(*POOL_AXES)] * len(stage.layers)
        values = [spec(*param.axes) for _, param in stage.weights.flat]
        hidden = self._last((shape.tokens, plan.model.d_model), plan.dtype, stage.mesh)
        x = self._last((plan.slots,), jnp.int32, stage.mesh) if stage.index == 0 else hidden
        ints = self._last((layout(shape, plan.block_size).size,), jnp.int32, stage.mesh)
        last = stage.index == plan.mesh.spp - 1
        f = functools.partial(layers, stage.weights, plan.model, shape, last)
        return compiled(
            f,
            stage.mesh,
            (values, pool, lane, lane, lane),
            ((lane,) * 3 if last else lane, pool, lane),
            donate=(1, 2),
        ).lower(stage.values, self._page_shapes(stage), self._table_shape(stage), ints, x)

    def _last(self, shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            (self.plan.mesh.kvp, *shape), dtype, sharding=sharding(mesh, "lanes")
        )

    def _head_program(self, variant: str, size: int) -> tuple[str, Lower]:
        def lower() -> Any:
            lane = spec("lanes")
            read = self._read
            values = [spec(*param.axes) for _, param in self.head.flat]
            ints = self._last((size, 3), jnp.int32, self.last_mesh)
            arguments = (self.head_values, self._hidden(size), ints, self._sampled_shape())
            f = functools.partial(head, self.head, self.plan.model.vocab, variant, self._to_all)
            if variant == "greedy":
                return compiled(f, self.last_mesh, (values, lane, lane, lane), (read, lane)).lower(
                    *arguments
                )
            out = (
                read,
                lane,
                _state_specs(),
                (read,) * 3 if variant in sampling_rows.SCORED else (),
            )
            mask = (
                [self._last((size, self.plan.mask_words), jnp.int32, self.last_mesh)]
                if variant == "guided"
                else []
            )
            specs = (values, lane, lane, lane, _state_specs(), *[lane] * len(mask))
            return compiled(f, self.last_mesh, specs, out, donate=(4,)).lower(
                *arguments, self._sampling_shapes(), *mask
            )

        return f"head_{variant}_{size}", lower

    def _hidden(self, tokens: int) -> jax.ShapeDtypeStruct:
        return self._last((tokens, self.plan.model.d_model), self.plan.dtype, self.last_mesh)

    def _score_program(self) -> tuple[str, Lower]:
        def lower() -> Any:
            lane = spec("lanes")
            values = [spec(*param.axes) for _, param in self.head.flat]
            read = self._read
            f = functools.partial(score, self.head, self.plan.model.vocab, self._to_all)
            target = self._last((SCORES,), jnp.int32, self.last_mesh)
            return compiled(f, self.last_mesh, (values, lane, lane), (read,) * 3).lower(
                self.head_values, self._hidden(SCORES), target
            )

        return "score", lower

    def _pool_program(self) -> tuple[str, Lower]:
        def lower() -> Any:
            lane = spec("lanes")
            values = [spec(*param.axes) for _, param in self.head.flat]
            f = functools.partial(pool, self.head, self._to_all)
            return compiled(f, self.last_mesh, (values, lane), self._read).lower(
                self.head_values, self._hidden(SCORES)
            )

        return "pool", lower

    def _pick_program(self, tokens: int) -> tuple[str, Lower]:
        def lower() -> Any:
            lane = spec("lanes")
            index = self._last((SCORES,), jnp.int32, self.last_mesh)
            return compiled(
                lambda x, index: x[0][index[0]][None], self.last_mesh, (lane, lane), lane
            ).lower(self._hidden(tokens), index)

        return f"pick_of_{tokens}", lower

    def _admit_program(self) -> tuple[str, Lower]:
        def lower() -> Any:
            blank = sampling_rows.blank_admission()
            program = compiled(
                sampling.admit,
                self.last_mesh,
                (_state_specs(), spec()),
                _state_specs(),
                donate=(0,),
            )
            return program.lower(self._sampling_shapes(), blank)

        return "admit", lower

    def _table_program(self, stage: Stage) -> tuple[str, Lower]:
        def lower() -> Any:
            lane = spec("lanes")
            f = lambda table, deltas: write_table(table, deltas[0])
            return compiled(f, stage.mesh, (lane, lane), lane, donate=(0,)).lower(
                self._table_shape(stage), self._last((UPDATES, 4), jnp.int32, stage.mesh)
            )

        return f"table_{stage.index}", lower


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
    there = jax.device_put(x, lanes)
    return there if target.local_devices else None


@functools.cache
def _lanes(mesh: Mesh) -> NamedSharding:
    """Made once: every step hands over."""
    return sharding(mesh, "lanes")


@functools.cache
def _processes(mesh: Mesh) -> frozenset[int]:
    return frozenset(device.process_index for device in mesh.devices.flat)


def compiled(
    f: Callable, mesh: Mesh, in_specs: Any, out_specs: Any, donate: tuple[int, ...] = ()
) -> Any:
    """`f` over the mesh, jitted. donate: arguments whose memory the results may take."""
    options = (
        COMPILER_OPTIONS if mesh.shape[KVP] > 1 and mesh.devices.flat[0].platform == "gpu" else None
    )
    mapped = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, donate_argnums=donate, compiler_options=options or None)


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    return _zeros_program(like.sharding, like.shape, np.dtype(like.dtype))()


@functools.cache
def _zeros_program(
    where: jax.sharding.Sharding, shape: tuple[int, ...], dtype: np.dtype
) -> Callable[[], jax.Array]:
    """Compiles a program that makes zeros, once for all arrays of this kind: a replica has many,
    and a reset makes them again."""
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=where)


def _state_specs() -> sampling.SamplingState:
    return sampling.SamplingState(
        **{name: spec(*axes) for name, axes in dataclasses.asdict(sampling.STATE_AXES).items()}
    )
