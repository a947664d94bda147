"""`quantization_config` as hubs hold it is read, or refused by name."""

from __future__ import annotations

import pytest

from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.checkpoint.quantization import FIELD, Quantization, read_quantization

INT4 = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": 128,
    "symmetric": True,
    "actorder": None,
}


def compressed(weights: dict, **fields) -> dict:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    stated = {"quant_method": "compressed-tensors", "config_groups": groups}
    return stated | {"format": "pack-quantized", "ignore": ["re:.*lm_head"]} | fields


@pytest.mark.parametrize(
    "stated, expected",
    [
        (  # DeepSeek V3, Qwen3-FP8, MiniMax M2
            {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
            },
            Quantization("fp8"),
        ),
        (
            {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
            Quantization("fp8"),
        ),
        (  # gpt-oss
            {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
            Quantization("mxfp4"),
        ),
        (compressed(INT4), Quantization("compressed-tensors")),
        (
            compressed(INT4 | {"actorder": "group"}),
            Quantization("compressed-tensors", reordered=True),
        ),
        (
            compressed(INT4 | {"strategy": "block", "block_structure": [64, 128]}),
            Quantization("compressed-tensors", (64, 128)),
        ),
        (
            {"bits": 4, "group_size": 128, "desc_act": False, "sym": True, "quant_method": "gptq"},
            Quantization("gptq", symmetric=True, more=1),
        ),
        (
            {"bits": 8, "desc_act": True, "quant_method": "gptq", "checkpoint_format": "gptq_v2"},
            Quantization("gptq", reordered=True),
        ),
        (
            {"bits": 4, "quant_method": "awq", "version": "gemm", "zero_point": True},
            Quantization("awq"),
        ),
    ],
)
def test_configs_of_hubs_are_read(stated, expected):
    assert read_quantization({FIELD: stated}) == expected
    assert read_quantization({"text_config": {FIELD: stated}}) == expected


def test_the_older_field_of_compressed_tensors_is_read():
    assert read_quantization({"compression_config": {}}) is None
    stated = {"format": "int-quantized", "config_groups": {}}
    assert read_quantization({"compression_config": stated}) == Quantization("compressed-tensors")


@pytest.mark.parametrize(
    "stated, message",
    [
        ("fp8", "must be an object"),
        ({"bits": 4}, "quant_method 'None' is not supported, only fp8, fbgemm_fp8, mxfp4"),
        ({"quant_method": "aqlm"}, "quant_method 'aqlm' is not supported, only"),
        ({"quant_method": ["fp8"]}, "is not supported, only"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported .its codes"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not supported with fp8, only"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two"),
        ({"quant_method": "gptq", "bits": 3}, "bits '3' is not supported with gptq, only 2, 4, 8"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "checkpoint_format 'marlin' is not supported with gptq",
        ),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        (compressed(INT4, format="marlin-24"), "format 'marlin-24'"),
        (compressed(INT4, config_groups=[]), "config_groups must be an object"),
        (
            compressed(INT4, config_groups={"group_0": ["Linear"]}),
            "config_groups must be an object",
        ),
        (
            compressed(INT4, sparsity_config={"format": "sparse-24-bitmask"}),
            "sparsity_config: format 'sparse-24-bitmask'",
        ),
        (compressed(INT4, transform_config={"config_groups": {}}), "transform_config"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(stated, message):
    with pytest.raises(CheckpointError, match=f"quantization_config: .*{message}"):
        read_quantization({FIELD: stated})
