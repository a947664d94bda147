"""What callers may send. A field that is unknown here is refused: who sends it would else believe
that it has an effect.

Beside the OpenAI protocol's own fields there are those that vLLM made common (top_k, min_p, ...)
and ours: objectives, salts, priorities. Limits of values are `SamplingParams`'s and `Request`'s,
the same for every protocol.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, WithJsonSchema

from jaxserve.api.errors import RequestError
from jaxserve.api.request import Slo
from jaxserve.api.sampling import SamplingParams
from jaxserve.server.http_app import StrictModel
from jaxserve.text.structured_output import Guided

MAX_PROMPTS = 128  # of one request
COMPLETION_TOKENS = 16  # the protocol's default where a completion has no max_tokens
ROOM = 2**31 - 1  # tokens: as many as the model has room for
_IDS = {"type": "array", "items": {"type": "integer"}}
_PROMPT = {
    "anyOf": [
        {"type": "string"},
        _IDS,
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": _IDS},
    ]
}
# read piece by piece: a list may have millions of ids
Lists = Annotated[Any, WithJsonSchema(_PROMPT)]
Ids = Annotated[Any, WithJsonSchema(_IDS)]


class First(FailFast):
    """The first of thousands of entries that are wrong is enough."""

    __hash__ = object.__hash__  # which unions of types want of what is in them


Messages = Annotated[list[dict[str, Any]], First()]


class StreamOptions(StrictModel):
    include_usage: bool | None = None


class JsonSchema(StrictModel):
    name: str = Field(max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(StrictModel):
    """What the output must be, one of these."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], First()] | None = None
    grammar: str | None = Field(None, description="in the form that llguidance reads, Lark's")


class Sampled(StrictModel):
    """What completions and chats have in common."""

    model: str = Field("", description="'' or absent: the one that is served")
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Annotated[list[str], First()] | None = None
    stop_token_ids: Annotated[list[int], First()] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    request_id: str | None = Field(
        None, description="else the header x-request-id, else one of ours"
    )
    ttft_ms: float | None = Field(
        None, description="objective: milliseconds to the first token; also x-llm-d-slo-ttft-ms"
    )
    tpot_ms: float | None = Field(
        None, description="objective: milliseconds per output token; also x-llm-d-slo-tpot-ms"
    )
    slo_class: str | None = Field(
        None, description="a class of requests that this server knows, for the objectives left out"
    )
    deadline_ms: float | None = Field(
        None, description="milliseconds after which the request ends, done or not"
    )
    priority: int | None = Field(
        None, description="-8 to 8; each step down halves the class's objective for the first token"
    )
    cache_salt: str | None = Field(
        None, description="prefixes are shared between requests of equal salt only"
    )
    bypass_prefix_cache: bool | None = None
    user: str | None = Field(None, description="has no effect, as the next four")
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def sampling(self, max_tokens: int, **rest: Any) -> SamplingParams:
        """Errors: RequestError."""
        names = (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "logit_bias",
            "seed",
            "n",
            "min_tokens",
            "stop",
            "stop_token_ids",
            "ignore_eos",
        )
        return SamplingParams.make(
            max_tokens=max_tokens, **{name: getattr(self, name) for name in names}, **rest
        )

    def guided(self) -> tuple[Guided | None, str]:
        """How the output must look, and the field that says so. Errors: RequestError."""
        found = [*self._formats(), *self._structures()]
        if len(found) > 1:
            raise RequestError(found[1][1], f"cannot be given beside {found[0][1]}")
        return found[0] if found else (None, "")

    def _formats(self) -> Iterator[tuple[Guided, str]]:
        given = self.response_format
        if given is None or given.type == "text":
            return
        if (given.type == "json_schema") != (given.json_schema is not None):
            raise RequestError(
                "response_format.json_schema", "goes with type json_schema, and only with that"
            )
        if given.json_schema is None:
            yield Guided("json_object"), "response_format"
        else:
            schema = given.json_schema.schema_
            yield (
                Guided("json_schema", json.dumps({} if schema is None else schema)),
                "response_format.json_schema.schema",
            )

    def _structures(self) -> Iterator[tuple[Guided, str]]:
        given = self.structured_outputs
        name = "structured_outputs"
        if given is None:
            return
        if given.json_ is not None:
            yield (
                Guided(
                    "json_schema",
                    given.json_ if isinstance(given.json_, str) else json.dumps(given.json_),
                ),
                f"{name}.json",
            )
        if given.json_object:
            yield Guided("json_object"), f"{name}.json_object"
        if given.choice is not None:
            yield Guided("choice", choices=tuple(given.choice)), f"{name}.choice"
        for kind in ("regex", "grammar"):
            if (text := getattr(given, kind)) is not None:
                yield Guided(kind, text), f"{name}.{kind}"

    def slo(self, headers: Mapping[str, str]) -> Slo:
        """Errors: RequestError."""
        ttft = _ms("ttft_ms", self.ttft_ms, headers.get("x-llm-d-slo-ttft-ms"))
        return Slo(
            ttft,
            _ms("tpot_ms", self.tpot_ms, headers.get("x-llm-d-slo-tpot-ms")),
            self.slo_class or None,
        )

    def timeout(self) -> float | None:
        return _ms("deadline_ms", self.deadline_ms, None)


class CompletionRequest(Sampled):
    prompt: Lists = Field(...)
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = Field(None, description="must be n, if anything")
    suffix: Literal[""] | None = Field(None, description="not supported")


class Function(StrictModel):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    type: Literal["function"]
    function: Function


class NamedFunction(StrictModel):
    name: str


class NamedTool(StrictModel):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Sampled):
    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool], First()] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="values for the model's own template"
    )


class TokenizeRequest(StrictModel):
    model: str = ""
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(StrictModel):
    model: str = ""
    tokens: Ids = Field(...)
    skip_special_tokens: bool = False


def _ms(name: str, value: float | None, header: str | None) -> float | None:
    """Milliseconds of a field, or else of a header, in seconds."""
    if value is None and header is None:
        return None
    try:
        seconds = float(header if value is None else value) / 1000  # type: ignore[arg-type]
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise RequestError(
            name,
            f"must be a number of milliseconds above 0, not {str(header if value is None else value)[:100]!r}",
        )
    return seconds
