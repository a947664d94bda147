"""Types of fields in request bodies, and the limits that the OpenAPI document gives them.

`SamplingParams` and `Request` check the limits of values, for all protocols; the document derives
its bounds from the same ranges. Types are those of JSON: 0 is no boolean, and "1" no number.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    WithJsonSchema,
)
from pydantic_core import core_schema

from jaxserve.api.errors import Range, RequestError
from jaxserve.api.request import MAX_ID_CHARS, MAX_RETENTION, MILLISECONDS, PRIORITY
from jaxserve.api.sampling import (
    BIAS,
    MAX_INT32,
    MAX_LOGIT_BIAS,
    MAX_STOP,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    RANGES,
    TOKEN_ID,
)
from jaxserve.server.json_body import JsonObject, whole

INCLUDED_LOGPROBS = "message.output_text.logprobs"  # in `include` of /v1/responses
KEPT_SECONDS = Range(1, MAX_RETENTION, whole=True)  # of cache_retention
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_INT32}}
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
_STOP_TEXT: JsonObject = {"minLength": 1, "maxLength": MAX_STOP_CHARS}
_STOP_TEXTS: JsonObject = {"maxItems": MAX_STOP, "items": _STOP_TEXT}
_LIMITS: dict[str, JsonObject] = {  # by field
    **{name: allowed.json_schema() for name, allowed in RANGES.items()},
    "best_of": RANGES["n"].json_schema(),
    "max_completion_tokens": RANGES["max_tokens"].json_schema(),
    "max_output_tokens": RANGES["max_tokens"].json_schema(),
    "top_logprobs": RANGES["logprobs"].json_schema(),
    "priority": PRIORITY.json_schema(),
    "request_id": {"maxLength": MAX_ID_CHARS},
    "truncate_prompt_tokens": {"minimum": -1, "not": {"const": 0}},
    "stop": {**_STOP_TEXTS, "maxLength": MAX_STOP_CHARS},
    "stop_sequences": _STOP_TEXTS,
    "stop_token_ids": {"maxItems": MAX_STOP_IDS, "items": TOKEN_ID.json_schema()},
    "logit_bias": {
        "maxProperties": MAX_LOGIT_BIAS,
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": BIAS.json_schema(),
    },
    "messages": {"minItems": 1},
    "documents": {"minItems": 1},
    "text_1": {"minItems": 1},
    "text_2": {"minItems": 1},
    "top_n": {"minimum": 1},
    "dimensions": {"minimum": 1},
    "cache_retention": KEPT_SECONDS.json_schema(),
    "ttft_ms": MILLISECONDS.json_schema(),
    "tpot_ms": MILLISECONDS.json_schema(),
    "tbt_ms": MILLISECONDS.json_schema(),
    "deadline_ms": MILLISECONDS.json_schema(),
}


def _has(field: str, schema: JsonObject) -> JsonObject:
    """The schema of objects whose field is there and matches a schema."""
    return {"properties": {field: schema}, "required": [field]}


def _lacks(field: str, *others: Any) -> JsonObject:
    """The schema of objects whose field is absent, null or one of some other values."""
    return {"properties": {field: {"enum": [None, *others]}}}


def at_most_one(idle: Mapping[str, JsonObject]) -> JsonObject:
    """The schema of objects in which at most one of these fields has a value that its schema here
    does not match."""
    others = [[name for name in idle if name != active] for active in idle]
    return {"anyOf": [{"properties": {name: idle[name] for name in names}} for names in others]}


GIVEN: JsonObject = {"not": {"type": "null"}}
_NULL: JsonObject = {"type": "null"}
# Fields that constrain an output, and the values by which they do not. `properties` matches null.
UNCONSTRAINED: dict[str, JsonObject] = {
    **dict.fromkeys(("json", "regex", "choice", "grammar"), _NULL),
    "json_object": {"enum": [None, False]},
}
_UNGUIDED: dict[str, JsonObject] = {
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _NULL),
    "structured_outputs": {"properties": UNCONSTRAINED},
}
_FORMS = {**_UNGUIDED, "response_format": {"properties": {"type": {"const": "text"}}}}
_AUTO = _has("mode", {"const": "auto"})
_UNFORCED = [  # of bodies of all protocols: what a choice is that forces no call
    _lacks("tool_choice", "auto", "none"),
    *(
        _has("tool_choice", {"type": "object", **choice})
        for choice in (
            _has("type", {"enum": ["auto", "none"]}),
            _AUTO,
            _has("allowed_tools", _AUTO),
        )
    ),
]
# of bodies with all of these fields: what they are together
_TOGETHER: dict[frozenset[str], list[JsonObject]] = {
    frozenset({"top_logprobs", "logprobs"}): [
        _lacks("top_logprobs", 0),
        _has("logprobs", {"const": True}),
    ],
    frozenset({"top_logprobs", "include"}): [
        _lacks("top_logprobs", 0),
        _has("include", {"type": "array", "contains": {"const": INCLUDED_LOGPROBS}}),
    ],
    frozenset({"stream_options", "stream"}): [
        _lacks("stream_options"),
        _has("stream", {"const": True}),
    ],
    frozenset({"input", "instructions", "previous_response_id"}): [
        _has("input", {"minItems": 1}),
        _has("instructions", {"type": "string", "minLength": 1}),
        _has("previous_response_id", GIVEN),
    ],
    frozenset({"prompt_logprobs", "stream"}): [_lacks("prompt_logprobs"), _lacks("stream", False)],
    frozenset({"tool_choice", "tools"}): [
        *_UNFORCED,
        _has("tools", {"type": "array", "minItems": 1}),
    ],
    # of completions: beside what chats' fields are together, fuzzers find no body that is valid
    frozenset({"echo", *_FORMS}): [at_most_one(_FORMS)],
    frozenset({"tool_choice", *_UNGUIDED}): [*_UNFORCED, {"properties": _UNGUIDED}],
}


def _possible(schema: Any) -> Any:
    if schema is False:
        raise ValueError("allows no value")
    return schema


Integer = Annotated[int, BeforeValidator(whole)]
# of outputs
SchemaField = Annotated[
    dict[str, Any] | bool,
    AfterValidator(_possible),
    WithJsonSchema({"anyOf": [{"type": "object", "additionalProperties": True}, {"const": True}]}),
]


class OpenModel(BaseModel):
    """A model that takes unknown fields and does nothing with them."""

    model_config = ConfigDict(extra="allow", protected_namespaces=(), strict=True)

    @property
    def ignored_as(self) -> str:
        """The name under which all of this is reported to have no effect; '': it has."""
        return ""

    @property
    def left_out(self) -> Iterable[str]:
        """Names under which parts of this are reported to have no effect."""
        return ()


def add_limits(schema: JsonObject) -> None:
    """Adds the limits of its fields to the schema of a body, where these have none of their own,
    and what some of its fields must be together. A limit of one type says nothing of values of
    other types."""
    fields = schema["properties"]
    for name, about in fields.items():
        about.update({**_LIMITS.get(name, {}), **about})
    conditions = [{"anyOf": either} for few, either in _TOGETHER.items() if fields.keys() >= few]
    if conditions:
        schema["allOf"] = conditions


class OnlyValues:
    """Annotates a field that takes these values alone. why: the error for other values."""

    def __init__(self, *values: Any, why: str):
        self._values = values
        self._why = why

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._checked)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> JsonObject:
        return {"enum": list(self._values), "description": self._why}

    def _checked(self, value: Any) -> Any:
        if not any(value == one and type(value) is type(one) for one in self._values):
            raise ValueError(self._why)
        return value


class FirstFault(FailFast):
    """Annotates a list whose check stops at the first wrong entry, of possibly thousands."""

    __hash__ = object.__hash__  # unions of annotated types must be hashable


_PART = {
    "anyOf": [
        {"type": "string"},
        {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    ]
}
_MESSAGE = {
    "type": "object",
    "properties": {"role": {"type": "string"}},
    "required": ["role"],
    "anyOf": [
        {"properties": {"role": {"enum": ["assistant", "tool", "function"]}}},
        {
            "properties": {"content": {"anyOf": [_PART, {"type": "array", "items": _PART}]}},
            "required": ["content"],
        },
    ],
}
Messages = Annotated[
    list[dict[str, Any]], FirstFault(), Field(json_schema_extra={"minItems": 1, "items": _MESSAGE})
]


def field_of_type(*types: str, **fields: JsonObject) -> ConfigDict:
    """Returns a model's config whose OpenAPI schema has entries of some types give one of `fields`,
    as its schema there says."""
    return ConfigDict(json_schema_extra=functools.partial(_add_field_of_type, types, fields))


def _add_field_of_type(
    types: Sequence[str], fields: Mapping[str, JsonObject], schema: JsonObject
) -> None:
    other: JsonObject = {"properties": {"type": {"not": {"enum": [*types]}}}}
    if schema["properties"]["type"].get("default", "") in (*types, None):  # as are those without
        other = _has("type", {"not": {"enum": [*types, None]}})
    schema["anyOf"] = [other, *[_has(field, about) for field, about in fields.items()]]


def text_in(entry: Mapping[str, Any], name: str, where: str) -> str:
    """Returns the text under a name in an entry of a list. Errors: RequestError."""
    if not isinstance(entry.get(name), str):
        raise RequestError(f"{where}.{name}", "must be a text")
    return entry[name]
