"""Reads GGUF files as checkpoints: tensors under their Hugging Face names, dequantised by the
`gguf` library."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from jaxserve.checkpoint.gguf_file import GgufTensor, read_header
from jaxserve.checkpoint.model_config import from_gguf
from jaxserve.checkpoint.model_paths import CheckpointError, reason

_ALL = slice(None)
_MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
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
        self._places = {
            gguf_to_hf(n): place for n, place in header.tensors.items() if n != "rope_freqs.weight"
        }
        self._data = np.memmap(path, np.uint8, "r")
        self._check_kinds()
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
        left, right, _ = (columns or _ALL).indices(place.shape[1])
        return self._blocks(place, top, bottom, left, right)

    def _deinterleaved(self, place: GgufTensor, rows: slice, columns: slice | None) -> np.ndarray:
        """A slice with the rows of each head in Hugging Face order: even ones, then odd ones. Whole
        heads are read."""
        H = self.config.head_dim
        first, last, _ = rows.indices(place.shape[0])
        top = first // H * H
        bottom = -(-last // H) * H
        found = self._slice(place, slice(top, bottom), columns)
        found = found.reshape(-1, H // 2, 2, *found.shape[1:]).swapaxes(1, 2).reshape(found.shape)
        return found[first - top : last - top]

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

    def _check_kinds(self) -> None:
        """Raises CheckpointError for types that the gguf library cannot dequantise."""
        for name, place in self._places.items():
            size = GGML_QUANT_SIZES[place.kind][1]
            try:
                dequantize(np.zeros((1, size), np.uint8), place.kind)
            except NotImplementedError:
                kind = place.kind.name
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} is {kind}, "
                    "which the gguf library cannot dequantise"
                ) from None


def gguf_to_hf(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; unknown names are returned as they are."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer and layer[2] in _LAYER_TENSORS:
        return f"model.layers.{layer[1]}.{_LAYER_TENSORS[layer[2]]}.{layer[3]}"
    return _MODEL_TENSORS.get(name, name)
