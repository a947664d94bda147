"""Sampling parameters that a model's makers recommend: defaults of requests that do not state them,
as in vLLM.

They stand in generation_config.json, or in a GGUF file under general.sampling; the setting
`generation_config` may name another folder, or none. `do_sample` and `max_length` have no effect,
as in vLLM: a request without a temperature is sampled, and is as long as its protocol says.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.api.sampling import RANGES
from jaxserve.checkpoint.model_files import notes, read_object
from jaxserve.checkpoint.model_paths import CheckpointError, reason
from jaxserve.settings.schema import ConfigError, ModelSource

FILE = "generation_config.json"
AUTO = "auto"
OFF = ("none", "vllm")
Sampling = tuple[tuple[str, float], ...]  # values by the names of `SamplingParams`
_FILE_NAMES = {  # in generation_config.json -> of `SamplingParams`
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_GGUF_NAMES = {  # in GGUF files -> of `SamplingParams`
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def generation_fields(folder: Path) -> dict[str, Any]:
    """Reads generation_config.json; one that cannot be read is left out, and said."""
    try:
        return read_object(folder / FILE)
    except CheckpointError as error:
        notes.warning(f"left out: {reason(error)}")
        return {}


def sampling_defaults(source: ModelSource, recommended: Sampling = ()) -> dict[str, float]:
    """Returns the sampling parameters that requests have unless they state them. recommended: those
    of the checkpoint. Errors: ConfigError for a folder without generation_config.json;
    CheckpointError."""
    chosen = source.generation_config
    if chosen in OFF:
        return {}
    if chosen == AUTO:
        return dict(recommended)
    file = Path(chosen).expanduser() / FILE
    if not file.is_file():
        names = ", ".join((AUTO, *OFF))
        raise ConfigError(
            "generation_config", f"{chosen!r} is neither {names} nor a folder with {FILE}"
        )
    return dict(usable_sampling(str(file), read_object(file)))


def usable_sampling(place: str, fields: Mapping[str, Any]) -> Sampling:
    """Returns the sampling parameters among the fields of a file; values out of range are left out,
    and said. place: the name of the file."""
    usable = []
    for key, name in (_FILE_NAMES | _GGUF_NAMES).items():
        value = fields.get(key)
        if value is None:
            continue
        try:
            RANGES[name].check(key, value)
        except RequestError as error:
            notes.warning(f"{place}: left out of the sampling defaults: {error}")
            continue
        usable.append((name, value))
    return tuple(usable)


def file_fields(sampling: Sampling) -> dict[str, float]:
    """Returns sampling parameters as the fields of a generation_config.json."""
    values = dict(sampling)
    return {key: values[name] for key, name in _FILE_NAMES.items() if name in values}
