"""Request bodies of HTTP routes with prompts, and the `GenerateCall`s that they ask for. Unknown
fields have no effect (`unknown_fields`).

Besides the OpenAI protocol's own fields there are those that vLLM made common (top_k, min_p, ...)
and jaxserve's: latency objectives, salts, priorities.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from jaxserve.api.errors import RequestError
from jaxserve.api.request import (
    EPHEMERAL,
    MAX_RETENTION,
    NORMAL_RETENTION,
    Slo,
    check_id,
    seconds_of,
)
from jaxserve.api.sampling import SamplingParams
from jaxserve.replica.info import ReplicaInfo
from jaxserve.server.generate_call import GenerateCall
from jaxserve.server.generation.fields import (
    GIVEN,
    KEPT_SECONDS,
    UNCONSTRAINED,
    FirstFault,
    Integer,
    OpenModel,
    SchemaField,
    add_limits,
    at_most_one,
    field_of_type,
)
from jaxserve.server.json_body import JsonObject
from jaxserve.text.structured_output import Guided
from jaxserve.text.structured_output.spec import MAX_CHOICES

_IGNORED = Field(None, description="has no effect")
_OLDER = "as in older versions of vLLM; see structured_outputs"
Choices = Annotated[list[str], FirstFault(), Field(min_length=1, max_length=MAX_CHOICES)]
_SAMPLING_FIELDS = {field.name for field in dataclasses.fields(SamplingParams)}
_CALL_FIELDS = {field.name for field in dataclasses.fields(GenerateCall)} - {"prompt"}


class StreamMode(enum.Enum):
    """Forms of a response: whole, or streamed with usage in the last chunk, in each, or in none."""

    OFF = enum.auto()
    WITHOUT_USAGE = enum.auto()
    WITH_USAGE = enum.auto()
    WITH_RUNNING_USAGE = enum.auto()  # in every chunk


class StreamOptions(OpenModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="each chunk tells the usage")


class JsonSchema(OpenModel):
    name: str | None = Field(None, max_length=64, description="has no effect")
    description: str | None = None
    schema_: SchemaField | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(OpenModel):
    model_config = field_of_type("json_schema", json_schema=GIVEN, schema=GIVEN)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: SchemaField | None = Field(
        None, alias="schema", description="as in llama.cpp and /v1/responses: of the output"
    )


class StructuredOutputs(OpenModel):
    """Constraints of the output; one of them at most."""

    model_config = ConfigDict(json_schema_extra=at_most_one(UNCONSTRAINED))

    json_: SchemaField | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = Field(None, description="in Lark's syntax, as llguidance reads it")

    def constraints(self, prefix: str) -> Iterator[tuple[Guided, str]]:
        """Yields what these are for a guide, each with its field's name, behind a prefix."""
        if self.json_ is not None:
            schema = self.json_ if isinstance(self.json_, str) else json.dumps(self.json_)
            yield Guided("json_schema", schema), f"{prefix}json"
        if self.json_object:
            yield Guided("json_object"), f"{prefix}json_object"
        if self.choice is not None:
            yield Guided("choice", choices=tuple(self.choice)), f"{prefix}choice"
        if self.regex is not None:
            yield Guided("regex", self.regex), f"{prefix}regex"
        if self.grammar is not None:
            yield Guided("grammar", self.grammar), f"{prefix}grammar"


