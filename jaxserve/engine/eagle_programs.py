"""The programs of an EAGLE-3 draft head, on one device.

`propose` is one launch for all tokens of all sequences: the loop over tokens is on the device. They
are compiled for a few numbers of sequences, and for a few reaches of attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.checkpoint.eagle import EagleConfig
from jaxserve.engine import sampling, sampling_rows
from jaxserve.engine.programs import Lower, Programs
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.engine.stage_programs import lowered
from jaxserve.models.eagle import (
    EagleLayer,
    EaglePlaces,
    EagleWeights,
    logits,
    slide,
    store,
)
from jaxserve.settings.schema import MeshConfig
from jaxserve.sharding.mesh import stage_meshes
from jaxserve.sharding.rules import sharding

COLUMNS = 4  # of `propose`'s integers before the tokens: place, start, length, first
GROWTH = 4  # factor between numbers of sequences, and between reaches
LEAST_REACH = 256  # rows


@dataclasses.dataclass(frozen=True)
class EagleProgram:
    """The programs that run the layer, whose attention reaches the first `reach` rows of places.
    most: tokens of a proposal."""

    config: EagleConfig
    reach: int
    most: int

    def extend(self, weights: EagleWeights, places: EaglePlaces, ints: jax.Array) -> EaglePlaces:
        """Computes rows of sequences, for their keys and values. Arguments: as of `propose`."""
        layer = EagleLayer(self.config, weights, self.reach)
        return _Rows.of(ints, places).computed(layer, places)[1]

    def propose(
        self,
        weights: EagleWeights,
        sampling_state: sampling.SamplingState,
        places: EaglePlaces,
        ints: jax.Array,
        steps: jax.Array,
        drawn: jax.Array,
    ) -> tuple[jax.Array, EaglePlaces]:
        """Computes the newest rows of sequences, then samples tokens one after the other.

        ints [B, COLUMNS + W]: place of a sequence, first of its rows here, how many (0: padding),
        position of its row 0 in the text, then their tokens. steps: tokens to sample of each, at
        most `most`. drawn: whether some are not sampled greedily. Returns tokens [B, most], -1
        behind `steps`, and places.
        """
        config = self.config
        layer = EagleLayer(config, weights, self.reach)
        rows = _Rows.of(ints, places)
        hidden, places = rows.computed(layer, places)
        last = jnp.take_along_axis(hidden, jnp.maximum(rows.length - 1, 0)[:, None, None], 1)
        behind = rows.start + rows.length  # the row of the first token to sample
        past = places.keys.shape[1]  # no row

        def sampled(x: jax.Array, number: jax.Array) -> jax.Array:
            """Samples a token of each sequence behind hidden states x [B, 1, D]."""
            some = logits(weights, x[:, 0], config.eps)
            position = rows.first + behind + number

            def draw() -> jax.Array:
                every = jnp.full((len(some), config.vocab), -jnp.inf).at[:, weights.ids].set(some)
                return sampling.draw(every, rows.place, position, sampling_state, config.vocab)

            return lax.cond(drawn, draw, lambda: weights.ids[jnp.argmax(some, -1)])

        def step(number: jax.Array, carry: tuple) -> tuple:
            tokens, x, places = carry
            row = jnp.where(rows.length > 0, behind + number - 1, past)[:, None]
            token = lax.dynamic_index_in_dim(tokens, number - 1, 1)
            x, places = layer(places, rows.place, row, token, x)
            return tokens.at[:, number].set(sampled(x, number)), x, places

        tokens = jnp.full((len(ints), self.most), -1, jnp.int32)
        tokens = tokens.at[:, 0].set(sampled(last, jnp.int32(0)))
        tokens, _, places = lax.fori_loop(1, steps, step, (tokens, last, places))
        return tokens, places


class _Rows(NamedTuple):
    """Rows of a launch: see `EagleProgram.propose`. row, tokens [B, W]; the others [B]."""

    place: jax.Array
    start: jax.Array
    length: jax.Array
    first: jax.Array
    row: jax.Array
    tokens: jax.Array

    @classmethod
    def of(cls, ints: jax.Array, places: EaglePlaces) -> _Rows:
        place, start, length, first = ints[:, :COLUMNS].T
        tokens = ints[:, COLUMNS:]
        offset = jnp.arange(tokens.shape[1])
        row = jnp.where(offset < length[:, None], start[:, None] + offset, places.keys.shape[1])
        return cls(place, start, length, first, row, tokens)

    def computed(self, layer: EagleLayer, places: EaglePlaces) -> tuple[jax.Array, EaglePlaces]:
        """Computes the rows with the features that places have: see `EagleLayer`."""
        features = places.features.at[self.place[:, None], self.row].get(mode="clip")
        return layer(places, self.place, self.row, self.tokens, features)


class EagleSizes(NamedTuple):
    """Sizes of a head's places. capacity: rows of a place. most: tokens of a proposal. chunk: rows
    of a launch that extends a place. dtype: of weights, keys, values and features."""

    places: int
    capacity: int
    most: int
    chunk: int
    dtype: Any

    @property
    def few(self) -> int:
        """Rows of a sequence in a launch that proposes: all that can be new after a step."""
        return self.most + 1

    def bytes(self, config: EagleConfig, weights: int) -> int:
        """Bytes on the device. weights: elements of the weights."""
        row = config.d_model + 2 * config.kv_heads * config.head_dim
        return np.dtype(self.dtype).itemsize * (self.places * self.capacity * row + weights)


class EaglePrograms(Programs):
    """Compiles the programs of a head, and holds what they work on. Arrays are on the first device;
    `load` brings the weights."""

    def __init__(self, config: EagleConfig, sizes: EagleSizes):
        super().__init__()
        self.config = config
        self.sizes = sizes
        (self.mesh,) = stage_meshes(MeshConfig())
        self._whole = sharding(self.mesh)
        self.batches = list(_up_to(1, sizes.places))
        self.reaches = list(_up_to(LEAST_REACH, sizes.capacity))
        self.weights: Any = None
        self._state: Any = None
        self._places: Any = None

    # --- arrays

    def load(self, weights: dict[str, np.ndarray]) -> None:
        """Brings the weights to the device. weights: by the names of `EagleWeights`."""
        put = lambda x: jax.device_put(x.astype(self._type(x)), self._whole)
        self.weights = EagleWeights(**{name: put(x) for name, x in weights.items()})

    def _type(self, x: np.ndarray) -> Any:
        """Returns the type that weights have on the device: norms stay wide, as ids stay
        integers."""
        if x.dtype == np.int32:
            return np.int32
        return np.float32 if x.ndim == 1 else self.sizes.dtype

    def reset(self) -> None:
        """Makes empty places."""
        self._state = jax.tree.map(self._zeros, self._state_shapes())
        self._places = jax.tree.map(self._zeros, self._place_shapes())

    def drop(self) -> None:
        """Takes everything from the device; the weights go to host memory."""
        if self.weights is not None:
            self.weights = jax.tree.map(np.asarray, self.weights)
        self._state = self._places = None

    def restore(self) -> None:
        """Brings back what `drop` took; places are empty."""
        self.weights = jax.device_put(self.weights, self._whole)
        self.reset()

    def _zeros(self, shape: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(jnp.zeros(shape.shape, shape.dtype), self._whole)

    def _shape(self, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._whole)

    def _state_shapes(self) -> sampling.SamplingState:
        fields = sampling.empty_state(1, self.sizes.places, 1)  # no tables: see `sampling.draw`
        return sampling.SamplingState(
            **{name: self._shape(*shape, dtype=kind) for name, (shape, kind) in fields.items()}
        )

    def _place_shapes(self) -> EaglePlaces:
        sizes, config = self.sizes, self.config
        rows = sizes.places, sizes.capacity
        kv = self._shape(*rows, config.kv_heads, config.head_dim, dtype=sizes.dtype)
        return EaglePlaces(kv, kv, self._shape(*rows, config.d_model, dtype=sizes.dtype))

    # --- launches

    def admit(self, admission: sampling_rows.SamplingAdmission) -> None:
        """Sets how a place samples."""
        self._state = self.get(*self._admit())(self._state, admission)

    def store(self, captured: Sequence[jax.Array], place: np.ndarray, row: np.ndarray) -> None:
        """Stores features of captured hidden states: see `models.eagle.store`."""
        lanes, tokens, _ = captured[0].shape
        here = jax.device_put(list(captured), self._whole)
        program = self.get(*self.storing(lanes, tokens, here[0].dtype))
        self._places = program(self.weights.fc, self._places, here, place, row)

    def wait(self) -> None:
        """Waits until places are as they were left."""
        jax.block_until_ready(self._places)

    def slide(self, place: int, rows: int) -> None:
        """Moves the features of a place: see `models.eagle.slide`."""
        program = self.get(*self._slide())
        self._places = program(self._places, np.int32(place), np.int32(rows))

    def extend(self, ints: np.ndarray, reach: int) -> None:
        """Computes rows of one sequence: see `EagleProgram`."""
        program = self.get(*self._extend(self._reach(reach)))
        self._places = program(self.weights, self._places, ints)

    def propose(self, ints: np.ndarray, reach: int, steps: int, drawn: bool) -> jax.Array:
        """Proposes tokens [n, most] of n sequences: see `EagleProgram`."""
        count = len(ints)
        batch = next(size for size in self.batches if size >= count)
        padded = np.zeros((batch, ints.shape[1]), np.int32)
        padded[:count] = ints
        tokens, self._places = self.get(*self._propose(batch, self._reach(reach)))(
            self.weights,
            self._state,
            self._places,
            padded,
            np.int32(steps),
            np.bool_(drawn),
        )
        return tokens[:count]

    def _reach(self, rows: int) -> int:
        return next(reach for reach in self.reaches if reach >= rows)

    # --- programs by name

    def all(self) -> dict[str, Lower]:
        """Returns all programs but those that depend on the model's steps."""
        named = [self._admit(), self._slide()]
        named += [self._extend(reach) for reach in self.reaches]
        named += [self._propose(batch, reach) for batch in self.batches for reach in self.reaches]
        return dict(named)

    def expect_steps(self, plan: StagePlan) -> None:
        """Compiles what stores features of this model's steps, if other programs were compiled
        before they are needed."""
        if self._expected is not None:
            sizes = {shape.tokens for shape in plan.shapes}
            stores = dict(self.storing(plan.mesh.kvp, size, plan.dtype) for size in sizes)
            self.warm_up(stores, lambda name: None)

    def storing(self, lanes: int, tokens: int, dtype: Any) -> tuple[str, Lower]:
        """Stores features of a step of that many tokens on each lane. dtype: of hidden states."""
        D = self.config.d_model
        fc = self._shape(3 * D, D, dtype=self.sizes.dtype)
        captured = [self._shape(lanes, tokens, D, dtype=dtype)] * 3
        at = self._shape(lanes * tokens)
        arguments = fc, self._place_shapes(), captured, at, at
        return f"store_{lanes}_{tokens}", self._lower(store, arguments, 1)

    def _slide(self) -> tuple[str, Lower]:
        arguments = self._place_shapes(), self._shape(), self._shape()
        return "slide", self._lower(slide, arguments, 0)

    def _admit(self) -> tuple[str, Lower]:
        arguments = self._state_shapes(), sampling_rows.blank_admission()
        return "admit", self._lower(sampling.admit, arguments, 0)

    def _extend(self, reach: int) -> tuple[str, Lower]:
        ints = self._shape(1, COLUMNS + self.sizes.chunk)
        arguments = self._weight_shapes(), self._place_shapes(), ints
        return f"extend_{reach}", self._lower(self._program(reach).extend, arguments, 1)

    def _propose(self, batch: int, reach: int) -> tuple[str, Lower]:
        arguments = (
            self._weight_shapes(),
            self._state_shapes(),
            self._place_shapes(),
            self._shape(batch, COLUMNS + self.sizes.few),
            self._shape(),
            self._shape(dtype=jnp.bool_),
        )
        lower = self._lower(self._program(reach).propose, arguments, 2)
        return f"propose_{batch}_{reach}", lower

    def _program(self, reach: int) -> EagleProgram:
        return EagleProgram(self.config, reach, self.sizes.most)

    def _weight_shapes(self) -> EagleWeights:
        return jax.tree.map(lambda x: self._shape(*x.shape, dtype=x.dtype), self.weights)

    def _lower(self, f: Any, arguments: tuple, donated: int) -> Lower:
        """Returns what lowers a program, whose results may take the memory of one argument."""
        whole = self._whole.spec
        return lambda: lowered(f, self.mesh, arguments, whole, donate=(donated,))


def _up_to(least: int, most: int) -> Iterator[int]:
    """Yields sizes that grow by `GROWTH` from `least` on, the last of them `most`."""
    while least < most:
        yield least
        least *= GROWTH
    yield most
