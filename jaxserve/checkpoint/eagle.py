"""`EagleConfig`: what the config.json of an EAGLE-3 draft head says (Li et al., 2025).

Two layouts are read: that of the authors, which SGLang and NVIDIA write too (`midlayer`), and that
of vLLM's speculators (`transformer_layer_config`). Layers are named by what comes out of them where
the first named is 1, as NVIDIA and SGLang do, else by what goes into them, as vLLM does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxserve.checkpoint.fields import SLIDING, Fields
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.checkpoint.rope import Rope
from jaxserve.checkpoint.rope_fields import check_heads, read_ropes
from jaxserve.checkpoint.specs import Dimensions

ARCHITECTURES = (
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLMEagle3",
    "Eagle3Speculator",
    "Eagle3DraftModel",
)
CAPTURED = "eagle_aux_hidden_state_layer_ids"
FEATURES = 3  # layers whose hidden states a head takes
LEAST_LAYERS = 6  # of a model whose layers are chosen by default
OWN = "LlamaForCausalLM"  # as the authors' own heads are named, which have a draft vocabulary
# fields that change the mathematics, and their only values
_WANTED: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "norm_before_fc": False,
    "norm_output": False,
    "fc_norm": False,
}


@dataclass(frozen=True)
class EagleConfig(Dimensions):
    """A draft head: one layer of a decoder, whose attention sees embeddings and features side by
    side. vocab: ids of the model; draft_vocab: those that it can propose. captured: layers of the
    model before which hidden states are its features; None: not stated. norm_first: what is added
    to the layer's output is normalised features, not those themselves."""

    draft_vocab: int
    eps: float
    rope: Rope
    captured: tuple[int, ...] | None
    norm_first: bool

    def layers_of(self, model: ModelConfig) -> tuple[int, ...]:
        """Returns the layers of a model before which hidden states are captured. Errors:
        CheckpointError for a head of another model."""
        for name, ours, its in (
            ("hidden_size", self.d_model, model.d_model),
            ("vocab_size", self.vocab, model.vocab),
        ):
            if ours != its:
                raise CheckpointError(f"{name}: {ours} in the head, {its} in {model.name}")
        layers = self.captured
        if layers is None:
            if model.layers < LEAST_LAYERS:
                raise CheckpointError(
                    f"{CAPTURED}: is missing, and {model.name} has only {model.layers} layers"
                )
            layers = (2, model.layers // 2, model.layers - 3)
        if not all(0 <= layer <= model.layers for layer in layers):
            raise CheckpointError(
                f"{CAPTURED}: {list(layers)} are not all up to {model.layers}, the layers of "
                f"{model.name}"
            )
        return layers


def eagle_config(config: dict) -> EagleConfig:
    """Reads the config.json of a head. Errors: CheckpointError that names the field."""
    names = config.get("architectures")
    known = {*ARCHITECTURES}
    if "draft_vocab_size" in config:
        known.add(OWN)
    if not isinstance(names, list) or not known.intersection(map(str, names)):
        raise CheckpointError(
            f"architectures: {str(names)[:200]} is no EAGLE-3 head; these are: "
            f"{', '.join(ARCHITECTURES)}"
        )
    whole = config | _object(config, "eagle_config")
    layer = config | _object(config, "transformer_layer_config")
    for name, wanted in _WANTED.items():
        for given in (layer.get(name), whole.get(name)):
            if given not in (wanted, None):
                raise CheckpointError(f"{name}: {given!r} is not supported, only {wanted!r}")
    if SLIDING in (layer.get("layer_types") or ()):
        raise CheckpointError(f"layer_types: {SLIDING} is not supported in draft heads")
    fields = Fields({"rope_theta": 10000.0, "max_position_embeddings": 2048} | layer)
    d_model = fields.count("hidden_size")
    heads = fields.count("num_attention_heads")
    max_len = fields.count("max_position_embeddings")
    vocab = fields.count("vocab_size")
    (rope,) = read_ropes(fields.fields, None, max_len, "")
    head = EagleConfig(
        name=str(config.get("_name_or_path") or names[0]),
        layers=1,
        d_model=d_model,
        heads=heads,
        kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=fields.count("head_dim", d_model // heads),
        d_ff=fields.count("intermediate_size"),
        vocab=vocab,
        draft_vocab=Fields(whole).count("draft_vocab_size", vocab, high=vocab),
        max_len=max_len,
        eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        captured=_captured(whole.get(CAPTURED)),
        norm_first=bool(whole.get("norm_before_residual", "transformer_layer_config" in config)),
    )
    check_heads(head, [rope])
    return head


def _object(config: dict, name: str) -> dict:
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{name}: must be an object")
    return value


def _captured(value: Any) -> tuple[int, ...] | None:
    """Reads the numbers of layers. Errors: CheckpointError."""
    if value is None or value == []:
        return None
    is_numbers = isinstance(value, list) and all(type(number) is int for number in value)
    if not is_numbers or sorted({*value}) != value or len(value) != FEATURES:
        raise CheckpointError(f"{CAPTURED}: must be {FEATURES} numbers of layers that rise")
    outputs = value[0] == 1
    return tuple(number + outputs for number in value)