class PromptRequest(OpenModel):
    """Fields that all requests with prompts share, whether these are continued or embedded."""

    model_config = ConfigDict(json_schema_extra=add_limits)

    model: str = Field(
        "", description="'' or absent means the one that is served; needed where there are several"
    )
    request_id: str | None = Field(
        None, description="else the header x-request-id, else one that the server chooses"
    )
    priority: Integer | None = Field(
        None, description="-8 to 8; each step down halves the class's objective for the first token"
    )
    cache_salt: str | None = Field(
        None, description="cached prefixes are shared between requests of equal salt only"
    )
    truncate_prompt_tokens: Integer | None = Field(
        None,
        description="as in vLLM: only this number of the prompt's last tokens; -1: as many as fit",
    )
    user: str | None = _IGNORED

    def call_fields(self, headers: Mapping[str, str]) -> JsonObject:
        """Returns the fields of the `GenerateCall` that the body sets, by name; a field that both
        have needs no other code. Errors: RequestError."""
        return {**self._given(_CALL_FIELDS), "request_id": self.id_given(headers)}

    def id_given(self, headers: Mapping[str, str]) -> str:
        """Returns the id that the caller gives the request, in the body or a header, or ''. Errors:
        RequestError."""
        id = self.request_id or headers.get("x-request-id", "")
        if id:  # also of several prompts, whose ids are cut and numbered
            check_id(id)
        return id

    def _given(self, names: set[str]) -> JsonObject:
        """Returns the body's fields of these names that are not null."""
        shared = names & type(self).model_fields.keys()
        values = {name: getattr(self, name) for name in sorted(shared)}
        return {name: value for name, value in values.items() if value is not None}


