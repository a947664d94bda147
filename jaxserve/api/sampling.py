"""`SamplingParams`, the choice of a completion's tokens, checked where they are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jaxserve.api.errors import Range, RequestError, check_length

MAX_N = 128
MAX_STOP = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 32
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 512
MAX_WRONG_SHOWN = 8  # of a field's wrong entries, in an error
MAX_SEED = 2**63
MAX_INT32 = 2**31 - 1
TOKEN_ID = Range(0, MAX_INT32, whole=True)
BIAS = Range(-100, 100)
RANGES: Mapping[str, Range] = {  # by field
    "temperature": Range(0, 100),
    "top_p": Range(0, 1, above=True),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, 100, above=True),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "top_k": Range(-1, MAX_INT32, whole=True),
    "seed": Range(-MAX_SEED, MAX_SEED - 1, whole=True),
    "n": Range(1, MAX_N, whole=True),
    "max_tokens": Range(1, MAX_INT32, whole=True),
    "min_tokens": Range(0, MAX_INT32, whole=True),
    "logprobs": Range(0, MAX_LOGPROBS, whole=True),
    "prompt_logprobs": Range(0, MAX_LOGPROBS, whole=True),
}
_OPTIONAL = ("seed", "logprobs", "prompt_logprobs")  # None: none is wanted


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """The choice of a completion's tokens. Defaults are those of the OpenAI protocol, except
    that `max_tokens` is 256.

    Order: logit bias and penalties, then temperature, top_k, top_p, min_p. Logprobs are those of
    the model, before all of these.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None  # None: a random one
    n: int = 1
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: of the chosen token and of the k likeliest
    prompt_logprobs: int | None = None

    @classmethod
    def make(cls, **fields: Any) -> SamplingParams:
        """Makes checked parameters; None means the default. Errors: RequestError for an unknown
        field, a wrong type or a value out of range."""
        known = {f.name for f in dataclasses.fields(cls)}
        for name in fields:
            if name not in known:
                raise RequestError(
                    name, f"unknown sampling field; known are {', '.join(sorted(known))}"
                )
        given: dict[str, Any] = {
            name: _TUPLES.get(name, _as_is)(value)
            for name, value in fields.items()
            if value is not None
        }
        params = cls(**given)
        params.check()
        return params

    def check(self) -> None:
        """Refuses wrong types and values out of range. Errors: RequestError that names the
        field."""
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                allowed.check(name, value)
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                "min_tokens", f"{self.min_tokens} is above max_tokens {self.max_tokens}"
            )
        if not isinstance(self.ignore_eos, bool):
            raise RequestError("ignore_eos", f"must be true or false, not {self.ignore_eos!r}")
        check_length("stop", self.stop, MAX_STOP)
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARS:
                raise RequestError(
                    "stop", f"each entry must be a string of 1 to {MAX_STOP_CHARS} characters"
                )
        check_length("stop_token_ids", self.stop_token_ids, MAX_STOP_IDS)
        check_length("logit_bias", self.logit_bias, MAX_LOGIT_BIAS)
        for token in self.stop_token_ids:
            TOKEN_ID.check("stop_token_ids", token)
        for token, bias in self.logit_bias:
            TOKEN_ID.check("logit_bias", token)
            BIAS.check("logit_bias", bias)

    @property
    def greedy(self) -> bool:
        """True if each token is the argmax of the model's own logits."""
        return self.temperature == 0 and not self.adjusts_logits

    @property
    def adjusts_logits(self) -> bool:
        """True if logits depend on more than the model: penalties, biases, ids that are held
        back."""
        plain = (
            self.repetition_penalty == 1
            and self.presence_penalty == 0
            and self.frequency_penalty == 0
            and not self.logit_bias
        )
        return not plain or self.min_tokens > 0

    def prompt_entries(self, tokens: int) -> int:
        """Returns the number of log-probabilities of a prompt of `tokens` tokens, in all
        completions."""
        if self.prompt_logprobs is None:
            return 0
        return tokens * self.n * (1 + self.prompt_logprobs)


def _as_is(value: Any) -> Any:
    return value


def _strings(value: Any) -> tuple:
    if isinstance(value, str):
        return (value,)
    return _listed("stop", value)


def _listed(name: str, value: Any) -> tuple:
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise RequestError(name, f"must be a list, not {value!r}")
    return tuple(value)


def _bias(value: Any) -> tuple:
    given = value.items() if isinstance(value, Mapping) else value
    try:
        pairs = [(id, bias) for id, bias in given]
    except (TypeError, ValueError):
        raise RequestError("logit_bias", "must map token ids to numbers") from None
    wrong = [f"{id!a:.50}" for id, _ in pairs if not _is_whole(id)]
    if wrong:
        raise RequestError("logit_bias", f"no token ids: {', '.join(wrong[:MAX_WRONG_SHOWN])}")
    return tuple((int(id), bias) for id, bias in pairs)


def _is_whole(value: Any) -> bool:
    try:
        int(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


_TUPLES = {
    "stop": _strings,
    "stop_token_ids": lambda value: _listed("stop_token_ids", value),
    "logit_bias": _bias,
}
