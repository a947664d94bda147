"""Reads GGUF files as checkpoints: tensors under their Hugging Face names, dequantised by the
`gguf` library."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from jaxserve.checkpoint.families import FAMILIES
from jaxserve.checkpoint.gguf_file import GgufTensor, read_header
from jaxserve.checkpoint.model_config import from_gguf
from jaxserve.checkpoint.model_paths import CheckpointError, reason

_ALL = slice(None)
# llama.cpp's names of tensors (in layers: after "blk.N.") -> parts of `weights.names`
_PARTS = {
    "token_embd.weight": "embed",
    "output_norm.weight": "norm",
    "output.weight": "head",
    "attn_norm.weight": "attn_norm",
    "ffn_norm.weight": "mlp_norm",
    "attn_q.weight": "q",
    "attn_k.weight": "k",
    "attn_v.weight": "v",
    "attn_q.bias": "q_bias",
    "attn_k.bias": "k_bias",
    "attn_v.bias": "v_bias",
    "attn_q_norm.weight": "q_norm",
    "attn_k_norm.weight": "k_norm",
    "attn_output.weight": "o",
    "ffn_gate.weight": "gate",
    "ffn_up.weight": "up",
    "ffn_down.weight": "down",
}


class GgufFile:
    """A checkpoint in a GGUF file. Reads and dequantises (to f32) only the blocks that cover the
    rows and columns asked for; `bytes_read` counts them."""

    def __init__(self, path: Path, name: str = ""):
        header = read_header(path)
        self.bytes_read = 0
        self._counting = threading.Lock()
        self.path = path
        self.tokenizer = path
        self._data = np.memmap(path, np.uint8, "r")
        self._check_kinds(header.tensors)
        factors = header.tensors.get("rope_freqs.weight")
        rope = None
        if factors is not None:
            rope = self._blocks(factors, 0, 1, 0, factors.shape[-1]).ravel().tolist()
        try:
            self.config = from_gguf(
                header.fields, name, tied="output.weight" not in header.tensors, rope_factors=rope
            )
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: {reason(error)}") from None
        self._places = {
            gguf_to_hf(n, self.config.family): place
            for n, place in header.tensors.items()
            if n != "rope_freqs.weight"
        }
        # llama.cpp interleaves the RoPE pairs of q and k: rows i and i + H / 2 follow each other
        self._interleaved = header.fields["general.architecture"] == "llama"

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name -> (shape, name of the GGML type)."""
        return {name: (place.shape, place.kind.name) for name, place in self._places.items()}

    def read(self, name: str, rows: slice = _ALL, columns: slice | None = None) -> np.ndarray:
        """Reads a slice of a tensor, dequantised to f32."""
        place = self._places[name]
        if self._interleaved and re.search(r"\.(q|k)_proj\.", name):
            return self._deinterleaved(place, rows, columns)
        return self._slice(place, rows, columns)

    def _slice(self, place: GgufTensor, rows: slice, columns: slice | None) -> np.ndarray:
        if len(place.shape) == 1:  # stored as one row; the rows asked for are its columns
            first, last, _ = rows.indices(place.shape[0])
            return self._blocks(place, 0, 1, first, last)[0]
        top, bottom, _ = rows.indices(place.shape[0])
        first, last, _ = (columns or _ALL).indices(place.shape[1])
        return self._blocks(place, top, bottom, first, last)

    def _deinterleaved(self, place: GgufTensor, rows: slice, columns: slice | None) -> np.ndarray:
        """A slice with the rows of each head in Hugging Face order: even ones, then odd ones. Whole
        heads are read."""
        H = self.config.head_dim
        first, last, _ = rows.indices(place.shape[0])
        top = first // H * H
        bottom = -(-last // H) * H
        heads = self._slice(place, slice(top, bottom), columns)
        heads = heads.reshape(-1, H // 2, 2, *heads.shape[1:]).swapaxes(1, 2).reshape(heads.shape)
        return heads[first - top : last - top]

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


def gguf_to_hf(name: str, family: str) -> str:
    """Returns the Hugging Face name of a GGUF tensor of a family; unknown names as they are."""
    layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    part = _PARTS.get(layer[2] if layer else name)
    for tensor, parts in FAMILIES[family].tensors.items():
        if parts == (part,) and ("{layers}" in tensor) == (layer is not None):
            return tensor.format(layers=layer and layer[1])
    return name
