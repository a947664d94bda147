"""Request bodies of the users' HTTP port. Unknown fields have no effect (`unknown_fields`).

Beside the OpenAI protocol's own fields there are those that vLLM made common (top_k, min_p, ...)
and jaxserve's: latency objectives, salts, priorities. Limits of values are checked by
`SamplingParams` and `Request`, which all protocols share.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, FailFast, Field, StrictInt, ValidationError, WithJsonSchema
from pydantic_core import core_schema

from jaxserve.api.errors import RequestError, check_integer
from jaxserve.api.request import (
    EPHEMERAL,
    MAX_ID_CHARS,
    MAX_PRIORITY,
    MAX_RETENTION,
    NORMAL_RETENTION,
    Slo,
)
from jaxserve.api.sampling import (
    FLOAT_RANGES,
    INT_RANGES,
    MAX_LOGIT_BIAS,
    MAX_SEED,
    MAX_STOP,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    SamplingParams,
)
from jaxserve.server.http_app import first_fault
from jaxserve.server.json_body import JsonObject
from jaxserve.server.openai.unknown_fields import OpenModel
from jaxserve.text.structured_output import Guided

MAX_PROMPTS = 128  # of one request
COMPLETION_TOKENS = 16  # the protocol's default where a completion has no max_tokens
UNLIMITED_TOKENS = 2**31 - 1  # max_tokens of a chat that sets none: up to the model's limit
MAX_OBJECTIVE_SECONDS = 1e9
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}}
_PROMPT_IDS = {**_IDS, "minItems": 1}
_PROMPT = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        _PROMPT_IDS,
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        {"type": "array", "items": _PROMPT_IDS, "minItems": 1},
    ]
}
# not checked by pydantic, which would take long for millions of ids
PromptField = Annotated[Any, WithJsonSchema(_PROMPT)]
IdsField = Annotated[Any, WithJsonSchema(_IDS)]


_IGNORED = Field(None, description="has no effect")
_SAMPLING_FIELDS = (
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


_TOKEN_ID: JsonObject = {"minimum": 0, "maximum": 2**31 - 1}
_STOP_TEXT: JsonObject = {"minLength": 1, "maxLength": MAX_STOP_CHARS}
# what `SamplingParams` and `Request` check, for the OpenAPI schema; others' names of fields too
_LIMITS: dict[str, JsonObject] = {
    **{name: {"minimum": low, "maximum": high} for name, low, high in FLOAT_RANGES + INT_RANGES},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 100},
    "seed": {"minimum": -MAX_SEED, "maximum": MAX_SEED - 1024},  # FastAPI writes them as floats
    "priority": {"minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY},
    "request_id": {"maxLength": MAX_ID_CHARS},
    "truncate_prompt_tokens": {"minimum": -1},
    "stop": {"maxItems": MAX_STOP, "items": _STOP_TEXT, "maxLength": MAX_STOP_CHARS},
    "stop_sequences": {"maxItems": MAX_STOP, "items": _STOP_TEXT},
    "stop_token_ids": {"maxItems": MAX_STOP_IDS, "items": _TOKEN_ID},
    "logit_bias": {
        "maxProperties": MAX_LOGIT_BIAS,
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"minimum": -100, "maximum": 100},
    },
    "messages": {"minItems": 1},
    "documents": {"minItems": 1},
    "top_n": {"minimum": 1},
    "dimensions": {"minimum": 1},
    "cache_retention": {"minimum": 1, "maximum": MAX_RETENTION},
    **{
        name: {"exclusiveMinimum": 0, "maximum": 1000 * MAX_OBJECTIVE_SECONDS}
        for name in ("ttft_ms", "tpot_ms", "deadline_ms")
    },
}
_LIMITS["max_completion_tokens"] = _LIMITS["max_output_tokens"] = _LIMITS["max_tokens"]
_LIMITS["top_logprobs"] = _LIMITS["logprobs"]


def limits_told(schema: JsonObject) -> None:
    """Adds to the schema of a request's body the limits that are checked later. A limit of a type
    says nothing of values of other types."""
    for name, about in schema["properties"].items():
        about.update(_LIMITS.get(name, {}))


class only:  # noqa: N801: an annotation
    """Says that a field takes these values alone. why: what others are told."""

    def __init__(self, *values: Any, why: str):
        self._values = values
        self._why = why

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._checked)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> JsonObject:
        return {"enum": list(self._values), "description": self._why}

    def _checked(self, value: Any) -> Any:
        if value not in self._values:
            raise ValueError(self._why)
        return value


class StreamMode(enum.Enum):
    """Whether a response is streamed, and whether its last chunk, or each, tells the usage."""

    OFF = enum.auto()
    WITHOUT_USAGE = enum.auto()
    WITH_USAGE = enum.auto()
    WITH_RUNNING_USAGE = enum.auto()  # in every chunk


class FirstFault(FailFast):
    """Stops the check of a list at its first wrong entry: there may be thousands."""

    __hash__ = object.__hash__  # unions of annotated types must be hashable


_MESSAGE = {"type": "object", "properties": {"role": {"type": "string"}}, "required": ["role"]}
Messages = Annotated[
    list[dict[str, Any]],
    FirstFault(),
    Field(json_schema_extra={"minItems": 1, "items": _MESSAGE}),
]


class StreamOptions(OpenModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="each chunk tells the usage")


class JsonSchema(OpenModel):
    name: str = Field(max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


def schema_in(field: str) -> ConfigDict:
    """Says in the OpenAPI schema that a format of type json_schema needs this field."""
    of_type: JsonObject = {"properties": {"type": {"const": "json_schema"}}, "required": ["type"]}
    return ConfigDict(json_schema_extra={"if": of_type, "then": {"required": [field]}})


class ResponseFormat(OpenModel):
    model_config = schema_in("json_schema")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(OpenModel):
    """Constraints of the output; one of them at most."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], FirstFault()] | None = None
    grammar: str | None = Field(None, description="in Lark's syntax, as llguidance reads it")


