"""Settings of the model: where its weights are, and in which type they are held."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.api.errors import ConfigError
from jaxserve.settings.fields import Settings, option

QUANTIZATIONS = ("auto", "none", "int8", "fp8")


@dataclass(frozen=True)
class ModelSource(Settings):
    """The model that a replica loads."""

    model: str = option(
        "smollm2-135m",
        "model: a fetched name, a folder (safetensors, orbax), a .gguf file, a hub id "
        "(ORGANISATION/MODEL), or random:NAME",
    )
    revision: str | None = option(
        None, "branch, tag or commit of a model given by a hub id; default: main"
    )
    dtype: str = option(
        "auto",
        "type of weights and KV; auto: float32 on CPUs, elsewhere that of the checkpoint",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = option(
        "auto",
        "weights on devices; auto: as the checkpoint has them, also quantised where the platform "
        "multiplies by such; none: dequantised to dtype; int8, fp8: matrices of layers that the "
        "checkpoint has in floats are quantised while they are loaded",
        choices=QUANTIZATIONS,
    )
    max_model_len: int | None = option(
        None,
        "largest number of tokens in a sequence, prompt and output; default: the model's own limit",
        low=2,
    )
    enable_expert_parallel: bool = option(
        False,
        "split the experts of mixtures over lanes as well as ranks: less memory and fewer weights "
        "read by a device, but every lane gets the tokens of all",
    )
    ffn_over_lanes: bool = option(
        False,
        "split MLPs, and the experts of mixtures, over lanes as well as ranks: a lane that decodes "
        "long contexts reads its part of their weights in place of all, and gets the tokens of all "
        "lanes",
    )
    generation_config: str = option(
        "auto",
        "where the sampling parameters stand that requests have unless they state them: in the "
        "model's generation_config.json (auto), in that of another folder, or nowhere (none, vllm)",
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "name by which requests call the model, answers have the first one; of several models one "
        "for each, in their order; default: model",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if "" in self.served_model_name:
            raise ConfigError("served_model_name", "a name is empty")
