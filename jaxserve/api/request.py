"""What a caller asks for and what it hears back: plain data that crosses every border of jaxserve.

A `Request` is born whole, at the door, by `Request.make`, which refuses what cannot be served with
a `RequestError` that names the field and the limit. The engine answers a request with events, in
this order: one `Accepted`, any number of `Progress`, one or more `Token` per completion, one
`Finished` per completion.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

MAX_N = 128
MAX_STOP = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 32
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 2**20  # of all tokens of a prompt and all completions together
MAX_LOGIT_BIAS = 512
MAX_ID_CHARS = 256
MAX_SEED = 2**63
MAX_PRIORITY = 8


class RequestError(ValueError):
    """A request that is refused or failed. `status` is a gRPC status name, `field` the field at
    fault ('' where none is).

    Where there is too much to do, `reason` says of what in one word, and `retry_after` in how many
    seconds it may be worth another try.
    """

    def __init__(
        self,
        field: str,
        message: str,
        status: str = "INVALID_ARGUMENT",
        retry_after: float | None = None,
        reason: str = "",
    ):
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.status = status
        self.retry_after = retry_after
        self.reason = reason

    @property
    def retry_seconds(self) -> float:
        """`retry_after`, or a second where nobody knows better."""
        return 1.0 if self.retry_after is None else self.retry_after


def internal_error() -> RequestError:
    """What callers hear of a fault of ours."""
    return RequestError("", "internal error; the server's log tells more", "INTERNAL")


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Defaults are those of the OpenAI protocol, except that `max_tokens` is
    256.

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
    seed: int | None = None  # None: drawn at the door
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
        """Checked parameters; None means the default. Errors: RequestError for an unknown field, a
        wrong type or a value out of range."""
        known = {f.name for f in dataclasses.fields(cls)}
        for name in fields:
            if name not in known:
                raise RequestError(
                    name, f"unknown sampling field; known are {', '.join(sorted(known))}"
                )
        given: dict[str, Any] = {
            k: _TUPLES[k](v) if k in _TUPLES else v for k, v in fields.items() if v is not None
        }
        params = cls(**given)
        params.check()
        return params

    def check(self) -> None:
        for name, low, high in _FLOAT_RANGES:
            _number(name, getattr(self, name), low, high)
        for name, low, high in _INT_RANGES:
            if (value := getattr(self, name)) is not None:
                _integer(name, value, low, high)
        if self.top_p == 0:
            raise RequestError("top_p", "must be above 0")
        if self.repetition_penalty == 0:
            raise RequestError("repetition_penalty", "must be above 0")
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                "min_tokens", f"{self.min_tokens} is above max_tokens {self.max_tokens}"
            )
        if not isinstance(self.ignore_eos, bool):
            raise RequestError("ignore_eos", f"must be true or false, not {self.ignore_eos!r}")
        _limit("stop", self.stop, MAX_STOP)
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARS:
                raise RequestError(
                    "stop", f"each entry must be a string of 1 to {MAX_STOP_CHARS} characters"
                )
        _limit("stop_token_ids", self.stop_token_ids, MAX_STOP_IDS)
        _limit("logit_bias", self.logit_bias, MAX_LOGIT_BIAS)
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)
        for token, bias in self.logit_bias:
            _integer("logit_bias", token, 0, 2**31 - 1)
            _number("logit_bias", bias, -100, 100)

    @property
    def greedy(self) -> bool:
        """Whether argmax of the model's own logits decides."""
        plain = (
            self.repetition_penalty == 1
            and self.presence_penalty == 0
            and self.frequency_penalty == 0
            and not self.logit_bias
        )
        return self.temperature == 0 and plain and self.min_tokens == 0

    def prompt_entries(self, tokens: int) -> int:
        """Log-probabilities of a prompt of so many tokens, in all completions."""
        return 0 if self.prompt_logprobs is None else tokens * self.n * (1 + self.prompt_logprobs)


class Matcher(Protocol):
    """Says which tokens one completion may go on with. `done`: with none, it is complete. Errors:
    RequestError, which ends it."""

    done: bool

    # int32 words of bits, token i is bit i % 32 of word i // 32
    def fill(self, row: np.ndarray) -> None: ...
    def push(self, token: int) -> None: ...


