"""One prompt and what to do with it: `Request`, checked where it is made.

The engine answers it with the events of `jaxserve.api.events`.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxserve.api.errors import Range, RequestError
from jaxserve.api.sampling import SamplingParams

MAX_PROMPT_LOGPROBS = 2**20  # of all tokens of a prompt and all completions together
MAX_ID_CHARS = 256
MAX_TENANT_CHARS = 64
# reasons of errors that clients know
TOO_LONG = "context_length_exceeded"  # they shorten what they send
UNKNOWN_MODEL = "model_not_found"
KNOWN_REASONS = (TOO_LONG, UNKNOWN_MODEL)
EPHEMERAL = -1  # retention of blocks that are not stored
NORMAL_RETENTION = 0
MAX_RETENTION = 24 * 3600  # seconds
MILLISECONDS = Range(0.001, 10**12)  # of objectives and deadlines
PRIORITY = Range(-8, 8, whole=True)
RETENTION = Range(EPHEMERAL, MAX_RETENTION, whole=True)
SALT_SEPARATOR = "\x1f"  # between an adapter and a salt, which may not have it


class LookAhead(Protocol):
    """Follows a completion with proposed tokens, of which each may turn out to be wrong."""

    # the next proposed token, and a row as of `Matcher.fill`
    def fill(self, token: int, row: np.ndarray) -> None: ...


class Matcher(Protocol):
    """Follows one completion and says which tokens may come next, and how many of some proposed
    ones may, one after the other.

    done: it is complete, and no token may follow. Errors: RequestError, which ends it.
    """

    done: bool

    # int32 words of bits, token i is bit i % 32 of word i // 32
    def fill(self, row: np.ndarray) -> None: ...
    def push(self, token: int) -> None: ...
    def count_valid(self, tokens: list[int]) -> int: ...
    def ahead(self) -> LookAhead: ...


class Guide(Protocol):
    """A compiled constraint on all completions of a request."""

    def matcher(self) -> Matcher: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Slo:
    """Latency objectives of a request, in seconds: time to first token, mean time per output token,
    and `tbt`, the gap between two tokens that all but one in a hundred keep; None: that of its
    class. class_name: one of the server's classes; None: the server's own objectives."""

    ttft: float | None = None
    tpot: float | None = None
    class_name: str | None = None
    tbt: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class KvSource:
    """Another replica that has, or is just computing, the KV of a prompt's first blocks.

    address: host:port at which replicas are asked for blocks; it may have several, apart by commas,
    the first of which names it. blocks: how many it will have, of
    `block_size` tokens; 0: of as many as the asker's own. request_id: of the request there that
    computes them; "": they are there already.
    """

    address: str
    blocks: int
    request_id: str = ""
    block_size: int = 0


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Continuation:
    """Progress of a request on a replica that was lost, with which another one goes on.

    outputs: ids of the tokens of each completion that has not ended, by index, perhaps none; the
    others are not computed. first_token, last_token: clock seconds at which the first of all and
    the last of all came; None without any. weight_version: of the weights that computed them; "":
    not known.
    """

    outputs: Mapping[int, Sequence[int]]
    first_token: float | None = None
    weight_version: str = ""
    last_token: float | None = None

    def check(self, sampling: SamplingParams, vocab: int) -> None:
        """Checks that a request with this sampling can go on so. Errors: RequestError."""
        name = "continuation"
        if not self.outputs:
            raise RequestError(name, "has no completion to go on with")
        for index, ids in self.outputs.items():
            if not 0 <= index < sampling.n:
                raise RequestError(name, f"completion {index} is not in 0 to {sampling.n - 1}")
            if len(ids) >= sampling.max_tokens:
                raise RequestError(
                    name,
                    f"completion {index} has {len(ids)} tokens, max_tokens is "
                    f"{sampling.max_tokens}",
                )
            wrong = [id for id in ids if not 0 <= id < vocab]
            if wrong:
                raise RequestError(name, f"id {wrong[0]} is not in 0 to {vocab - 1}")


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RequestOptions:
    """Options of a request that mean the same at every border: in `GenerateCall`s, in `Request`s
    and in the messages between processes.

    priority: each step down halves the class's objective for the first token, each step up doubles
    it. cache_salt: prefixes are shared only by requests with equal salts. cache_retention: what
    becomes of the prompt's and the output's KV when it leaves the devices: NORMAL_RETENTION stores
    it, EPHEMERAL does not, and a number of seconds keeps it stored at least as long, although newer
    KV may have to go; requests that share KV get the strongest of their wishes (Mooncake, section
    5.2). adapter: identity of the adapter that it is computed with (see `adapter_identity`); "":
    none. session: name of the conversation, whose next turn is expected soon: see
    `scheduling.sessions`; "": none. embed: returns the prompt's embedding instead of tokens, see
    `Finished`. tenant: whose share of the replica's time it uses (`scheduling.shares`); "" where
    callers have no keys.
    """

    slo: Slo = Slo()
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    session: str = ""
    bypass_prefix_cache: bool = False
    cache_retention: int = NORMAL_RETENTION
    embed: bool = False
    tenant: str = ""

    @property
    def key_salt(self) -> str:
        """Text that stands for all that the keys of its KV cover besides tokens and model."""
        if not self.adapter:
            return self.cache_salt
        return f"{self.adapter}{SALT_SEPARATOR}{self.cache_salt}"

    def options(self) -> dict[str, Any]:
        """Returns the options by name."""
        return {field.name: getattr(self, field.name) for field in _OPTIONS}


_OPTIONS = dataclasses.fields(RequestOptions)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Request(RequestOptions):
    """One prompt and what to do with it.

    prompt: int32 token ids, not longer than the model takes. arrival, deadline: clock seconds.
    kv_source: where blocks may be fetched from instead of computing them; blocks that do not come
    are computed. continuation: from where it goes on; None: it begins. streamed: its caller gets
    tokens as they come; else all at the end. job: its prompt is computed for another replica, and
    its token reaches no user. probe: the server asks itself, to see whether tokens come: no
    traffic, which neither metrics nor the live page show.
    """

    id: str
    prompt: np.ndarray
    sampling: SamplingParams
    arrival: float = 0.0
    deadline: float | None = None
    guide: Guide | None = None
    kv_source: KvSource | None = None
    continuation: Continuation | None = None
    streamed: bool = True
    job: bool = False
    probe: bool = False

    @property
    def completions(self) -> Sequence[int]:
        """Indices of the completions to compute, ascending."""
        if self.continuation is None:
            return range(self.sampling.n)
        return sorted(self.continuation.outputs)

    def output(self, index: int) -> Sequence[int]:
        """Returns ids of the tokens that a completion has from the beginning."""
        return () if self.continuation is None else self.continuation.outputs[index]

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
        """Makes a checked request for a model with `vocab` ids and sequences of at most `max_len`
        tokens, prompt and output together, on a server with these classes of requests.

        `max_tokens` is cut to what fits. Errors: RequestError that names the field and the limit.
        """
        check_id(id)
        PRIORITY.check("priority", rest.get("priority", 0))
        RETENTION.check("cache_retention", rest.get("cache_retention", NORMAL_RETENTION))
        if SALT_SEPARATOR in rest.get("cache_salt", ""):
            raise RequestError("cache_salt", "has the control character U+001F")
        if len(rest.get("session", "")) > MAX_ID_CHARS:
            raise RequestError("session", f"is longer than {MAX_ID_CHARS} characters")
        check_tenant(rest.get("tenant", ""))
        _check_class("slo.class_name", rest.get("slo", Slo()).class_name, classes)
        tokens = prompt_ids(prompt, vocab, max_len)
        if rest.get("embed", False):
            _check_embeds(sampling, rest.get("guide"))
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
                f"{sampling.prompt_entries(len(tokens))} are too many, of {len(tokens)} tokens "
                "and for n "
                f"{sampling.n}; the limit is {MAX_PROMPT_LOGPROBS}",
            )
        room = max_len - len(tokens)
        if sampling.min_tokens > room:
            said = (
                f"{sampling.min_tokens} does not fit: the prompt has {len(tokens)} tokens, "
                f"the limit is {max_len}"
            )
            raise RequestError("min_tokens", said)
        if sampling.max_tokens > room:
            sampling = dataclasses.replace(sampling, max_tokens=room)
        continuation = rest.get("continuation")
        if continuation is not None:
            continuation.check(sampling, vocab)
        return cls(id, tokens, sampling, **rest)


def unknown_adapter(identity: str) -> RequestError:
    """Makes the error of a request for an adapter that is not loaded."""
    fault = f"the adapter {adapter_name(identity)!r:.100} is not loaded"
    return RequestError("model", fault, "NOT_FOUND", reason=UNKNOWN_MODEL)


def adapter_identity(name: str, fingerprint: str) -> str:
    """Returns what names an adapter and its weights: equal for equal ones under one name, on all
    replicas."""
    return f"{name}@{fingerprint}"


def adapter_name(identity: str) -> str:
    """Returns the name in an adapter's identity."""
    return identity.rpartition("@")[0]


