"""Weights that stay quantised on devices: which parameters do, and their arrays.

A parameter whose parts are all stored in one encoding is a `Quantised`. One whose parts differ is a
`Joined` of a matrix for each part; those that cannot stay quantised are arrays. Whatever depends on
the arrays of a parameter (shardings, memory) maps over the leaves of its tree.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.specs import Declared
from jaxserve.kernels.quantised import INPUTS, OUTPUTS, SUPER, Joined, Quantised
from jaxserve.sharding.rules import devices
from jaxserve.weights.assemble import Matrix, build_matrices, sizes
from jaxserve.weights.names import sources_of
from jaxserve.weights.quantised import Blocks, Encoding, joined, pack
from jaxserve.weights.shards import Shards
from jaxserve.weights.sources import Index, Reader, Rows, Sources

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Kept:
    """The weights of a checkpoint, of which those stay quantised that a device can use so. method:
    by which those in floats are quantised, see `Sources`."""

    reader: Reader
    stored: ModelConfig
    method: str = ""

    def parameters(
        self, declared: Mapping[str, Declared], model: ModelConfig, degrees: Mapping[str, int]
    ) -> dict[str, KeptParameter]:
        """Returns the parameters that stay quantised, at least in part, by path. Those that cannot
        are logged, with the limits. declared: parameters of a stage. model: after `with_tp`.
        degrees: of the mesh, by its axes."""
        found = {}
        faults: dict[str, set[str]] = {}
        for path, parameter in declared.items():
            assembly, sources = sources_of(
                path, self.reader, self.stored, model, np.dtype(np.float32)
            )
            sources = dataclasses.replace(sources, method=self.method)
            if parameter.wide or not isinstance(assembly, Matrix):
                continue
            matrices = []
            for matrix in _matrices(parameter, assembly, sources):
                try:
                    matrices.append(matrix.split(degrees))
                except ValueError as error:
                    faults.setdefault(re.sub(r"\d+", "*", path), set()).add(str(error))
                    matrices.append(dataclasses.replace(matrix, encoding=None))
            if any(matrix.encoding for matrix in matrices):
                found[path] = KeptParameter(tuple(matrices))
        for path, reasons in faults.items():
            log.warning("%s cannot stay quantised: %s", path, "; ".join(sorted(reasons)))
        if model.tied and found.keys() >= {"embed", "head"}:
            found["head"] = found["embed"]
        return found


@dataclasses.dataclass(frozen=True)
class KeptMatrix:
    """A matrix of a parameter, of parts in one encoding (None: its weights are not quantised).

    declared: with the shape of the matrix. parts: which of those of the assembly. outputs: number
    of its dimensions of outputs.
    """

    declared: Declared
    assembly: Matrix
    sources: Sources
    parts: slice
    outputs: int
    encoding: Encoding | None

    def split(self, degrees: Mapping[str, int]) -> KeptMatrix:
        """Returns the matrix as devices of a mesh of these degrees keep it. Errors: ValueError,
        with the limit, where it cannot stay quantised on them."""
        if self.encoding is None:
            return self
        _, outputs, inputs = self._by_role(self.declared.shape)
        _, output_axes, input_axes = self._by_role(self.declared.axes)
        rows = outputs[-1] // devices(output_axes[-1], degrees)
        if rows % OUTPUTS:
            raise ValueError(f"{rows} outputs on a device are no multiple of {OUTPUTS}")
        width = math.prod(inputs) // devices(input_axes[0], degrees)
        return dataclasses.replace(self, encoding=self.encoding.split(width))

    def tree(self) -> Any:
        """Declares its arrays, each in its place."""
        if self.encoding is None:
            return self.declared
        groups = self._width // (self.encoding.group or self._width)
        return Quantised(
            self._array(self._width // INPUTS, np.uint32, self.encoding.form.bits),
            self._array(groups, self.encoding.scales),
            self._array(groups, self.encoding.scales) if self.encoding.offsets else None,
            self._supers(),
            self.encoding.form,
        )

    def place(self, shardings: Any, dtype: np.dtype) -> Any:
        """Reads the matrix onto devices. shardings: in the places of `tree`. dtype: of an array."""
        if self.encoding is None:
            shape = self.declared.shape
            build = functools.partial(self._floats, dataclasses.replace(self.sources, dtype=dtype))
            return jax.make_array_from_callback(shape, shardings, Shards(shape, build))
        tree = self.tree()
        shape = tree.codes.shape
        shards = Shards(shape, self._packed)
        indices = shardings.codes.addressable_devices_indices_map(shape)
        by_device = {device: shards(index) for device, index in indices.items()}
        return jax.tree.map(
            functools.partial(_from_devices, tuple(by_device)),
            tree,
            shardings,
            *by_device.values(),
        )

    def _by_role(self, dimensions: Any) -> Any:
        return self.assembly.by_role(dimensions, self.outputs)

    @property
    def _width(self) -> int:
        """Number of inputs."""
        return math.prod(self._by_role(self.declared.shape)[2])

    def _supers(self) -> Declared | None:
        assert self.encoding is not None
        if not self.encoding.supers:
            return None
        return self._array(self._width // SUPER, np.float16, self.encoding.supers)

    def _array(self, inputs: int, dtype: Any, *rest: int) -> Declared:
        """Declares an array [experts, outputs / 16, inputs, *rest, 16]. With one for all inputs,
        each rank has it."""
        experts, outputs, _ = self._by_role(self.declared.shape)
        expert_axes, output_axes, input_axes = self._by_role(self.declared.axes)
        shape = (*experts, *outputs[:-1], outputs[-1] // OUTPUTS, inputs, *rest, OUTPUTS)
        axis = None
        if inputs > 1:
            axis = input_axes[0]
        axes = (*expert_axes, *output_axes, axis, *(None for _ in rest), None)
        return Declared(shape, axes, exact=np.dtype(dtype))

    def _rows(self, index: Index) -> list[list[Rows]]:
        """Rows of the parts of a slice of the parameter, of each expert."""
        return [parts[self.parts] for parts in self.assembly.rows(self.sources, index)]

    def _floats(self, sources: Sources, index: Index) -> np.ndarray:
        return build_matrices(sources, self._rows(index), self.assembly.axis, sizes(index))

    def _packed(self, codes: Index) -> Quantised:
        """Reads and packs the slice of which these are the codes."""
        experts, outputs, inputs = self._by_role(self.declared.shape)
        first = len(experts)
        last = first + len(outputs)
        each = math.prod(inputs[1:])
        index = self.assembly.index(
            codes[:first],
            (*codes[first : last - 1], _times(codes[last - 1], OUTPUTS)),
            (
                slice(codes[last].start * INPUTS // each, codes[last].stop * INPUTS // each),
                *(slice(0, size) for size in inputs[1:]),
            ),
        )
        matrices = [pack(self._blocks(parts)) for parts in self._rows(index)]
        shape = sizes(codes)[:last]
        return jax.tree.map(lambda *x: np.stack(x).reshape(*shape, *x[0].shape[1:]), *matrices)

    def _blocks(self, parts: list[Rows]) -> Blocks:
        """Reads parts side by side."""
        blocks = joined([self.sources.blocks(rows) for rows in parts])
        ends = np.cumsum([0, *(rows.numbers.size for rows in parts)])
        places = [
            first + np.arange(rows.numbers.size).reshape(rows.numbers.shape)
            for first, rows in zip(ends, parts)
        ]
        order = np.concatenate(places, self.assembly.axis).ravel()
        if (np.diff(order) == 1).all():
            return blocks
        return blocks.rows(order)


@dataclasses.dataclass(frozen=True, eq=False)
class KeptParameter:
    """A parameter that stays quantised, at least in part: its matrices, side by side."""

    matrices: tuple[KeptMatrix, ...]

    def tree(self) -> Any:
        """Declares its arrays, each in its place."""
        return self._joined([matrix.tree() for matrix in self.matrices])

    def place(self, shardings: Any, dtype: np.dtype) -> Any:
        """Reads the parameter onto devices. shardings: in the places of `tree`. dtype: of arrays
        that are not quantised."""
        each = shardings.parts if isinstance(shardings, Joined) else (shardings,)
        return self._joined([m.place(some, dtype) for m, some in zip(self.matrices, each)])

    def _joined(self, parts: list[Any]) -> Any:
        if len(parts) == 1:
            return parts[0]
        first = self.matrices[0]
        return Joined(tuple(parts), first.assembly.axis - first.outputs)


def tree_of(parameter: Declared | KeptParameter) -> Any:
    """Declares the arrays of a parameter, each in its place; it is one if nothing is quantised."""
    return parameter if isinstance(parameter, Declared) else parameter.tree()


def arrays(parameters: Iterable[Declared | KeptParameter]) -> Iterator[Declared]:
    """Yields the arrays of parameters. Those of one that is also another come once."""
    seen = set()
    for parameter in parameters:
        if isinstance(parameter, KeptParameter):
            if parameter in seen:
                continue
            seen.add(parameter)
        yield from jax.tree.leaves(tree_of(parameter))


def _matrices(declared: Declared, assembly: Matrix, sources: Sources) -> Iterator[KeptMatrix]:
    """Yields the matrices of a parameter: one if all parts have the same encoding."""
    experts = assembly.rows(sources, tuple(slice(0, size) for size in declared.shape))
    parts = list(zip(*experts))  # rows of each part, by expert
    encodings = [_encoding(sources, rows) for rows in parts]
    outputs = parts[0][0].numbers.ndim
    if len(set(encodings)) == 1:
        yield KeptMatrix(declared, assembly, sources, slice(None), outputs, encodings[0])
        return
    for number, (rows, encoding) in enumerate(zip(parts, encodings)):
        shape = list(declared.shape)
        at = len(shape) - outputs + assembly.axis
        shape[at] = rows[0].numbers.shape[assembly.axis]
        one = dataclasses.replace(declared, shape=tuple(shape))
        some = slice(number, number + 1)
        yield KeptMatrix(one, assembly, sources, some, outputs, encoding)


def _encoding(sources: Sources, rows: tuple[Rows, ...]) -> Encoding | None:
    """The encoding of a part that all experts have; None where it is not the same."""
    found = {sources.encoding(one) for one in rows}
    return found.pop() if len(found) == 1 else None


def _times(some: slice, factor: int) -> slice:
    return slice(some.start * factor, some.stop * factor)


def _from_devices(
    devices: tuple[jax.Device, ...],
    declared: Declared,
    sharding: jax.sharding.Sharding,
    *shards: np.ndarray,
) -> jax.Array:
    """Makes an array of the shards of its devices."""
    arrays = [jax.device_put(shard, device) for shard, device in zip(shards, devices)]
    return jax.make_array_from_single_device_arrays(declared.shape, sharding, arrays)