class Guide(Protocol):
    """How all completions of a request must look."""

    def matcher(self) -> Matcher: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Slo:
    """Latency objectives in seconds: time to first token, time per output token; None: that of the
    class, one of those the server has. class_name None: the server's own objectives, without a
    class."""

    ttft: float | None = None
    tpot: float | None = None
    class_name: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt and what to do with it. `prompt` is int32, its length fits the model; `arrival`
    and `deadline` are clock seconds.

    priority: each step down halves the class's objective for the first token, each step up doubles
    it.
    """

    id: str
    prompt: np.ndarray
    sampling: SamplingParams
    arrival: float = 0.0
    deadline: float | None = None
    slo: Slo = Slo()
    priority: int = 0
    cache_salt: str = ""
    bypass_prefix_cache: bool = False
    guide: Guide | None = None

    @classmethod
    def make(
        cls,
        id: str,
        prompt: Sequence[int] | np.ndarray,
        sampling: SamplingParams,
        *,
        vocab: int,
        max_len: int,
        classes: Collection[str] = (),
        **rest: Any,
    ) -> Request:
        """A checked request for a model of `vocab` tokens that holds `max_len` tokens a sequence,
        prompt and output together, on a server that knows these classes of requests.

        `max_tokens` is cut to what the model has room for. Errors: RequestError.
        """
        if not isinstance(id, str) or not 0 < len(id) <= MAX_ID_CHARS:
            raise RequestError("request_id", f"must be a string of 1 to {MAX_ID_CHARS} characters")
        _integer("priority", rest.get("priority", 0), -MAX_PRIORITY, MAX_PRIORITY)
        _class("slo.class_name", rest.get("slo", Slo()).class_name, classes)
        tokens = prompt_ids(prompt, vocab, max_len)
        for name, ids in (
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", [token for token, _ in sampling.logit_bias]),
        ):
            for token in ids:
                if token >= vocab:
                    raise RequestError(name, f"id {token} is not below the vocabulary size {vocab}")
        if sampling.min_tokens and rest.get("guide") is not None:
            raise RequestError(
                "min_tokens",
                "cannot be given with a guide, which says itself when a completion ends",
            )
        if sampling.prompt_entries(len(tokens)) > MAX_PROMPT_LOGPROBS:
            raise RequestError(
                "prompt_logprobs",
                f"{sampling.prompt_entries(len(tokens))} are too many, of {len(tokens)} tokens and for n "
                f"{sampling.n}; the limit is {MAX_PROMPT_LOGPROBS}",
            )
        room = max_len - len(tokens)
        if sampling.min_tokens > room:
            said = f"{sampling.min_tokens} does not fit: the prompt has {len(tokens)} tokens, the limit is {max_len}"
            raise RequestError("min_tokens", said)
        if sampling.max_tokens > room:
            sampling = dataclasses.replace(sampling, max_tokens=room)
        return cls(id, tokens, sampling, **rest)


def prompt_ids(prompt: Sequence[int] | np.ndarray, vocab: int, max_len: int) -> np.ndarray:
    """int32 ids of a prompt that leaves room for one token. Errors: RequestError where it is empty,
    too long, or has ids out of range."""
    if len(prompt) == 0:
        raise RequestError("prompt", "is empty")
    if len(prompt) >= max_len:
        raise RequestError(
            "prompt",
            f"has {len(prompt)} tokens; with one token to generate the limit is {max_len - 1}",
        )
    ids = np.asarray(prompt)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestError("prompt_ids", "must be a flat list of integers")
    low = int(ids.min())
    high = int(ids.max())
    if low < 0 or high >= vocab:
        raise RequestError(
            "prompt_ids", f"id {low if low < 0 else high} is not in 0 to {vocab - 1}"
        )
    return ids.astype(np.int32)


@dataclasses.dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural-log probabilities of one token and of the likeliest ones, likeliest first."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    prompt: int
    cached: int  # prompt tokens whose KV was reused
    completion: int


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Seconds since arrival: when the first chunk started, the first token came, the completion
    ended (also of what did not come)."""

    queued: float
    first_token: float
    total: float

    def tpot(self, completion: int) -> float:
        """Mean seconds per token after the first of so many; 0 where there is none."""
        return (self.total - self.first_token) / (completion - 1) if completion > 1 else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Accepted:
    """predicted_ttft: seconds from arrival to the first token, as the queue stands; what comes
    later may go before it."""

    queue_position: int
    predicted_ttft: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    index: int  # which of the n completions
    prefilled: int
    total: int
    ttft: float = 0.0  # predicted seconds from arrival to the first token, at the pace so far


