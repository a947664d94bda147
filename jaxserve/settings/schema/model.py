"""Settings of the model: where its weights are, and in which type they are held."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.settings.fields import Settings, option


@dataclass(frozen=True)
class ModelSource(Settings):
    """The model that a replica loads."""

    model: str = option(
        "smollm2-135m",
        "model: a fetched name, a folder (safetensors, orbax), a .gguf file, a hub id, or "
        "random:NAME",
    )
    dtype: str = option(
        "float32", "type of weights and KV", choices=("float32", "bfloat16", "float16")
    )
    max_model_len: int | None = option(
        None,
        "largest number of tokens in a sequence, prompt and output; default: the model's own limit",
        low=2,
    )