class GenerateRequest(PromptRequest):
    """Fields that completions and chats share."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Integer | None = None
    n: Integer | None = None
    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    stop: str | Annotated[list[str], FirstFault()] | None = None
    stop_token_ids: Annotated[list[Integer], FirstFault()] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaField | str | None = Field(None, description=_OLDER)
    guided_regex: str | None = Field(None, description=_OLDER)
    guided_choice: Choices | None = Field(None, description=_OLDER)
    guided_grammar: str | None = Field(None, description=_OLDER)
    ttft_ms: float | None = Field(
        None, description="objective: milliseconds to the first token; also x-llm-d-slo-ttft-ms"
    )
    tpot_ms: float | None = Field(
        None, description="objective: milliseconds per output token; also x-llm-d-slo-tpot-ms"
    )
    tbt_ms: float | None = Field(
        None,
        description="objective: milliseconds between two output tokens, which 99 of 100 are to "
        "keep",
    )
    slo_class: str | None = Field(
        None, description="request class of this server that gives the objectives left out"
    )
    deadline_ms: float | None = Field(
        None, description="milliseconds after which the request ends, done or not"
    )
    bypass_prefix_cache: bool | None = None
    cache_retention: Literal["normal", "ephemeral"] | Integer | None = Field(
        None,
        description="of the request's KV below the devices: as others' (normal), none (ephemeral), "
        f"or seconds to keep it, at most {MAX_RETENTION}",
    )
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = Field(
        None,
        description="as in OpenAI's API: cache_retention normal, or of 86400 seconds; without "
        "effect beside cache_retention",
    )
    kv_transfer_params: dict[str, Any] | None = Field(
        None, description="what a router passes between prefill and decode replicas"
    )
    prompt_logprobs: Integer | None = Field(
        None,
        description="as in vLLM: log-probabilities of the prompt's tokens, and of this many others",
    )
    return_token_ids: bool | None = Field(
        None, description="as in vLLM: choices have token_ids, and the answer prompt_token_ids"
    )
    skip_special_tokens: bool | None = Field(
        None, description="as in vLLM: false leaves special tokens in the text"
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="as in vLLM: tokens of log-probabilities are written token_id:N"
    )
    metadata: dict[str, Any] | None = _IGNORED
    store: bool | None = _IGNORED
    service_tier: str | None = _IGNORED
    safety_identifier: str | None = _IGNORED
    prompt_cache_key: str | None = Field(
        None,
        description="names a conversation whose next turn is expected soon: its KV is kept for it",
    )

    def call_fields(self, headers: Mapping[str, str]) -> JsonObject:
        guided, guided_field = self.guided()
        return {
            **super().call_fields(headers),
            "slo": self.slo(headers),
            "cache_retention": self.retention(),
            "session": self.prompt_cache_key or "",
            "timeout": _seconds("deadline_ms", self.deadline_ms, None),
            "guided": guided,
            "guided_field": guided_field,
            "keep_special": self.skip_special_tokens is False,
        }

    def sampling(self, info: ReplicaInfo, default_tokens: int, **others: Any) -> SamplingParams:
        """Returns the body's sampling parameters. default_tokens: max_tokens where neither the body
        nor the model says. others: fields that the protocol's routes read otherwise. Errors:
        RequestError."""
        self._check_stream()
        fields = {**self._given(_SAMPLING_FIELDS), "stop": self.stop or None, **others}
        if fields.get("max_tokens") is None:
            fields["max_tokens"] = info.sampling_defaults.get("max_tokens", default_tokens)
        return info.sampling(**fields)

    def _check_stream(self) -> None:
        """Refuses what needs a stream without one, and what none can have. Errors: RequestError."""
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs", "cannot be streamed: they are known at the end")
        if not self.stream and self.stream_options is not None:
            raise RequestError("stream_options", "is for stream=true")

    def retention(self) -> int:
        """The request's `cache_retention`. Errors: RequestError."""
        retention = self.cache_retention
        if retention is None:
            return MAX_RETENTION if self.prompt_cache_retention == "24h" else NORMAL_RETENTION
        if isinstance(retention, str):
            return EPHEMERAL if retention == "ephemeral" else NORMAL_RETENTION
        KEPT_SECONDS.check("cache_retention", retention)
        return retention

    def guided(self) -> tuple[Guided | None, str]:
        """Returns what the output must match, and the field that says so. Errors: RequestError."""
        older = StructuredOutputs(
            json=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )
        constraints = [*self._response_format(), *older.constraints("guided_")]
        if self.structured_outputs is not None:
            constraints += self.structured_outputs.constraints("structured_outputs.")
        if len(constraints) > 1:
            raise RequestError(constraints[1][1], f"cannot be given beside {constraints[0][1]}")
        return constraints[0] if constraints else (None, "")

    def _response_format(self) -> Iterator[tuple[Guided, str]]:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return
        if wanted.json_schema is not None:
            schema = {} if wanted.json_schema.schema_ is None else wanted.json_schema.schema_
            yield Guided("json_schema", json.dumps(schema)), "response_format.json_schema.schema"
        elif wanted.schema_ is not None:
            yield Guided("json_schema", json.dumps(wanted.schema_)), "response_format.schema"
        elif wanted.type == "json_object":
            yield Guided("json_object"), "response_format"
        else:
            raise RequestError("response_format.json_schema", "is missing")

    def slo(self, headers: Mapping[str, str]) -> Slo:
        """The objectives of the body, or else of its headers. Errors: RequestError."""
        ttft = _seconds("ttft_ms", self.ttft_ms, headers.get("x-llm-d-slo-ttft-ms"))
        tpot = _seconds("tpot_ms", self.tpot_ms, headers.get("x-llm-d-slo-tpot-ms"))
        return Slo(ttft, tpot, self.slo_class or None, _seconds("tbt_ms", self.tbt_ms, None))

    def stream_mode(self) -> StreamMode:
        """Returns the form of the response."""
        if not self.stream:
            return StreamMode.OFF
        options = self.stream_options
        if options is None or not options.include_usage:
            return StreamMode.WITHOUT_USAGE
        return (
            StreamMode.WITH_RUNNING_USAGE
            if options.continuous_usage_stats
            else StreamMode.WITH_USAGE
        )


def _seconds(name: str, value: float | None, header: str | None) -> float | None:
    """Milliseconds of a field, or else of a header, in seconds. Errors: RequestError."""
    milliseconds = header if value is None else value
    if milliseconds is None:
        return None
    try:
        number = float(milliseconds)
    except ValueError:
        message = f"must be a number of milliseconds, not {str(milliseconds)[:100]!r}"
        raise RequestError(name, message) from None
    return seconds_of(name, number)
