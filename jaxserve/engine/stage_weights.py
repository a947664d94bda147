"""The weights of the stages in this process while it runs: new ones in their place, or none at all
while it sleeps."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxserve.api.errors import RequestError
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.engine.memory import has_room
from jaxserve.engine.new_weights import NewWeights, OpenWeights
from jaxserve.engine.stages import Stages, WeightsByPath
from jaxserve.replica.weights import MODEL_PATH, NOTHING_READ, WeightsHolder, WeightSource


class HostArray:
    """A copy of an array's parts of this process in host memory, each once."""

    def __init__(self, array: jax.Array):
        self._shape = array.shape
        self._sharding = array.sharding
        self._parts: dict[str, np.ndarray] = {}
        for shard in array.addressable_shards:
            if str(shard.index) not in self._parts:
                # a copy: on CPUs it would else be the array's own memory
                self._parts[str(shard.index)] = np.array(shard.data)

    def on_devices(self) -> jax.Array:
        """Returns the array again."""
        part = lambda index: self._parts[str(index)]
        return jax.make_array_from_callback(self._shape, self._sharding, part)


class StageWeights(WeightsHolder):
    """Weights of stages. open_new: opens new ones; None where they cannot be replaced. Methods are
    called one at a time; all but `read` while no step is in flight."""

    def __init__(self, stages: Stages, open_new: OpenWeights | None):
        self._stages = stages
        self._open = open_new
        self._new: NewWeights | None = None
        self._beside: list[WeightsByPath] | None = None  # the new ones, if there was room
        self._in_host: list[WeightsByPath] | None = None
        self._reading = threading.Lock()

    def read(self, source: WeightSource) -> str:
        if self._open is None:
            raise RequestError("", "weights cannot be replaced here", "FAILED_PRECONDITION")
        with self._reading:
            self.forget()
            new = self._open(source)
            if has_room(jax.tree.leaves(self._stages.weight_shapes())):
                self._beside = self._read(new)
            self._new = new
            return new.fingerprint

    def _read(self, new: NewWeights) -> list[WeightsByPath]:
        try:
            with _device_memory():
                return self._stages.read_weights(new.load)
        except CheckpointError as error:
            raise RequestError(MODEL_PATH, error.message) from None
        except (OSError, ValueError, KeyError, MemoryError) as error:
            raise RequestError(MODEL_PATH, f"cannot be read: {error}") from None

    def use(self) -> None:
        new, beside = self._new, self._beside
        if new is None:
            raise RequestError("", "what was read is lost: update again", NOTHING_READ)
        self.forget()
        self._drop()
        self._in_host = None
        self._stages.set_weights(self._read(new) if beside is None else beside)

    def forget(self) -> None:
        self._new = self._beside = None

    def _drop(self) -> None:
        """Frees the weights on the devices."""
        old = _arrays(self._stages.weights())
        self._stages.set_weights(self._stages.weight_shapes())
        for array in old:
            array.delete()

    def sleep(self, level: int) -> None:
        self.forget()
        weights = self._stages.weights()
        # an embedding that is the head too is one array, and stays so
        copies = {id(array): HostArray(array) for array in _arrays(weights) if level == 1}
        if copies:
            self._in_host = jax.tree.map(lambda array: copies[id(array)], weights)
        elif level > 1:
            self._in_host = None
        self._drop()
        self._stages.drop_kv()

    def wake(self) -> None:
        if self._in_host is not None:
            back = functools.cache(HostArray.on_devices)
            with _device_memory():
                weights = jax.tree.map(back, self._in_host)
            self._stages.set_weights(weights)
            self._in_host = None


@contextlib.contextmanager
def _device_memory() -> Iterator[None]:
    """Raises what JAX raises where a device fails, or has no memory left, as RequestError."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise RequestError("", f"the devices failed: {error}", "RESOURCE_EXHAUSTED") from error


def _arrays(weights: list[WeightsByPath]) -> list[jax.Array]:
    """Returns the arrays of weights, each once; none where they are only shapes."""
    leaves: list[Any] = jax.tree.leaves(weights)
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, jax.Array)}.values())
