"""Converts a Hugging Face config.json to a `ModelConfig` and back, by the rows of
`families.FAMILIES`.

A config that asks for anything that the decoder does not support is refused here, before a weight
is read. Nothing in it is executed; `auto_map`, which names code, is ignored.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.checkpoint.families import FAMILIES, REFUSED, Family
from jaxserve.checkpoint.fields import FULL, Fields, token_ids
from jaxserve.checkpoint.generation_config import FILE, usable_sampling
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.checkpoint.quantization import read_quantization
from jaxserve.checkpoint.rope import RopeScaling
from jaxserve.checkpoint.rope_fields import WHOLE, check_heads, read_ropes, write_ropes
from jaxserve.checkpoint.specs import MlpSpec, NormSpec

MAX_LAYERS = 10_000  # so that listing every tensor of a made-up config ends soon
_PARTIAL = "partial_rotary_factor"
# fields of config.json where neither a config nor its family states them
_DEFAULTS = {"max_position_embeddings": 32768, "rope_theta": 10000.0, "rms_norm_eps": 1e-6}
# fields that change the mathematics, and their only values in families that do not read them
_WANTED: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    _PARTIAL: WHOLE,
    "use_bidirectional_attention": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "no_rope_layers": [],
    "clip_qkv": None,
    "attention_chunk_size": None,
    "use_qk_norm": False,
    "attn_output_gate": False,
    "rope_interleave": True,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
# null means that there is none, not the default
_MAY_BE_NULL = {"sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}


def from_hf(
    config: dict, generation: dict | None = None, name: str = "", tokenizer_eos: int | None = None
) -> ModelConfig:
    """Converts config.json (and generation_config.json) to a ModelConfig.

    name: of the model, if the config has none to prefer. tokenizer_eos: the id of the tokenizer's
    eos_token. A completion ends at any id that one of the three calls an end. Errors:
    CheckpointError that names the unsupported field.
    """
    generation = generation or {}
    whole = config
    read_quantization(whole)
    config = _text_part(whole)
    key = _family_of(config)
    family = FAMILIES[key]
    config = _completed(config, family)
    fields = Fields(config)
    layers = fields.count("num_hidden_layers", high=MAX_LAYERS)
    heads = fields.count("num_attention_heads")
    max_len = fields.count("max_position_embeddings")
    types = fields.layer_types(layers, family.layer_types)
    ropes = read_ropes(config, types, max_len, family.local_rope)
    d_model = fields.count("hidden_size")
    vocab = fields.count("vocab_size")
    model = ModelConfig(
        name=name or str(config.get("_name_or_path") or family.architecture),
        family=key,
        layers=layers,
        d_model=d_model,
        heads=heads,
        kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=fields.count("head_dim", d_model // heads),
        d_ff=fields.count("intermediate_size"),
        vocab=vocab,
        max_len=max(_served_len(max_len, rope.scaling) for rope in ropes),
        ropes=ropes,
        tied=bool(config.get("tie_word_embeddings", False)),
        eos_ids=token_ids(
            vocab,
            {
                f"{FILE}: eos_token_id": generation.get("eos_token_id"),
                f"{FILE}: stop_token_ids": generation.get("stop_token_ids"),
                "config.json: eos_token_id": whole.get("eos_token_id"),
                "text_config: eos_token_id": (whole.get("text_config") or {}).get("eos_token_id"),
                "the tokenizer's eos_token": tokenizer_eos,
            },
        ),
        bos_id=_first(vocab, "config.json: bos_token_id", config.get("bos_token_id")),
        sampling=usable_sampling(FILE, generation),
        stored=_stored(config),
        **_specs(family, fields.number("rms_norm_eps")),
    )
    for part in family.parts:
        model = part.read(fields, model)
    if any(rope.share != WHOLE for rope in ropes) and _PARTIAL not in family.allowed:
        raise CheckpointError(f"{_PARTIAL}: {ropes[0].share!r} is not supported")
    check_heads(model, model.ropes)
    return model


def to_hf(model: ModelConfig) -> dict:
    """Converts a ModelConfig to a config.json from which `from_hf` gives the same ModelConfig."""
    family = FAMILIES[model.family]
    common = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "_name_or_path": model.name,
        "hidden_act": model.mlp(0).activation,
        "num_hidden_layers": model.layers,
        "hidden_size": model.d_model,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.d_ff,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.max_len,
        **write_ropes(model),
        "rms_norm_eps": model.norms.eps,
        "tie_word_embeddings": model.tied,
        "eos_token_id": list(model.eos_ids),
        "bos_token_id": model.bos_id,
        "torch_dtype": model.stored,
    }
    for part in family.parts:
        common |= part.write(model)
    return common


def _family_of(config: dict) -> str:
    """Returns the key of the family that the config names. Errors: CheckpointError if it is not
    supported, or if the config asks for something that the decoder does not support."""
    key = _named_family(config)
    if key is None:
        known = ", ".join(family.architecture for family in FAMILIES.values())
        names = str(config.get("architectures")).strip("[]")[:200]
        for name, reason in REFUSED.items():
            if repr(name) in names:
                raise CheckpointError(f"architecture {names} is not supported: {reason}")
        raise CheckpointError(
            f"architecture {names} is not supported (auto_map is never run); these are: {known}"
        )
    family = FAMILIES[key]
    activation = family.specs.get("mlps", (MlpSpec(),))[0].activation
    wanted = _WANTED | {"hidden_act": activation, "hidden_activation": activation}
    for name, value in wanted.items():
        if name not in family.allowed and config.get(name) not in (value, None):
            raise CheckpointError(
                f"{name}: {config[name]!r} is not supported with {family.architecture}, "
                f"only {value!r}"
            )
    return key


def _named_family(config: dict) -> str | None:
    """Returns the key of the first known family in `architectures`, also by the name of its models
    without a head; where that is missing, of `model_type`."""
    by_name = {family.architecture: key for key, family in FAMILIES.items()}
    by_name |= {name: key for key, family in FAMILIES.items() for name in family.multimodal}
    bodies = {name.replace("ForCausalLM", "Model"): key for name, key in by_name.items()}
    types = {family.model_type: key for key, family in FAMILIES.items()}
    names, known = config.get("architectures"), bodies | by_name
    if not names:
        kind = str(config.get("model_type")).removesuffix("_text").replace("_", "")
        names, known = [kind], types
    if not isinstance(names, list):
        return None
    return next((known[name] for name in names if isinstance(name, str) and name in known), None)


def _text_part(config: dict) -> dict:
    """Returns the config of the text part of a multimodal one, with what both share; any other as
    it is."""
    text = config.get("text_config")
    if text is None:
        return config
    if not isinstance(text, dict):
        raise CheckpointError("text_config: must be an object")
    own = {key: value for key, value in text.items() if value is not None}
    return config | own | {"architectures": config.get("architectures")}


def _completed(config: dict, family: Family) -> dict:
    """Returns the config with the fields that it leaves to the defaults of its family."""
    defaults = {**_DEFAULTS, **family.defaults}
    config = config | {
        key: value
        for key, value in defaults.items()
        if config.get(key) is None and not (key in config and key in _MAY_BE_NULL)
    }
    if config.get("rotary_dim") and config.get(_PARTIAL) is None:  # MiniMax M2
        fields = Fields(config)
        share = fields.count("rotary_dim") / fields.count("head_dim")
        config = config | {_PARTIAL: share}
    every = family.full_every
    if every and config.get("layer_types") is None:
        fields = Fields(config)
        layers = fields.count("num_hidden_layers", high=MAX_LAYERS)
        for name in ("sliding_window_pattern", "full_attention_interval"):
            every = fields.count(name, every)
        (other,) = family.layer_types - {FULL}
        types = [FULL if (i + 1) % every == 0 else other for i in range(layers)]
        config = config | {"layer_types": types}
    return config


def _specs(family: Family, eps: float) -> dict[str, Any]:
    """Returns the specs of a family's models, with the epsilon of one."""
    norms = family.specs.get("norms", NormSpec())
    return family.specs | {"norms": dataclasses.replace(norms, eps=eps)}


def _stored(config: dict) -> str:
    """Returns the type of the weights; bfloat16 for unknown ones."""
    stored = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    if stored in ("float32", "float16"):
        return stored
    return "bfloat16"


def _served_len(max_len: int, scaling: RopeScaling | None) -> int:
    """Returns the most tokens of a sequence; YaRN configs may state the length before scaling."""
    if scaling is None or scaling.kind != "yarn":
        return max_len
    return max(max_len, int(scaling.factor * scaling.original_max_len))


def _first(vocab: int, name: str, value: Any) -> int | None:
    return next(iter(token_ids(vocab, {name: value})), None)