class PromptRequest(OpenModel):
    """Fields that all requests with prompts share, whether these are continued or embedded."""

    model_config = ConfigDict(json_schema_extra=limits_told)

    model: str = Field("", description="'' or absent means the one that is served")
    request_id: str | None = Field(
        None, description="else the header x-request-id, else one that the server chooses"
    )
    priority: int | None = Field(
        None, description="-8 to 8; each step down halves the class's objective for the first token"
    )
    cache_salt: str | None = Field(
        None, description="cached prefixes are shared between requests of equal salt only"
    )
    truncate_prompt_tokens: int | None = Field(
        None, description="as in vLLM: only the prompt's last so many tokens; -1: as many as fit"
    )
    user: str | None = _IGNORED


class GenerateRequest(PromptRequest):
    """Fields that completions and chats share."""

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
    stop: str | Annotated[list[str], FirstFault()] | None = None
    stop_token_ids: Annotated[list[int], FirstFault()] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    ttft_ms: float | None = Field(
        None, description="objective: milliseconds to the first token; also x-llm-d-slo-ttft-ms"
    )
    tpot_ms: float | None = Field(
        None, description="objective: milliseconds per output token; also x-llm-d-slo-tpot-ms"
    )
    slo_class: str | None = Field(
        None, description="request class of this server that gives the objectives left out"
    )
    deadline_ms: float | None = Field(
        None, description="milliseconds after which the request ends, done or not"
    )
    bypass_prefix_cache: bool | None = None
    cache_retention: Literal["normal", "ephemeral"] | StrictInt | None = Field(
        None,
        description="of the request's KV below the devices: as others' (normal), none (ephemeral), "
        f"or seconds to keep it, at most {MAX_RETENTION}",
    )
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = Field(
        None, description="as in OpenAI's API: cache_retention normal, or of 86400 seconds"
    )
    kv_transfer_params: dict[str, Any] | None = Field(
        None, description="what a router passes between prefill and decode replicas"
    )
    prompt_logprobs: int | None = Field(
        None, description="as in vLLM: log-probabilities of the prompt's tokens, and so many others"
    )
    return_token_ids: bool | None = Field(
        None, description="as in vLLM: choices have token_ids, and the answer prompt_token_ids"
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="as in vLLM: tokens of log-probabilities are written token_id:N"
    )
    metadata: dict[str, Any] | None = _IGNORED
    store: bool | None = _IGNORED
    service_tier: str | None = _IGNORED
    safety_identifier: str | None = _IGNORED
    prompt_cache_key: str | None = _IGNORED

    def sampling(self, max_tokens: int, **rest: Any) -> SamplingParams:
        """Sampling parameters of the body. rest: those that the protocol's routes name otherwise.
        Errors: RequestError."""
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs", "cannot be streamed: they are known at the end")
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        given["stop"] = self.stop or None
        return SamplingParams.make(**{**given, "max_tokens": max_tokens, **rest})

    def retention(self) -> int:
        """The request's `cache_retention`. Errors: RequestError."""
        given = self.cache_retention
        if given is None:
            return MAX_RETENTION if self.prompt_cache_retention == "24h" else NORMAL_RETENTION
        if self.prompt_cache_retention is not None:
            raise RequestError("prompt_cache_retention", "cannot be given beside cache_retention")
        if isinstance(given, str):
            return EPHEMERAL if given == "ephemeral" else NORMAL_RETENTION
        check_integer("cache_retention", given, 1, MAX_RETENTION)
        return given

    def guided(self) -> tuple[Guided | None, str]:
        """What the output must match, and the field that says so. Errors: RequestError."""
        found = [*self._response_format(), *self._structured_outputs()]
        if len(found) > 1:
            raise RequestError(found[1][1], f"cannot be given beside {found[0][1]}")
        return found[0] if found else (None, "")

    def _response_format(self) -> Iterator[tuple[Guided, str]]:
        given = self.response_format
        if given is None or given.type == "text":
            return
        if (given.type == "json_schema") != (given.json_schema is not None):
            raise RequestError(
                "response_format.json_schema", "goes with type json_schema, and only with that"
            )
        if given.json_schema is None:
            yield Guided("json_object"), "response_format"
            return
        schema = {} if given.json_schema.schema_ is None else given.json_schema.schema_
        yield Guided("json_schema", json.dumps(schema)), "response_format.json_schema.schema"

    def _structured_outputs(self) -> Iterator[tuple[Guided, str]]:
        given = self.structured_outputs
        name = "structured_outputs"
        if given is None:
            return
        if given.json_ is not None:
            schema = given.json_ if isinstance(given.json_, str) else json.dumps(given.json_)
            yield Guided("json_schema", schema), f"{name}.json"
        if given.json_object:
            yield Guided("json_object"), f"{name}.json_object"
        if given.choice is not None:
            yield Guided("choice", choices=tuple(given.choice)), f"{name}.choice"
        if given.regex is not None:
            yield Guided("regex", given.regex), f"{name}.regex"
        if given.grammar is not None:
            yield Guided("grammar", given.grammar), f"{name}.grammar"

    def slo(self, headers: Mapping[str, str]) -> Slo:
        """The objectives of the body, or else of its headers. Errors: RequestError."""
        ttft = _seconds("ttft_ms", self.ttft_ms, headers.get("x-llm-d-slo-ttft-ms"))
        tpot = _seconds("tpot_ms", self.tpot_ms, headers.get("x-llm-d-slo-tpot-ms"))
        return Slo(ttft, tpot, self.slo_class or None)

    def timeout(self) -> float | None:
        """Seconds after which the request ends. Errors: RequestError."""
        return _seconds("deadline_ms", self.deadline_ms, None)

    def stream_mode(self) -> StreamMode:
        """Errors: RequestError for stream options without a stream."""
        if not self.stream:
            if self.stream_options is not None:
                raise RequestError("stream_options", "is for stream=true")
            return StreamMode.OFF
        options = self.stream_options
        if options is None or not options.include_usage:
            return StreamMode.WITHOUT_USAGE
        return (
            StreamMode.WITH_RUNNING_USAGE
            if options.continuous_usage_stats
            else StreamMode.WITH_USAGE
        )


