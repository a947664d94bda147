"""Low-rank adapters (LoRA, Hu et al., 2021) as PEFT saves them: their config, and the parameters of
a model that they may change.

An adapter adds B A to a matrix. Of the matrices that are parts of one parameter, such as the
projections of queries, keys and values, the As lie side by side, and each B has rows of its own: so
one product has the changes of all parts. The factor whose outputs or inputs are heads or inner
states is the parameter itself in a model with another `d_model`, and is split over ranks as that
is.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.model_files import read_json
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.checkpoint.specs import Declared

CONFIG = "adapter_config.json"
MOST = 1e9  # of factors
# parameters of a layer that adapters may change -> the matrices of a checkpoint that each is of
PARTS: Mapping[str, int] = {
    "attention.qkv": 3,
    "attention.o_proj": 1,
    "attention.q_a": 1,
    "attention.q_b": 1,  # where queries have no latent
    "attention.kv_a": 1,
    "attention.qkvz": 4,
    "attention.ba": 2,
    "attention.out_proj": 1,
    "mlp.gate_up": 2,
    "mlp.down": 1,
    "mlp.shared_gate_up": 2,
    "mlp.shared_down": 1,
}
# fields of a config by which an adapter is more than changes of matrices, with the fault of each
_REFUSED = {
    "use_dora": "jaxserve does not yet support DoRA",
    "modules_to_save": "jaxserve only supports modules_to_save being None",
    "trainable_token_indices": "adapters with embeddings of tokens are not served",
    "target_parameters": "changes of parameters that are no modules are not served",
    "lora_bias": "adapters with biases of their own are not served",
    "layer_replication": "adapters that repeat layers are not served",
    "alora_invocation_tokens": "adapters that tokens switch on are not served",
    "megatron_config": "adapters of Megatron's layers are not served",
}
# ways to begin the training by which the base model is another one
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """The config of an adapter. rank, alpha: of modules that no pattern names; rank_pattern,
    alpha_pattern: of those whose names end in what matches. root: whether changes are scaled by
    alpha over the root of the rank (rsLoRA), in place of alpha over the rank."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int] = dataclasses.field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = dataclasses.field(default_factory=dict)
    root: bool = False

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module by its name."""
        return int(_matched(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Returns the factor of a module's change by its name."""
        rank = self.rank_of(module)
        alpha = _matched(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.root else rank)


def _matched(patterns: Mapping[str, float], module: str, default: float) -> float:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def read_lora_config(folder: Path) -> LoraConfig:
    """Reads an adapter's config. Errors: CheckpointError that names the field that is wrong, or
    that asks for more than changes of matrices."""
    path = folder / CONFIG
    fields = read_json(path)
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path}: must hold an object")
    kind = str(fields.get("peft_type", "")).upper()
    if kind != "LORA":
        raise CheckpointError(f"{path}: peft_type is {kind[:40] or 'missing'}; only LORA is served")
    for name, what in _REFUSED.items():
        if fields.get(name):
            raise CheckpointError(f"{path}: {name}: {what}")
    if fields.get("bias", "none") != "none":
        raise CheckpointError(f"{path}: bias: adapters that change biases are not served")
    if fields.get("fan_in_fan_out"):
        raise CheckpointError(f"{path}: fan_in_fan_out: transposed weights are not served")
    begun = str(fields.get("init_lora_weights", "")).lower()
    if begun.startswith(_CHANGES_BASE):
        raise CheckpointError(
            f"{path}: init_lora_weights: {begun[:40]} changes the base model; have PEFT convert "
            "the adapter when it is saved (path_initial_model_for_weight_conversion)"
        )
    return LoraConfig(
        _rank(path, "r", fields.get("r")),
        _number(path, "lora_alpha", fields.get("lora_alpha")),
        _patterns(path, "rank_pattern", fields, _rank),
        _patterns(path, "alpha_pattern", fields, _number),
        bool(fields.get("use_rslora")),
    )


def _patterns(path: Path, name: str, fields: Mapping[str, Any], read: Any) -> dict[str, Any]:
    patterns = fields.get(name) or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{path}: {name} must be an object")
    found = {}
    for pattern, value in patterns.items():
        if re.escape(pattern).replace(r"\.", ".") != pattern:
            raise CheckpointError(f"{path}: {name}: {pattern[:100]!r} is no name of a module")
        found[re.escape(pattern)] = read(path, f"{name}: {pattern}", value)
    return found


def _rank(path: Path, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{path}: {name} must be a whole number of at least 1")
    return value


def _number(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < MOST:
        raise CheckpointError(f"{path}: {name} must be a number below {MOST:g}")
    return float(value)


class Factors(NamedTuple):
    """The declared factors of what an adapter adds to a parameter: x @ down @ up. One of them is
    the parameter in a model whose `d_model` is `width`, the columns or rows of all its matrices'
    factors, and is split as that; the other one is whole on all devices. splits_outputs: whether
    the former is `up`."""

    down: Declared
    up: Declared
    width: int
    splits_outputs: bool

    @property
    def split(self) -> Declared:
        return self.up if self.splits_outputs else self.down

    @property
    def whole(self) -> Declared:
        return self.down if self.splits_outputs else self.up


def declare_factors(model: ModelConfig, layers: range, rank: int) -> dict[str, Factors]:
    """Declares the factors of one adapter of a rank by the paths of the parameters that it may
    change, such as 'layers.3.attention.qkv'. model: after `with_tp`."""
    found = {}
    for number in layers:
        for path, parameter in model.block(number).items():
            if path in PARTS and "embed" in parameter.axes:
                width = rank * PARTS[path]
                narrow = dataclasses.replace(model, d_model=width).block(number)[path]
                found[f"layers.{number}.{path}"] = _factors(parameter, narrow, width)
    return found


def _factors(parameter: Declared, narrow: Declared, width: int) -> Factors:
    """Declares the factors of a parameter. narrow: the same in a model of `width`."""
    if parameter.axes[0] == "embed":
        down = Declared((parameter.shape[0], width), ("embed", None))
        up = dataclasses.replace(narrow, axes=(None, *narrow.axes[1:]), inputs=0)
        return Factors(down, up, width, True)
    down = dataclasses.replace(narrow, axes=(*narrow.axes[:-1], None), inputs=0)
    up = Declared((width, parameter.shape[-1]), (None, "embed"))
    return Factors(down, up, width, False)
