"""Matrices that safetensors hold quantised, each in several tensors: codes, scales, zero points.

`weights.quantised_layouts` finds them. Values are those of the published formats; none is rounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.kernels.quantised import Form
from jaxserve.weights.quantised import Blocks, dequantised
from jaxserve.weights.safetensors_files import MappedTensors


@dataclass(frozen=True)
class Packed:
    """A matrix of numbers [outputs, inputs] in a tensor.

    name, shape: of the tensor, [outputs, inputs] in words, the reverse if inputs come first; behind
    the dimension of experts if there are several. each: numbers in a word, those in low bits first.
    along: dimension whose numbers share words: 0 for outputs, 1 for inputs. order: places of the
    numbers of eight in their word, if they are not in order.
    """

    name: str
    shape: tuple[int, ...]
    each: int = 1
    along: int = 1
    inputs_first: bool = False
    order: tuple[int, ...] = ()

    def read(
        self, files: MappedTensors, rows: slice, columns: slice, expert: int | None = None
    ) -> np.ndarray:
        """Reads outputs `rows` and inputs `columns`, slices with start and stop, of an expert."""
        index = [rows, columns]
        some = index[self.along]
        index[self.along] = covering(some, self.each)
        if self.inputs_first:
            index.reverse()
        if expert is not None:
            index.insert(0, slice(expert, expert + 1))
        found = files.read(self.name, *index, shape=self.shape)
        found = found.reshape(found.shape[-2:])
        if self.inputs_first:
            found = found.T
        if self.each == 1:
            return found
        if self.along == 0:
            return self._unpacked(found.T, some).T
        return self._unpacked(found, some)

    def _unpacked(self, words: np.ndarray, some: slice) -> np.ndarray:
        """Takes some numbers out of the words that cover them, [n, words] -> [n, numbers]."""
        lines, count = words.shape
        octets = np.ascontiguousarray(words).view(np.uint8)
        bits = words.dtype.itemsize * 8 // self.each
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        numbers = octets[..., None] >> shifts & np.uint8(2**bits - 1)
        numbers = numbers.reshape(lines, count, self.each)
        if self.order:
            numbers = numbers[..., self.order]
        first = some.start % self.each
        numbers = numbers.reshape(lines, count * self.each)
        return numbers[:, first : first + some.stop - some.start]


@dataclass(frozen=True)
class Grid:
    """Groups of a matrix that share a scale. shape: their number along outputs and inputs. span:
    outputs and inputs of one; the last may have fewer."""

    shape: tuple[int, int]
    span: tuple[int, int]

    def slices(self, rows: slice, columns: slice) -> tuple[slice, slice]:
        """Returns which groups a part of the matrix has."""
        return covering(rows, self.span[0]), covering(columns, self.span[1])

    def spread(self, found: np.ndarray, rows: slice, columns: slice) -> np.ndarray:
        """Lays numbers of those groups out as [outputs, groups]. Groups become as long as their
        limits and those of `columns` allow; one that spans all inputs stays one."""
        top, left = (some.start for some in self.slices(rows, columns))
        by_row = found[np.arange(rows.start, rows.stop) // self.span[0] - top]
        if self.shape[1] == 1:
            return by_row
        group = math.gcd(self.span[1], columns.start, columns.stop)
        first = columns.start // group - left * (self.span[1] // group)
        count = (columns.stop - columns.start) // group
        return np.repeat(by_row, self.span[1] // group, 1)[:, first : first + count]


@dataclass(frozen=True)
class Factors:
    """Scales of a matrix, or its zero points. order: name of the tensor that has the group of each
    input; '': the inputs of a group are neighbours."""

    numbers: Packed
    grid: Grid
    order: str = ""

    def read(
        self, files: MappedTensors, rows: slice, columns: slice, expert: int | None = None
    ) -> np.ndarray:
        """Reads [outputs, groups]. If the inputs of a group are no neighbours, each is a group."""
        if self.order:
            every = self.numbers.read(files, rows, slice(0, self.grid.shape[1]), expert)
            return every[:, files.read(self.order, columns)]
        found = self.numbers.read(files, *self.grid.slices(rows, columns), expert)
        return self.grid.spread(found, rows, columns)


@dataclass(frozen=True)
class QuantisedTensor:
    """A matrix of a checkpoint, or those of all experts.

    shape: [outputs, inputs], or [experts, inputs, outputs]. kind: its format, for people. more: is
    added to zero points. symmetric: they are all the code of 0, so that none is needed. whole: name
    of a number by which all scales are divided, or multiplied if it is a factor; '': none. others:
    names of tensors that are not needed.
    """

    shape: tuple[int, ...]
    kind: str
    form: Form
    codes: Packed
    scales: Factors
    zeros: Factors | None = None
    more: int = 0
    symmetric: bool = False
    whole: str = ""
    factor: bool = False
    others: tuple[str, ...] = ()

    @property
    def matrix(self) -> tuple[int, int]:
        """Outputs and inputs of a matrix."""
        if len(self.shape) == 2:
            return self.shape[0], self.shape[1]
        return self.shape[2], self.shape[1]

    @property
    def names(self) -> set[str]:
        """Names of the tensors that hold it."""
        found = {self.codes.name, self.scales.numbers.name, self.scales.order, self.whole}
        if self.zeros is not None:
            found.add(self.zeros.numbers.name)
        return {name for name in (*found, *self.others) if name}

    def blocks(
        self, files: MappedTensors, rows: slice, columns: slice, expert: int | None = None
    ) -> Blocks:
        """Reads outputs `rows` and inputs `columns`, slices with start and stop. expert: of which
        matrix, if there are several. Errors: CheckpointError for zero points that differ where they
        should not."""
        codes = _unsigned(self.codes.read(files, rows, columns, expert))
        scales = self._scaled(files, _wide(self.scales.read(files, rows, columns, expert)))
        if self.zeros is None:
            return Blocks(self.form, codes, scales)
        zeros = _unsigned(self.zeros.read(files, rows, columns)).astype(np.int32)
        zeros += self.more - self.form.zero
        if not self.symmetric:
            scales = scales.astype(np.float32)
            return Blocks(self.form, codes, scales, -scales * zeros)
        if zeros.any():
            raise CheckpointError(
                f"{self.zeros.numbers.name}: zero points differ from {self.form.zero}, although "
                "quantization_config says sym"
            )
        return Blocks(self.form, codes, scales)

    def values(self, files: MappedTensors, rows: slice, columns: slice) -> np.ndarray:
        """Reads a slice of `shape` in f32, without the last dimension if there are three."""
        if len(self.shape) == 2:
            return dequantised(self.blocks(files, rows, columns))
        outputs = slice(0, self.shape[2])
        some = range(rows.start, rows.stop)
        matrices = [dequantised(self.blocks(files, outputs, columns, expert)) for expert in some]
        return np.stack(matrices).swapaxes(1, 2)

    def _scaled(self, files: MappedTensors, scales: np.ndarray) -> np.ndarray:
        """Scales with the number that all share."""
        if not self.whole:
            return scales
        whole = files.read(self.whole).astype(np.float32).reshape(())
        return scales * whole if self.factor else scales / whole


def covering(some: slice, each: int) -> slice:
    """Returns which parts of `each` entries cover some entries."""
    return slice(some.start // each, -(-some.stop // each))


def _wide(scales: np.ndarray) -> np.ndarray:
    """Returns scales in a type that devices compute with: exact. Bytes are exponents."""
    if scales.dtype == np.uint8:
        scales = scales.view(ml_dtypes.float8_e8m0fnu)
    if scales.dtype == ml_dtypes.float8_e8m0fnu:
        return scales.astype(ml_dtypes.bfloat16)
    if scales.dtype == ml_dtypes.float8_e4m3fn:
        return scales.astype(np.float32)
    return scales


def _unsigned(codes: np.ndarray) -> np.ndarray:
    """Returns codes without sign, or the bits of floats."""
    if codes.dtype == np.int8:
        return codes.view(np.uint8) ^ np.uint8(128)
    return codes.view(np.uint8)
