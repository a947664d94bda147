"""Asks transformers and compressed-tensors what quantised matrices mean: see the package."""

from __future__ import annotations

import json
from typing import Any

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.weights.quantised import FOLDER

OUTPUTS = 24
INPUTS = 128
# format and weights of a compressed-tensors config
COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "int4-group": ("pack-quantized", dict(num_bits=4, strategy="group", group_size=64)),
    "int4-channel": ("pack-quantized", dict(num_bits=4, strategy="channel")),
    "int4-zeros": (
        "pack-quantized",
        dict(num_bits=4, strategy="group", group_size=32, symmetric=False),
    ),
    "int8-packed": ("pack-quantized", dict(num_bits=8, strategy="group", group_size=64)),
    "int8-channel": ("int-quantized", dict(num_bits=8, strategy="channel")),
    "int8-zeros": ("int-quantized", dict(num_bits=8, strategy="channel", symmetric=False)),
    "fp8-channel": ("float-quantized", dict(num_bits=8, type="float", strategy="channel")),
    "fp8-tensor": ("float-quantized", dict(num_bits=8, type="float", strategy="tensor")),
}


def save(name: str, tensors: dict[str, torch.Tensor], expected: torch.Tensor, **config) -> None:
    tensors = {key: value.contiguous() for key, value in tensors.items()}
    tensors["expected"] = expected.float().contiguous()
    save_file(tensors, FOLDER / f"{name}.safetensors", {"quantization_config": json.dumps(config)})


def matrix() -> torch.Tensor:
    return torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0))


def limits(args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and largest weights of what shares a scale."""
    if args.strategy == "tensor":
        return matrix().amin().reshape(1), matrix().amax().reshape(1)
    groups = matrix().reshape(OUTPUTS, -1, args.group_size or INPUTS)
    return groups.amin(-1), groups.amax(-1)


def compressed(name: str, form: str, weights: dict[str, Any]) -> None:
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    scales, zeros = calculate_qparams(*limits(args), args)
    compressor = BaseCompressor.get_value_from_registry(form)
    given = {"weight": matrix(), "weight_scale": scales, "weight_zero_point": zeros}
    stored = compressor.compress(given, scheme)
    expected = compressor.decompress(dict(stored), scheme)["weight"]
    save(
        name,
        {f"m.{key}": value for key, value in stored.items()},
        expected,
        quant_method="compressed-tensors",
        format=form,
        config_groups={"group_0": {"weights": weights, "targets": ["Linear"]}},
    )


def fp8_blocks() -> None:
    """Blocks that do not divide the matrix."""
    block = [16, 80]
    codes = matrix().to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2, generator=torch.Generator().manual_seed(1)) + 0.5
    expected = _dequantize_fp8_weight(codes, scales, block, torch.float32)
    tensors = {"m.weight": codes, "m.weight_scale_inv": scales}
    save("fp8-blocks", tensors, expected, quant_method="fp8", weight_block_size=block)


def mxfp4_experts() -> None:
    noise = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (2, OUTPUTS, 2, 16), generator=noise, dtype=torch.uint8)
    scales = torch.randint(118, 130, (2, OUTPUTS, 2), generator=noise, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save("mxfp4-experts", {"m_blocks": blocks, "m_scales": scales}, expected, quant_method="mxfp4")


def floats4(name: str, form: str, group: int, scale: torch.dtype, **more: torch.Tensor) -> None:
    noise = torch.Generator().manual_seed(3)
    args = QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group" if more else "group",
        group_size=group,
        scale_dtype=scale,
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    packed = torch.randint(0, 256, (OUTPUTS, INPUTS // 2), generator=noise, dtype=torch.uint8)
    factors = torch.randint(110, 130, (OUTPUTS, INPUTS // group), generator=noise)
    factors = factors.to(torch.uint8) if scale == torch.uint8 else (factors / 100).to(scale)
    stored = {"weight_packed": packed, "weight_scale": factors, **more}
    compressor = BaseCompressor.get_value_from_registry(form)
    expected = compressor.decompress(dict(stored), scheme)["weight"]
    stored = {f"m.{key}": value for key, value in stored.items()}
    save(name, stored, expected, quant_method="compressed-tensors", format=form)


if __name__ == "__main__":
    for name, (form, weights) in COMPRESSED.items():
        compressed(name, form, weights)
    fp8_blocks()
    mxfp4_experts()
    floats4("mxfp4", "mxfp4-pack-quantized", 32, torch.uint8)
    floats4(
        "nvfp4",
        "nvfp4-pack-quantized",
        16,
        torch.float8_e4m3fn,
        weight_global_scale=torch.tensor([4.0]),  # exact in the bfloat16 of the library,
    )
