"""`LAYOUTS`: how tensors of each quantised format belong together, and `quantised_tensors`, which
finds the quantised matrices of a checkpoint by it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.checkpoint.quantization import Quantization
from jaxserve.kernels.quantised import Form
from jaxserve.weights.quantised_tensors import Factors, Grid, Packed, QuantisedTensor
from jaxserve.weights.safetensors_files import MappedTensors

_E4M3 = Form(8, mantissa=3)
_E2M1 = Form(4, mantissa=1)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # places of eight outputs in a word
_SCALES = (".weight_scale", ".weight_scale_inv")  # the second is a factor, too


@dataclass(frozen=True)
class Found:
    """The tensor of a matrix's codes among those of a checkpoint. name, module: its name with and
    without the ending of its layout."""

    files: MappedTensors
    quantization: Quantization
    name: str
    module: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shape_of(self.name)

    def has(self, name: str) -> bool:
        """Returns True if the module has a tensor of this name."""
        return self.module + name in self.files.types

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor. Errors: CheckpointError if it is missing."""
        if name not in self.files.types:
            raise CheckpointError(f"{name} is missing beside {self.name}")
        return self.files.types[name][0]

    def scales(self, matrix: tuple[int, int]) -> Factors:
        """Returns the scales of a matrix of this shape: of the whole, of rows, of groups of inputs
        or of blocks. Errors: CheckpointError if they are missing or have another shape."""
        ending = next((ending for ending in _SCALES if self.has(ending)), _SCALES[0])
        name = self.module + ending
        grid = self.grid(name, matrix)
        return Factors(Packed(name, grid.shape), grid)

    def grid(self, name: str, matrix: tuple[int, int]) -> Grid:
        """Returns the groups of a matrix of this shape that a tensor has numbers for. Errors:
        CheckpointError if it has another shape."""
        shape = self.shape_of(name)
        outputs, inputs = matrix
        block = self.quantization.block
        by_block = (-(-outputs // block[0]), -(-inputs // block[1]))
        if math.prod(shape) == 1:
            return Grid((1, 1), matrix)
        if shape == (outputs,):
            return Grid((outputs, 1), (1, inputs))
        if shape == by_block:
            return Grid(by_block, block)
        if len(shape) == 2 and shape[0] == outputs and shape[1] and inputs % shape[1] == 0:
            return Grid((outputs, shape[1]), (1, inputs // shape[1]))
        raise CheckpointError(
            f"{name} is {list(shape)}: no scales of {self.name}, a matrix {list(matrix)}, nor of "
            f"its blocks of {list(block)}"
        )

    def matrix(self) -> tuple[int, int]:
        """Returns the shape, which must be of two dimensions. Errors: CheckpointError."""
        if len(self.shape) != 2:
            raise CheckpointError(f"{self.name} is {list(self.shape)}: no matrix")
        return self.shape[0], self.shape[1]

    def each(self, bits: int) -> int:
        """Returns how many codes of that many bits a word has. Errors: CheckpointError."""
        if bits not in (2, 4, 8):
            raise CheckpointError(f"{self.name}: codes of {bits} bits are not supported")
        return 32 // bits

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises CheckpointError if a tensor has another shape."""
        if self.shape_of(name) != shape:
            raise CheckpointError(f"{name} is {list(self.shape_of(name))}, should be {list(shape)}")


def _fp8(found: Found) -> QuantisedTensor:
    matrix = found.matrix()
    codes = Packed(found.name, matrix)
    return QuantisedTensor(matrix, "FP8", _E4M3, codes, found.scales(matrix))


def _mxfp4_experts(found: Found) -> QuantisedTensor:
    """gpt-oss: blocks of 32 inputs in 16 bytes."""
    scales = found.module + "_scales"
    shape = found.shape_of(scales)
    if len(shape) != 3 or found.shape != (*shape, 16):
        raise CheckpointError(
            f"{found.name} is {list(found.shape)} and {scales} {list(shape)}, instead of [experts, "
            "outputs, inputs / 32, 16] and [experts, outputs, inputs / 32]"
        )
    experts, outputs, groups = shape
    return QuantisedTensor(
        (experts, groups * 32, outputs),
        "MXFP4",
        _E2M1,
        Packed(found.name, (experts, outputs, groups * 16), each=2),
        Factors(Packed(scales, shape), Grid((outputs, groups), (1, 32))),
    )


def _int8(found: Found) -> QuantisedTensor:
    matrix = found.matrix()
    scales = found.scales(matrix)
    zeros = None
    if found.has(".weight_zero_point"):
        name = found.module + ".weight_zero_point"
        grid = found.grid(name, matrix)
        zeros = Factors(Packed(name, grid.shape), grid)
    return QuantisedTensor(matrix, "INT8", Form(8, 128), Packed(found.name, matrix), scales, zeros)


def _packed_ints(found: Found) -> QuantisedTensor:
    """compressed-tensors: words along inputs, and along outputs for zero points."""
    sizes = found.module + ".weight_shape"
    found.shape_of(sizes)
    matrix = found.files.read(sizes).tolist()
    rows, words = found.matrix()
    if len(matrix) != 2 or matrix[0] != rows or matrix[1] < 1:
        raise CheckpointError(f"{sizes} is {matrix}, {found.name} has {rows} rows")
    outputs, inputs = matrix
    each = found.each(words * 32 // inputs)
    scales = found.scales((outputs, inputs))
    others = [sizes]
    groups = found.module + ".weight_g_idx"
    if found.has(".weight_g_idx"):
        others.append(groups)
    order = groups if found.quantization.reordered and found.has(".weight_g_idx") else ""
    zeros = None
    if found.has(".weight_zero_point"):
        name = found.module + ".weight_zero_point"
        shape = (-(-outputs // each), scales.grid.shape[1])
        found.require(name, shape)
        zeros = Factors(Packed(name, shape, each, along=0), scales.grid, order)
    return QuantisedTensor(
        (outputs, inputs),
        f"INT{32 // each}",
        _integers(32 // each),
        Packed(found.name, (rows, words), each),
        dataclasses.replace(scales, order=order),
        zeros,
        others=tuple(others),
    )


def _packed_floats(found: Found) -> QuantisedTensor:
    """MXFP4 and NVFP4: two numbers to a byte along inputs."""
    outputs, octets = found.matrix()
    matrix = (outputs, octets * 2)
    dividend, factor = (found.has(f".weight_{name}") for name in ("global_scale", "scale_2"))
    whole = ""
    if dividend or factor:
        whole = found.module + (".weight_global_scale" if dividend else ".weight_scale_2")
    return QuantisedTensor(
        matrix,
        "NVFP4" if whole else "MXFP4",
        _E2M1,
        Packed(found.name, (outputs, octets), each=2),
        found.scales(matrix),
        whole=whole,
        factor=factor,
    )


def _words_inputs_first(found: Found) -> QuantisedTensor:
    """GPTQ, whose words have several inputs, and AWQ, whose words have several outputs; zero points
    share words along outputs in both."""
    awq = found.quantization.method == "awq"
    scales, zeros, order = (found.module + end for end in (".scales", ".qzeros", ".g_idx"))
    groups, outputs = (*found.shape_of(scales), 0)[:2]
    words = found.matrix()
    packed = (*found.shape_of(zeros), 0)[1]
    each = found.each(packed * 32 // max(outputs, 1))
    inputs = words[0] * (1 if awq else each)
    found.require(found.name, (inputs, outputs // each) if awq else (inputs // each, outputs))
    found.require(zeros, (groups, outputs // each))
    if inputs % max(groups, 1):
        raise CheckpointError(f"{scales} has {groups} groups of {inputs} inputs")
    grid = Grid((outputs, groups), (1, inputs // groups))
    places = _AWQ_ORDER if awq else ()
    by_input = order if found.quantization.reordered else ""
    return QuantisedTensor(
        (outputs, inputs),
        found.quantization.method.upper(),
        _integers(32 // each),
        Packed(found.name, words, each, int(not awq), True, places),
        Factors(Packed(scales, (groups, outputs), inputs_first=True), grid, by_input),
        Factors(Packed(zeros, (groups, packed), each, 0, True, places), grid, by_input),
        more=found.quantization.more,
        symmetric=found.quantization.symmetric,
        others=(order,) if found.has(".g_idx") else (),
    )


def _integers(bits: int) -> Form:
    """The form of integers of 2, 4 or 8 bits, which are kept in 4 at least."""
    return Form(max(bits, 4), 2 ** (bits - 1))


class Layout(NamedTuple):
    """A way in which codes lie. codes, dtype: ending of the name of their tensor, and its stored
    type. plain: the ending where weights are floats. describe: finds what belongs to a tensor."""

    codes: str
    dtype: str
    plain: str
    describe: Callable[[Found], QuantisedTensor]


LAYOUTS = (
    Layout(".weight", "F8_E4M3", ".weight", _fp8),
    Layout(".weight", "I8", ".weight", _int8),
    Layout(".weight", "U8", ".weight", _packed_floats),
    Layout(".weight_packed", "U8", ".weight", _packed_floats),
    Layout(".weight_packed", "I32", ".weight", _packed_ints),
    Layout(".qweight", "I32", ".weight", _words_inputs_first),
    Layout("_blocks", "U8", "", _mxfp4_experts),
)


def quantised_tensors(
    files: MappedTensors, quantization: Quantization
) -> dict[str, QuantisedTensor]:
    """Finds the quantised matrices in files, by the names that they would have in floats. Errors:
    CheckpointError for tensors that do not belong together."""
    tensors = {}
    for name, (_, dtype) in files.types.items():
        for layout in LAYOUTS:
            if dtype == layout.dtype and name.endswith(layout.codes):
                module = name.removesuffix(layout.codes)
                found = Found(files, quantization, name, module)
                tensors[module + layout.plain] = layout.describe(found)
    return tensors
