"""`quantization_config` of a config.json: the methods whose tensors are read, and what they say
beyond the tensors.

Which matrices are quantised, with how many bits and in which groups follows from the tensors, so
lists of modules that are not quantised need not be read. Schemes for activations and KV change
nothing: only weights are quantised here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxserve.checkpoint.model_paths import CheckpointError

FIELD = "quantization_config"
_OLDER_FIELD = "compression_config"  # of compressed-tensors


@dataclass(frozen=True)
class Quantization:
    """Facts about quantised matrices that their tensors do not state.

    method: a key of `METHODS`. block: outputs and inputs that share a scale, where scales are of
    blocks. symmetric: stored zero points are all half the range of codes. more: what
    is to be added to stored zero points. reordered: the inputs of a group need not be neighbours.
    """

    method: str
    block: tuple[int, int] = (128, 128)
    symmetric: bool = False
    more: int = 0
    reordered: bool = False


def read_quantization(config: dict) -> Quantization | None:
    """Reads how a config.json says that matrices are quantised; None: they are not. Errors:
    CheckpointError that names the unsupported field."""
    stated = config.get(FIELD) or config.get(_OLDER_FIELD)
    if not stated and isinstance(config.get("text_config"), dict):
        return read_quantization(config["text_config"])
    if not stated:
        return None
    if not isinstance(stated, dict):
        raise CheckpointError(f"{FIELD}: must be an object")
    fields = dict(stated)
    if _OLDER_FIELD in config:
        fields.setdefault("quant_method", "compressed-tensors")
    method = str(fields.get("quant_method"))
    if method not in METHODS:
        reason = f" ({REFUSED[method]})" if method in REFUSED else ""
        raise CheckpointError(
            f"{FIELD}: quant_method {method[:100]!r} is not supported{reason}, "
            f"only {', '.join(METHODS)}"
        )
    return METHODS[method](fields)


def _fp8(fields: dict) -> Quantization:
    _require(fields, "fmt", None, "e4m3", "float8_e4m3fn")
    return Quantization("fp8", _block(fields, "weight_block_size"))


def _mxfp4(fields: dict) -> Quantization:
    return Quantization("mxfp4")


def _compressed_tensors(fields: dict) -> Quantization:
    groups = fields.get("config_groups", {})
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        raise CheckpointError(f"{FIELD}: config_groups must be an object of objects")
    _require(fields, "transform_config", None, {})
    sparsity = fields.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense"):
        raise CheckpointError(
            f"{FIELD}: sparsity_config: format {str(sparsity['format'])[:100]!r} is not supported, "
            "only 'dense'"
        )
    for part in (fields, *groups.values()):
        _require({"quant_method": fields["quant_method"], **part}, "format", *_FORMATS)
    weights = [group.get("weights") or {} for group in groups.values()]
    blocks = [part["block_structure"] for part in weights if part.get("block_structure")]
    if len(set(map(str, blocks))) > 1:
        raise CheckpointError(f"{FIELD}: block_structure must be one for all config_groups")
    return Quantization(
        "compressed-tensors",
        _block({"block_structure": blocks[0] if blocks else None}, "block_structure"),
        reordered=any(part.get("actorder") == "group" for part in weights),
    )


def _gptq(fields: dict) -> Quantization:
    _require(fields, "bits", 2, 4, 8)
    _require(fields, "checkpoint_format", None, "", "gptq", "gptq_v2")
    second = fields.get("checkpoint_format") == "gptq_v2"
    return Quantization(
        "gptq",
        symmetric=fields.get("sym") is True and not fields.get("dynamic"),
        more=0 if second else 1,
        reordered=bool(fields.get("desc_act")),
    )


def _awq(fields: dict) -> Quantization:
    _require(fields, "bits", 4)
    _require(fields, "version", None, "gemm", "GEMM")
    _require(fields, "zero_point", None, True)
    return Quantization("awq")


def _modelopt(fields: dict) -> Quantization:
    _require(fields, "quant_algo", "FP8", "NVFP4")
    return Quantization("modelopt")


def _require(fields: dict, key: str, *values: Any) -> None:
    """Raises CheckpointError if the field has another value than these; None: it may be missing."""
    if fields.get(key) not in values:
        known = ", ".join(repr(value) for value in values if value is not None)
        raise CheckpointError(
            f"{FIELD}: {key} {str(fields.get(key))[:100]!r} is not supported with "
            f"{fields['quant_method']}, only {known}"
        )


def _block(fields: dict, key: str) -> tuple[int, int]:
    """Reads the outputs and inputs of a block."""
    value = fields.get(key)
    if value is None:
        return Quantization.block
    if not isinstance(value, list) or len(value) != 2 or not all(map(_is_count, value)):
        raise CheckpointError(f"{FIELD}: {key} must be two positive whole numbers")
    return value[0], value[1]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


METHODS: dict[str, Callable[[dict], Quantization]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "modelopt": _modelopt,
}
_FORMATS = (  # of compressed-tensors
    None,
    "dense",
    "naive-quantized",
    "int-quantized",
    "float-quantized",
    "pack-quantized",
    "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
    "mixed-precision",
)
# methods that are known and not read, and why
REFUSED = {
    "bitsandbytes": "its codes are of blocks that cross rows, so that they cannot be split over "
    "ranks; quantise the original model while loading instead",
}
