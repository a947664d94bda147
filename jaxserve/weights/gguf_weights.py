"""Reads GGUF files as checkpoints: tensors as they are stored, or dequantised by the `gguf`
library."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from jaxserve.checkpoint.gguf_config import ROPE_TENSORS, from_gguf
from jaxserve.checkpoint.gguf_file import GgufTensor, read_header
from jaxserve.checkpoint.model_paths import CheckpointError, reason
from jaxserve.weights import quantised
from jaxserve.weights.mapped_file import MappedFile
from jaxserve.weights.names import folder_tensor, tensors_of

_ALL = slice(None)
# biases of all experts, which are read as one vector
_EXPERT_BIAS = "_exps.bias"


class GgufFile:
    """A checkpoint in a GGUF file, whose tensors of more than two dimensions are read as matrices
    (see `_flat`). Reads only the blocks that cover the rows and columns asked for; `bytes_read`
    counts them."""

    def __init__(self, path: Path, name: str = ""):
        header = read_header(path)
        self.bytes_read = 0
        self._counting = threading.Lock()
        self.path = path
        self.tokenizer = path
        self._file = MappedFile(path)
        self._check_kinds(header.tensors)
        factors = {
            tensor: self._floats(place, slice(0, 1), _ALL).ravel().tolist()
            for tensor, place in header.tensors.items()
            if tensor in ROPE_TENSORS
        }
        try:
            self.config = from_gguf(header.fields, header.tensors, name, factors)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: {reason(error)}") from None
        wanted = tensors_of(self.config)
        self._places = {
            tensor: _with_ones(_flat(tensor, place), wanted.get(tensor, ()))
            for tensor, place in header.tensors.items()
            if tensor not in ROPE_TENSORS
        }

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name -> (shape, name of the GGML type)."""
        return {name: (place.shape, place.kind.name) for name, place in self._places.items()}

    def read(self, name: str, rows: slice = _ALL, columns: slice | None = None) -> np.ndarray:
        """Reads a slice of a tensor, dequantised to f32. name: also that of a Hugging Face folder
        for a tensor of a dense model, which is read whole, as the folder has it."""
        if name not in self._places:
            tensor = folder_tensor(name, self, self.config)[rows]
            return tensor if columns is None else tensor[:, columns]
        place = self._places[name]
        some = slice(*rows.indices(place.shape[0])[:2])
        if len(place.shape) == 1:  # stored as one row; the rows asked for are its columns
            return self._floats(place, slice(0, 1), some)[0]
        values = self._floats(place, some, columns or _ALL)
        return values.reshape(len(values), *place.shape[1:-1], values.shape[1])

    def blocks(
        self, name: str, rows: slice, columns: slice | None = None, expert: int | None = None
    ) -> quantised.Blocks | None:
        """Reads a slice of a matrix in whole blocks, as it is stored; None for types that are not
        kept."""
        place = self._places[name]
        if place.kind not in quantised.GGUF_KINDS or len(place.shape) == 1:
            return None
        return quantised.from_gguf(self._raw(place, rows, columns or _ALL), place.kind)

    def release(self) -> None:
        """Gives back the memory of what was read so far."""
        self._file.release()

    def _floats(self, place: GgufTensor, rows: slice, columns: slice) -> np.ndarray:
        """A slice of a matrix, dequantised to f32."""
        block = GGML_QUANT_SIZES[place.kind][0]
        left, right, _ = columns.indices(place.shape[-1])
        begin = left // block * block
        raw = self._raw(place, rows, columns)
        if raw.size == 0:
            return np.zeros((rows.stop - rows.start, right - left), np.float32)
        return dequantize(raw, place.kind)[:, left - begin : right - begin]

    def _raw(self, place: GgufTensor, rows: slice, columns: slice) -> np.ndarray:
        """The blocks that cover a slice of a matrix, as bytes [rows, bytes]."""
        block, size = GGML_QUANT_SIZES[place.kind]
        left, right, _ = columns.indices(place.shape[-1])
        table = self._file.bytes[place.start : place.stop].reshape(
            -1, place.shape[-1] // block * size
        )
        raw = table[rows, left // block * size : -(-right // block) * size]
        with self._counting:
            self.bytes_read += raw.nbytes
        return np.ascontiguousarray(raw)

    def _check_kinds(self, tensors: Mapping[str, GgufTensor]) -> None:
        """Raises CheckpointError for types that the gguf library cannot dequantise."""
        for name, place in tensors.items():
            size = GGML_QUANT_SIZES[place.kind][1]
            try:
                dequantize(np.zeros((1, size), np.uint8), place.kind)
            except NotImplementedError:
                kind = place.kind.name
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} is {kind}, "
                    "which the gguf library cannot dequantise"
                ) from None


def _flat(name: str, place: GgufTensor) -> GgufTensor:
    """Returns a tensor of all experts or heads [n, out, in] as the matrix [n * out, in], the biases
    of all experts as a vector, and others as they are."""
    if name.endswith(_EXPERT_BIAS):
        return replace(place, shape=(math.prod(place.shape),))
    if len(place.shape) > 2:
        return replace(place, shape=(math.prod(place.shape[:-1]), place.shape[-1]))
    return place


def _with_ones(place: GgufTensor, wanted: tuple[int, ...]) -> GgufTensor:
    """Gives a tensor the shape that is wanted, if they differ in dimensions of 1 alone: files leave
    some of these out."""
    without = lambda shape: [size for size in shape if size != 1]
    if without(place.shape) == without(wanted):
        return replace(place, shape=wanted)
    return place