def split_key_salt(key_salt: str) -> tuple[str, str]:
    """Returns the identity of the adapter ('': none) and the salt of `RequestOptions.key_salt`."""
    adapter, _, salt = key_salt.rpartition(SALT_SEPARATOR)
    return adapter, salt


def seconds_of(name: str, milliseconds: float | None) -> float | None:
    """Converts an objective or deadline in the field `name`. Errors: RequestError."""
    if milliseconds is None:
        return None
    MILLISECONDS.check(name, milliseconds)
    return milliseconds / 1000


def prompt_ids(prompt: Sequence[int] | np.ndarray, vocab: int, max_len: int) -> np.ndarray:
    """Returns a prompt as int32 ids. Errors: RequestError where it is empty, leaves no room for one
    token, or has ids out of range."""
    if len(prompt) == 0:
        raise RequestError("prompt", "is empty")
    if len(prompt) >= max_len:
        raise RequestError(
            "prompt",
            # clients look for Anthropic's words and numbers, or for OpenAI's
            f"the prompt is too long: {len(prompt)} tokens > {max_len - 1}, with one to generate: "
            f"this model's maximum context length is {max_len} tokens",
            reason=TOO_LONG,
        )
    ids = np.asarray(prompt)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestError("prompt", "must be a flat list of integers")
    low = int(ids.min())
    high = int(ids.max())
    for id in (low, high):
        if not 0 <= id < vocab:
            raise RequestError("prompt", f"id {id} is not in 0 to {vocab - 1}")
    return ids.astype(np.int32)


