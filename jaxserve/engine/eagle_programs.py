"""The programs of an EAGLE-3 draft head, on one device.

`propose` is one launch for all tokens of all sequences: the loop over tokens is on the device. They
are compiled for a few numbers of sequences, and for a few reaches of attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jaxserve.checkpoint.eagle import FEATURES, EagleConfig
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


class EaglePrograms(Programs):
    """Compiles the programs of a head. mesh: of the model, whose last stage has hidden states last:
    the head is on the first of its devices. weights: in host memory, by the names of
    `EagleWeights`; their shapes are kept."""

    def __init__(
        self,
        config: EagleConfig,
        sizes: EagleSizes,
        mesh: MeshConfig,
        weights: Mapping[str, np.ndarray],
    ):
        super().__init__()
        self.config = config
        self.sizes = sizes
        *_, last = stage_meshes(mesh)
        self._mesh = Mesh(last.devices[:1, :1], last.axis_names, axis_types=last.axis_types)
        self.device = sharding(self._mesh)
        self.batches = list(_up_to(1, sizes.places))
        self.reaches = list(_up_to(LEAST_REACH, sizes.capacity))
        self.weights = EagleWeights(
            **{name: self._shape(*x.shape, dtype=self._type(x)) for name, x in weights.items()}
        )

    # --- shapes of arrays

    def _shape(self, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.device)

    def _type(self, x: np.ndarray) -> Any:
        """Returns the type that weights have on the device: norms stay wide, as ids stay
        integers."""
        if x.dtype == np.int32:
            return np.int32
        return np.float32 if x.ndim == 1 else self.sizes.dtype

    @property
    def state(self) -> sampling.SamplingState:
        """Shapes of how places sample; without tables, see `sampling.draw`."""
        fields = sampling.empty_state(1, self.sizes.places, 1)
        return sampling.SamplingState(
            **{name: self._shape(*shape, dtype=kind) for name, (shape, kind) in fields.items()}
        )

    @property
    def places(self) -> EaglePlaces:
        """Shapes of the places."""
        sizes, config = self.sizes, self.config
        rows = sizes.places, sizes.capacity
        kv = self._shape(*rows, config.kv_heads, config.head_dim, dtype=sizes.dtype)
        return EaglePlaces(kv, kv, self._shape(*rows, config.d_model, dtype=sizes.dtype))

    # --- programs by name

    def all(self) -> dict[str, Lower]:
        """Returns all programs but those that depend on the model's steps."""
        named = [self.admit(), self.slide()]
        named += [self.extend(reach) for reach in self.reaches]
        named += [self.propose(batch, reach) for batch in self.batches for reach in self.reaches]
        return dict(named)

    def expect_steps(self, plan: StagePlan) -> None:
        """Compiles what stores features of this model's steps, if other programs were compiled
        before they are needed."""
        if self._expected is not None:
            sizes = {shape.tokens for shape in plan.shapes}
            stores = dict(self.store(plan.mesh.kvp, size, plan.dtype) for size in sizes)
            self.warm_up(stores, lambda name: None)

    def store(self, lanes: int, tokens: int, dtype: Any) -> tuple[str, Lower]:
        """Stores features of a step of that many tokens on each lane. dtype: of hidden states."""
        return f"store_{lanes}_{tokens}", lambda: self._lower_store(lanes, tokens, dtype)

    def _lower_store(self, lanes: int, tokens: int, dtype: Any) -> Any:
        D = self.config.d_model
        fc = self._shape(FEATURES * D, D, dtype=self.sizes.dtype)
        captured = [[self._shape(1, tokens, D, dtype=dtype)] * lanes] * FEATURES
        at = self._shape(lanes * tokens)
        return self._lowered(store, (fc, self.places, captured, at, at), 1)

    def slide(self) -> tuple[str, Lower]:
        """Moves the features of a place."""
        return "slide", self._lower_slide

    def _lower_slide(self) -> Any:
        return self._lowered(slide, (self.places, self._shape(), self._shape()), 0)

    def admit(self) -> tuple[str, Lower]:
        """Sets how a place samples."""
        return "admit", self._lower_admit

    def _lower_admit(self) -> Any:
        arguments = self.state, sampling_rows.blank_admission()
        return self._lowered(sampling.admit, arguments, 0)

    def extend(self, reach: int) -> tuple[str, Lower]:
        """Computes rows of one sequence. reach: one of `reaches`."""
        return f"extend_{reach}", lambda: self._lower_extend(reach)

    def _lower_extend(self, reach: int) -> Any:
        ints = self._shape(1, COLUMNS + self.sizes.chunk)
        arguments = self.weights, self.places, ints
        return self._lowered(self._program(reach).extend, arguments, 1)

    def propose(self, batch: int, reach: int) -> tuple[str, Lower]:
        """Proposes tokens. batch: one of `batches`, of sequences; reach: one of `reaches`."""
        return f"propose_{batch}_{reach}", lambda: self._lower_propose(batch, reach)

    def _lower_propose(self, batch: int, reach: int) -> Any:
        arguments = (
            self.weights,
            self.state,
            self.places,
            self._shape(batch, COLUMNS + self.sizes.few),
            self._shape(),
            self._shape(dtype=jnp.bool_),
        )
        return self._lowered(self._program(reach).propose, arguments, 2)

    def _program(self, reach: int) -> EagleProgram:
        return EagleProgram(self.config, reach, self.sizes.most)

    def _lowered(self, f: Any, arguments: tuple, donated: int) -> Any:
        """Lowers a program, whose results may take the memory of one argument."""
        return lowered(f, self._mesh, arguments, self.device.spec, donate=(donated,))


def _up_to(least: int, most: int) -> Iterator[int]:
    """Yields sizes that grow by `GROWTH` from `least` on, the last of them `most`."""
    while least < most:
        yield least
        least *= GROWTH
    yield most
