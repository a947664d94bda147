"""Flags for the sampling parameters, made from the fields of `SamplingParams`."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.api.sampling import SamplingParams
from jaxserve.settings.options import Option

HELP = {
    "temperature": "0: greedy, the likeliest token each time",
    "top_k": "sample among this many likeliest tokens; 0: all",
    "top_p": "sample among the likeliest tokens that together have this probability",
    "min_p": "smallest probability of a token, as a share of that of the likeliest one",
    "repetition_penalty": "divides the logits of tokens of the prompt and the output",
    "presence_penalty": "is subtracted from the logits of tokens of the output",
    "frequency_penalty": "the same, for each time the token occurs",
    "logit_bias": "added to the logits of tokens, as ID=BIAS,ID=BIAS",
    "seed": "equal seeds give equal tokens; default: a random one",
    "n": "completions of each prompt",
    "max_tokens": "largest number of tokens in a completion",
    "min_tokens": "tokens before a completion may end",
    "stop": "ends a completion before this text; may be repeated",
    "stop_token_ids": "ends a completion after one of these tokens, as ID,ID",
    "ignore_eos": "go on after the end token",
    "logprobs": "return log-probabilities of the tokens and of this many likeliest ones",
    "prompt_logprobs": "the same for the prompt",
}
NAMES = tuple(HELP)
_LISTS = {"stop": (tuple, ()), "stop_token_ids": (str, None), "logit_bias": (str, None)}


def sampling_options(**defaults: Any) -> list[Option]:
    """Returns a flag for each field; defaults: those that differ from the field's."""
    hints = typing.get_type_hints(SamplingParams)
    options = []
    for field in dataclasses.fields(SamplingParams):
        (kind, *_) = typing.get_args(hints[field.name]) or (hints[field.name],)
        kind, default = _LISTS.get(field.name, (kind, field.default))
        options.append(
            Option(field.name, kind, defaults.get(field.name, default), HELP[field.name])
        )
    return options


def sampling_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the flags' values as fields of `SamplingParams.make`. Errors: RequestError."""
    fields = {name: values[name] for name in NAMES if values[name] not in (None, [])}
    if "stop_token_ids" in fields:
        fields["stop_token_ids"] = [
            _number("stop_token_ids", int, text) for text in fields["stop_token_ids"].split(",")
        ]
    if "logit_bias" in fields:
        pairs = (pair.partition("=") for pair in fields["logit_bias"].split(","))
        fields["logit_bias"] = {
            _number("logit_bias", int, id): _number("logit_bias", float, bias)
            for id, _, bias in pairs
        }
    return fields


def _number(name: str, kind: type, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise RequestError(name, f"{text!r} is not a number") from None