def another_id(id: str) -> str:
    """Returns an id for a request whose own is in use: that, and a random end."""
    return _ended_id(id, f"~{secrets.token_hex(4)}")


def check_id(id: Any) -> None:
    """Checks the id of a request. Errors: RequestError."""
    if not isinstance(id, str) or not 0 < len(id) <= MAX_ID_CHARS:
        raise RequestError("request_id", f"must be a string of 1 to {MAX_ID_CHARS} characters")


def check_tenant(tenant: Any) -> None:
    """Checks the name of a tenant. Errors: RequestError."""
    if not isinstance(tenant, str) or len(tenant) > MAX_TENANT_CHARS:
        raise RequestError("tenant", f"must be a string of at most {MAX_TENANT_CHARS} characters")


def numbered_id(id: str, number: int) -> str:
    """Returns an id for one of the requests that a caller's request with this id becomes."""
    return _ended_id(id, f"-{number}")


def _ended_id(id: str, end: str) -> str:
    return id[: MAX_ID_CHARS - len(end)] + end


def _check_embeds(sampling: SamplingParams, guide: Guide | None) -> None:
    """Checks that nothing but the embedding of a prompt is asked for. Errors: RequestError."""
    for name, given in (
        ("n", sampling.n > 1),
        ("prompt_logprobs", sampling.prompt_logprobs is not None),
        ("guided", guide is not None),
    ):
        if given:
            raise RequestError(name, "cannot be given where a prompt is embedded")


def _check_class(name: str, value: Any, known: Collection[str]) -> None:
    if value is not None and value not in known:
        there = f"known are {', '.join(known)}" if known else "there are none"
        raise RequestError(name, f"{value!r:.100} is not a class of requests here; {there}")
