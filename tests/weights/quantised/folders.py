"""Writes tiny models in quantised formats, as hubs hold them, and the same models in floats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

Tensors = dict[str, np.ndarray]
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def fp8_blocks(name: str, matrix: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """e4m3 with a scale of each block of 64 x 64."""
    module = name.removesuffix(".weight")
    outputs, inputs = matrix.shape
    rows, columns = np.arange(outputs) // 64, np.arange(inputs) // 64
    scales = np.zeros((rows[-1] + 1, columns[-1] + 1), np.float32)
    np.maximum.at(scales, (rows[:, None], columns), np.abs(matrix) / 400)
    wide = scales[rows][:, columns]
    codes = (matrix / wide).astype(ml_dtypes.float8_e4m3fn)
    stored = {name: codes, f"{module}.weight_scale_inv": scales}
    return stored, codes.astype(np.float32) * wide


def int4_groups(name: str, matrix: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """compressed-tensors, 4 bits with zero points in groups of 32 inputs."""
    module = name.removesuffix(".weight")
    codes, zeros, scales, values = _four_bits(matrix)
    stored = {
        f"{module}.weight_packed": _words(codes),
        f"{module}.weight_zero_point": _words(zeros.T).T,
        f"{module}.weight_scale": scales.astype(ml_dtypes.bfloat16),
        f"{module}.weight_shape": np.array(matrix.shape),
    }
    return stored, values


def int8_rows(name: str, matrix: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """compressed-tensors, 8 bits with a scale of each row."""
    scales = (np.abs(matrix).max(1, keepdims=True) / 127).astype(np.float32)
    codes = np.rint(matrix / scales).astype(np.int8)
    stored = {name: codes, name.removesuffix("weight") + "weight_scale": scales}
    return stored, codes * scales


def gptq(name: str, matrix: np.ndarray) -> tuple[Tensors, np.ndarray]:
    module = name.removesuffix(".weight")
    codes, zeros, scales, values = _four_bits(matrix)
    stored = {
        f"{module}.qweight": _words(codes).T,
        f"{module}.qzeros": _words(zeros.T - 1),
        f"{module}.scales": scales.T,
        f"{module}.g_idx": np.arange(matrix.shape[1], dtype=np.int32) // 32,
    }
    return stored, values


def desc_act(name: str, matrix: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """GPTQ with the inputs of a group anywhere."""
    order = np.random.default_rng(0).permutation(matrix.shape[1])
    places = np.argsort(order)
    stored, values = gptq(name, matrix[:, order])
    module = name.removesuffix(".weight")
    codes = _four_bits(matrix[:, order])[0]
    stored[f"{module}.qweight"] = _words(codes[:, places]).T
    stored[f"{module}.g_idx"] = stored[f"{module}.g_idx"][places]
    return stored, values[:, places]


def awq(name: str, matrix: np.ndarray) -> tuple[Tensors, np.ndarray]:
    module = name.removesuffix(".weight")
    codes, zeros, scales, values = _four_bits(matrix)
    order = np.arange(len(matrix)).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].ravel()
    stored = {
        f"{module}.qweight": _words(codes[order].T),
        f"{module}.qzeros": _words(zeros[order].T),
        f"{module}.scales": scales.T,
    }
    return stored, values


def mxfp4_experts(name: str, matrices: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """gpt-oss, of matrices [experts, inputs, outputs] in groups of 32 inputs."""
    experts, inputs, outputs = matrices.shape
    groups = matrices.swapaxes(1, 2).reshape(experts, outputs, inputs // 32, 32)
    exponents = np.ceil(np.log2(np.abs(groups).max(-1) / 6)).astype(np.int32)
    scales = np.exp2(exponents).astype(np.float32)[..., None]
    codes = np.abs(groups[..., None] / scales[..., None] - _E2M1).argmin(-1).astype(np.uint8)
    stored = {
        f"{name}_blocks": codes[..., ::2] | codes[..., 1::2] << 4,
        f"{name}_scales": (exponents + 127).astype(np.uint8),
    }
    values = (_E2M1[codes] * scales).reshape(experts, outputs, inputs).swapaxes(1, 2)
    return stored, np.ascontiguousarray(values)


def _four_bits(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Codes, zero points (from 1 on) and scales of groups of 32 inputs, and the values."""
    groups = matrix.reshape(len(matrix), -1, 32)
    low = groups.min(-1, keepdims=True)
    scales = ((groups.max(-1, keepdims=True) - low) / 14).astype(ml_dtypes.bfloat16)
    wide = scales.astype(np.float32)
    zeros = np.clip(np.rint(-low / wide), 1, 15)
    codes = np.clip(np.rint(groups / wide) + zeros, 0, 15)
    values = ((codes - zeros) * wide).reshape(matrix.shape)
    codes = codes.reshape(matrix.shape).astype(np.uint8)
    return codes, zeros[..., 0].astype(np.uint8), scales[..., 0].astype(np.float16), values


def _words(codes: np.ndarray) -> np.ndarray:
    """Packs eight codes of 4 bits of the last dimension in each word."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    eight = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32)
    return np.bitwise_or.reduce(eight << shifts, -1).view(np.int32)


# `quantization_config`, and how a matrix is stored
FORMATS: dict[str, tuple[dict, Callable[[str, np.ndarray], tuple[Tensors, np.ndarray]]]] = {
    "fp8": ({"quant_method": "fp8", "weight_block_size": [64, 64]}, fp8_blocks),
    "int4": ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, int4_groups),
    "int8": ({"quant_method": "compressed-tensors", "format": "int-quantized"}, int8_rows),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, gptq),
    "desc_act": ({"quant_method": "gptq", "bits": 4, "desc_act": True}, desc_act),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32}, awq),
    "mxfp4": ({"quant_method": "mxfp4"}, mxfp4_experts),
}
_FLOATS = ("embed_tokens", "lm_head", "norm", "router", "mlp.gate.", "sinks", "bias")


def write_both(folder: Path, config: dict, tensors: Tensors, form: str) -> tuple[Path, Path]:
    """Writes a model in a format, and in floats as the format rounds it; of MXFP4 only experts are
    quantised, of others all matrices of layers."""
    stated, quantise = FORMATS[form]
    stored: Tensors = {}
    floats = dict(tensors)
    for name, value in tensors.items():
        if value.ndim == (3 if form == "mxfp4" else 2) and not any(x in name for x in _FLOATS):
            parts, values = quantise(name, value)
            # save_file writes the memory of an array, in whatever order it is
            stored |= {part: np.ascontiguousarray(array) for part, array in parts.items()}
            floats[name] = np.ascontiguousarray(values)
        else:
            stored[name] = value
    folders = folder / form, folder / "floats"
    configs = config | {"quantization_config": stated}, config
    for path, fields, held in zip(folders, configs, (stored, floats)):
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(fields))
        save_file(held, path / "model.safetensors")
    return folders
