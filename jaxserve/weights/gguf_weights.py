"""Reads GGUF files as checkpoints: tensors dequantised by the `gguf` library."""

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

_ALL = slice(None)
# biases of all experts, which are read as one vector
_EXPERT_BIAS = "_exps.bias"


class GgufFile:
    """A checkpoint in a GGUF file, whose tensors of more than two dimensions are read as matrices
    (see `_flat`). Reads and dequantises (to f32) only the blocks that cover the
    rows and columns asked for; `bytes_read` counts them."""

    def __init__(self, path: Path, name: str = ""):
        header = read_header(path)
        self.bytes_read = 0
        self._counting = threading.Lock()
        self.path = path
        self.tokenizer = path
        self._data = np.memmap(path, np.uint8, "r")
        self._check_kinds(header.tensors)
        factors = {
            tensor: self._blocks(place, 0, 1, 0, place.shape[-1]).ravel().tolist()
            for tensor, place in header.tensors.items()
            if tensor in ROPE_TENSORS
        }
        try:
            self.config = from_gguf(header.fields, header.tensors, name, factors)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: {reason(error)}") from None
        self._places = {
            tensor: _flat(tensor, place)
            for tensor, place in header.tensors.items()
            if tensor not in ROPE_TENSORS
        }

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name -> (shape, name of the GGML type)."""
        return {name: (place.shape, place.kind.name) for name, place in self._places.items()}

    def read(self, name: str, rows: slice = _ALL, columns: slice | None = None) -> np.ndarray:
        """Reads a slice of a tensor, dequantised to f32."""
        return self._slice(self._places[name], rows, columns)

    def _slice(self, place: GgufTensor, rows: slice, columns: slice | None) -> np.ndarray:
        if len(place.shape) == 1:  # stored as one row; the rows asked for are its columns
            first, last, _ = rows.indices(place.shape[0])
            return self._blocks(place, 0, 1, first, last)[0]
        top, bottom, _ = rows.indices(place.shape[0])
        first, last, _ = (columns or _ALL).indices(place.shape[1])
        return self._blocks(place, top, bottom, first, last)

    def _blocks(
        self, place: GgufTensor, top: int, bottom: int, left: int, right: int
    ) -> np.ndarray:
        """Rows top to bottom and columns left to right of a matrix, dequantised to f32."""
        block, size = GGML_QUANT_SIZES[place.kind]
        table = self._data[place.start : place.stop].reshape(-1, place.shape[-1] // block * size)
        begin = left // block
        end = -(-right // block)
        raw = np.ascontiguousarray(table[top:bottom, begin * size : end * size])
        with self._counting:
            self.bytes_read += raw.nbytes
        if raw.size == 0:
            return np.zeros((bottom - top, right - left), np.float32)
        return dequantize(raw, place.kind)[:, left - begin * block : right - begin * block]

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