class CompletionRequest(GenerateRequest):
    prompt: PromptField = Field(...)
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = Field(
        None,
        ge=1,
        description="how many to make, of which the n likeliest by token are shown; not streamed",
    )
    suffix: Annotated[Any, only("", None, why="is not supported")] = None


class Function(OpenModel):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(OpenModel):
    type: Literal["function"]
    function: Function


class NamedFunction(OpenModel):
    name: str


class NamedTool(OpenModel):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(OpenModel):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedChoice(OpenModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ChatRequest(GenerateRequest):
    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool], FirstFault()] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = Field(
        None, description="as in vLLM: whether the prompt ends with the beginning of an answer"
    )
    continue_final_message: bool | None = Field(
        None, description="as in vLLM: the answer continues the last message"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables for the model's chat template"
    )
    # what would be answered wrongly if it had no effect
    chat_template: Annotated[Any, only("", None, why="is not taken from requests")] = None
    modalities: Annotated[Any, only(["text"], [], None, why="only text is generated")] = None
    functions: Annotated[Any, only([], None, why="give tools instead")] = None
    function_call: Annotated[Any, only("none", "auto", None, why="give tool_choice instead")] = None
    reasoning_effort: str | None = Field(
        None, description="a variable for the model's chat template", max_length=32
    )

    include_reasoning: bool | None = Field(None, description="whether answers have reasoning")

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> ChatRequest:
        """A chat that another protocol's body asks for. Errors: RequestError."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise first_fault(error.errors()[0]) from None

    @property
    def usable_tools(self) -> Sequence[Tool]:
        """Tools that the model may call."""
        tools = [] if self.tool_choice == "none" else self.tools or []
        if isinstance(self.tool_choice, AllowedChoice):
            return [tool for tool in tools if tool.function.name in self._chosen_names]
        return tools

    @property
    def must_call(self) -> bool:
        """Whether the output must be a call of a tool."""
        choice = self.tool_choice
        if isinstance(choice, AllowedChoice):
            return choice.allowed_tools.mode == "required"
        return choice == "required" or isinstance(choice, NamedTool)

    @property
    def _chosen_names(self) -> Sequence[str]:
        """Tools that the choice names."""
        match self.tool_choice:
            case NamedTool(function=function):
                return [function.name]
            case AllowedChoice(allowed_tools=allowed):
                return [tool.function.name for tool in allowed.tools]
        return []

    @property
    def named_tool(self) -> str | None:
        """The tool that must be called, if it is one."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    def check_tools(self) -> None:
        """Errors: RequestError for tools of one name, and for a choice that is not among them."""
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise RequestError("tools", "has two functions of one name")
        for name in self._chosen_names:
            if name not in names:
                raise RequestError("tool_choice", f"{name!r:.100} is not among the tools")
        if self.must_call and not self.usable_tools:
            raise RequestError("tool_choice", "is required, but there are no tools")

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables for the model's chat template."""
        given = self.chat_template_kwargs or {}
        if self.reasoning_effort is None:
            return given
        return {"reasoning_effort": self.reasoning_effort, **given}


class TokenizeRequest(OpenModel):
    model: str = ""
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Annotated[list[Tool], FirstFault()] | None = Field(None, max_length=128)
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(OpenModel):
    model: str = ""
    tokens: IdsField = Field(...)
    skip_special_tokens: bool = False


def _seconds(name: str, value: float | None, header: str | None) -> float | None:
    """Milliseconds of a field, or else of a header, in seconds. Errors: RequestError."""
    given = header if value is None else value
    if given is None:
        return None
    try:
        seconds = float(given) / 1000
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < MAX_OBJECTIVE_SECONDS:
        message = f"must be a number of milliseconds above 0, not {str(given)[:100]!r}"
        raise RequestError(name, message)
    return seconds