@dataclasses.dataclass(frozen=True, slots=True)
class Token:
    index: int
    id: int
    logprobs: Logprobs | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """The end of one completion. reason: stop (end token, stop id, end of the guide), length,
    cancelled, deadline, or error (then `error` says which)."""

    index: int
    reason: str
    usage: Usage
    timing: Timing
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    error: RequestError | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token; None where none came."""
        return self.timing.first_token if self.usage.completion else None

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None where there is none."""
        return self.timing.tpot(self.usage.completion) if self.usage.completion > 1 else None


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """A request as a whole. Seconds since arrival: when its first chunk started, its first token
    came (None: none came), its last completion ended. tpot: of its slowest completion; None where
    none has two tokens. cached: tokens of its prompt; output: of all completions."""

    queued: float
    ttft: float | None
    total: float
    tpot: float | None
    cached: int
    output: int

    @classmethod
    def of(cls, ends: Sequence[Finished]) -> Summary:
        """ends: of at least one of its completions."""
        ttfts, tpots = [
            [value for value in values if value is not None]
            for values in zip(*((end.ttft, end.tpot) for end in ends))
        ]
        return cls(
            min(end.timing.queued for end in ends),
            min(ttfts, default=None),
            max(end.timing.total for end in ends),
            max(tpots, default=None),
            max(end.usage.cached for end in ends),
            sum(end.usage.completion for end in ends),
        )

    @property
    def prefill(self) -> float:
        """Seconds from the first chunk to the first token, or to the end where none came."""
        return (self.total if self.ttft is None else self.ttft) - self.queued

    @property
    def decode(self) -> float:
        """Seconds from the first token to the end."""
        return self.total - self.queued - self.prefill


Event = Accepted | Progress | Token | Finished


def _strings(value: Any) -> tuple:
    return (value,) if isinstance(value, str) else _listed("stop", value)


def _listed(name: str, value: Any) -> tuple:
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise RequestError(name, f"must be a list, not {value!r}")
    return tuple(value)


def _bias(value: Any) -> tuple:
    pairs = value.items() if isinstance(value, Mapping) else value
    try:
        return tuple((int(token), bias) for token, bias in pairs)
    except (TypeError, ValueError):
        raise RequestError("logit_bias", "must map token ids to numbers") from None


_TUPLES = {
    "stop": _strings,
    "stop_token_ids": lambda value: _listed("stop_token_ids", value),
    "logit_bias": _bias,
}
_FLOAT_RANGES = (
    ("temperature", 0, 100),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("repetition_penalty", 0, 100),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
)
_INT_RANGES = (
    ("top_k", -1, 2**31 - 1),
    ("seed", -MAX_SEED, MAX_SEED - 1),
    ("n", 1, MAX_N),
    ("max_tokens", 1, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)


def _number(name: str, value: Any, low: float, high: float) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or not low <= value <= high
    ):
        raise RequestError(name, f"must be a number from {low} to {high}, not {value!r}")


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, np.integer))
        or not low <= value <= high
    ):
        raise RequestError(name, f"must be a whole number from {low} to {high}, not {value!r}")


def _class(name: str, value: Any, known: Collection[str]) -> None:
    if value is not None and value not in known:
        there = f"known are {', '.join(known)}" if known else "there are none"
        raise RequestError(name, f"{value!r:.100} is not a class of requests here; {there}")


def _limit(name: str, value: tuple, most: int) -> None:
    if len(value) > most:
        raise RequestError(name, f"has {len(value)} entries; the limit is {most}")
