"""An EAGLE-3 draft head on its device: weights, places, and the launches of its programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.engine import sampling_rows
from jaxserve.engine.eagle_programs import EaglePrograms
from jaxserve.models.eagle import EagleWeights


class EagleDevice:
    """The arrays of a head. weights: in host memory, by the names of `EagleWeights`."""

    def __init__(self, programs: EaglePrograms, weights: Mapping[str, np.ndarray]):
        self.programs = programs
        shapes = programs.weights._asdict()
        found = {name: x.astype(shapes[name].dtype) for name, x in weights.items()}
        self._weights = jax.device_put(EagleWeights(**found), programs.device)
        self.reset()

    def reset(self) -> None:
        """Makes empty places. Errors: those of the device."""
        self._state: Any = jax.tree.map(self._zeros, self.programs.state)
        self._places: Any = jax.tree.map(self._zeros, self.programs.places)

    def _zeros(self, shape: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(jnp.zeros(shape.shape, shape.dtype), self.programs.device)

    def drop(self) -> None:
        """Takes everything from the device; the weights go to host memory."""
        self._weights = jax.tree.map(np.asarray, self._weights)
        self._state = self._places = None

    def restore(self) -> None:
        """Brings back what `drop` took; places are empty."""
        self._weights = jax.device_put(self._weights, self.programs.device)
        self.reset()

    def wait(self) -> None:
        """Waits until places are as they were left."""
        jax.block_until_ready(self._places)

    # --- launches

    def admit(self, admission: sampling_rows.SamplingAdmission) -> None:
        """Sets how a place samples."""
        program = self.programs.get(*self.programs.admit())
        self._state = program(self._state, admission)

    def store(self, captured: Sequence[jax.Array], place: np.ndarray, row: np.ndarray) -> None:
        """Stores features of captured hidden states: see `models.eagle.store`."""
        lanes, tokens, _ = captured[0].shape
        here = [jax.device_put(_by_lane(each), self.programs.device) for each in captured]
        program = self.programs.get(*self.programs.store(lanes, tokens, captured[0].dtype))
        self._places = program(self._weights.fc, self._places, here, place, row)

    def slide(self, place: int, rows: int) -> None:
        """Moves the features of a place: see `models.eagle.slide`."""
        program = self.programs.get(*self.programs.slide())
        self._places = program(self._places, np.int32(place), np.int32(rows))

    def extend(self, ints: np.ndarray, reach: int) -> None:
        """Computes rows of one sequence: see `EagleProgram`."""
        program = self.programs.get(*self.programs.extend(self._reach(reach)))
        self._places = program(self._weights, self._places, ints)

    def propose(self, ints: np.ndarray, reach: int, steps: int, drawn: bool) -> jax.Array:
        """Proposes tokens [n, most] of n sequences: see `EagleProgram`."""
        count = len(ints)
        batch = next(size for size in self.programs.batches if size >= count)
        padded = np.zeros((batch, ints.shape[1]), np.int32)
        padded[:count] = ints
        program = self.programs.get(*self.programs.propose(batch, self._reach(reach)))
        tokens, self._places = program(
            self._weights, self._state, self._places, padded, np.int32(steps), np.bool_(drawn)
        )
        return tokens[:count]

    def _reach(self, rows: int) -> int:
        return next(reach for reach in self.programs.reaches if reach >= rows)


def _by_lane(x: jax.Array) -> list[jax.Array]:
    """Returns the part of each lane of an array [lanes, ...], each on one device that has it: no
    part passes through the host."""
    parts = [shard for shard in x.addressable_shards if shard.replica_id == 0]
    return [part.data for part in sorted(parts, key=lambda part: part.index[0].start or 0)]
