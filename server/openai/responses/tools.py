"""Tools of /v1/responses and the choice of them, and what they are in a chat."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from jaxserve.server.generation.fields import OpenModel, field_of_type
from jaxserve.server.generation.tools import (
    ALLOWED,
    FUNCTION,
    NAME,
    AnyChoice,
    AnyTool,
    OtherTool,
    TypedChoice,
    anything,
    flat,
    plain_choice,
    repeated,
    unjudged,
)
from jaxserve.server.json_body import JsonObject

CUSTOM = "custom"
NAMESPACE = "namespace"
_TYPES = (FUNCTION, CUSTOM, NAMESPACE)
INPUT = "input"  # the argument of custom tools
ESCAPE_CHARS = len(r"\ud83d\ude00")  # of one character in JSON, at most
_INPUT_SCHEMA = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


class FunctionTool(AnyTool):
    """A function; a custom tool, which takes a text and is shown to the model as a function of it;
    a namespace of such tools; or a tool of another type, which has no effect."""

    model_config = field_of_type(*_TYPES, name={"type": "string", "pattern": NAME})

    name: str | None = None
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, BeforeValidator(anything)] = None
    strict: bool | None = None
    format: dict[str, Any] | None = Field(None, description="of a custom tool's text")
    tools: list[FunctionTool] | None = Field(None, description="of a namespace")

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, tool: Any) -> Any:
        return unjudged(flat(tool), cls.model_fields, *_TYPES)

    @property
    def ignored_as(self) -> str:
        return "" if self.type in _TYPES else self.type

    @model_validator(mode="after")
    def _named(self) -> FunctionTool:
        if self.ignored_as:
            return self
        if self.name is None:
            raise ValueError("has no name")
        if re.fullmatch(NAME, self.name) is None:
            raise ValueError(f"has a name that does not match {NAME}")
        return self

    def callable(self, namespace: str = "") -> Iterator[CallableTool]:
        """Yields what the model may call of the tool, which is in a namespace or in none."""
        if self.type == NAMESPACE:
            for tool in self.tools or ():
                yield from tool.callable(qualified(namespace, self.name))
        elif not self.ignored_as:
            yield CallableTool(self, namespace)

    def as_chat(self, name: str) -> JsonObject:
        """The tool, a function or custom, as a chat's body has it."""
        function: JsonObject = self.model_dump(include={"description", "parameters", "strict"})
        if self.type == CUSTOM:
            described = {"description": self._custom_description(), "parameters": _INPUT_SCHEMA}
            function = {**function, **described}
        return {"type": FUNCTION, FUNCTION: {**function, "name": name}}

    def _custom_description(self) -> str:
        """Describes a custom tool to the model, with the grammar of its text, which is not
        enforced."""
        texts = [
            self.description or "",
            f"The argument {INPUT!r} is the tool's whole input, a text.",
        ]
        grammar = (self.format or {}).get("definition")
        if isinstance(grammar, str):
            texts.append(f"It matches this grammar:\n{grammar}")
        return "\n".join(filter(None, texts))


@dataclasses.dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that the model may call, and the namespace that it is in, or ''."""

    tool: FunctionTool
    namespace: str

    @property
    def name(self) -> str:
        """The name by which the model knows it."""
        return qualified(self.namespace, self.tool.name)

    def called(self) -> JsonObject:
        """Returns the fields that name the tool in an item that calls it."""
        named: JsonObject = {"name": self.tool.name}
        return {**named, "namespace": self.namespace} if self.namespace else named


def callables(tools: Sequence[FunctionTool] | None) -> dict[str, CallableTool]:
    """Returns what the model may call of some tools, by the name by which it knows it: of two of
    one name the first."""
    by_name: dict[str, CallableTool] = {}
    for each in _found(tools):
        by_name.setdefault(each.name, each)
    return by_name


def repeated_tools(tools: Sequence[FunctionTool] | None) -> list[str]:
    """The names of tools that come more than once, as they are reported."""
    return repeated(each.name for each in _found(tools))


def _found(tools: Sequence[FunctionTool] | None) -> list[CallableTool]:
    return [each for tool in tools or () for each in tool.callable()]


def qualified(namespace: str | None, name: str | None) -> str:
    """The name by which the model knows a function in a namespace."""
    return ".".join(filter(None, [namespace, name]))


class NamedFunctionTool(OpenModel):
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, tool: Any) -> Any:
        return flat(tool)

    def as_chat(self) -> JsonObject:
        """The choice as a chat's body has it."""
        return {"type": FUNCTION, FUNCTION: {"name": qualified(self.namespace, self.name)}}


class OtherNamedTool(OtherTool):
    named_otherwise: ClassVar[Sequence[str]] = (*OtherTool.named_otherwise, CUSTOM)

    def as_chat(self) -> JsonObject:
        """The choice as a chat's body has it."""
        return {"type": self.type}


class AllowedFunctionTools(OpenModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunctionTool | OtherNamedTool]

    def as_chat(self) -> JsonObject:
        """The choice as a chat's body has it."""
        tools = [tool.as_chat() for tool in self.tools]
        return {"type": ALLOWED, ALLOWED: {"mode": self.mode, "tools": tools}}


def chat_tools(tools: Sequence[FunctionTool] | None) -> list[JsonObject]:
    """Returns tools as a chat's body has them: also those that are left out, by their types."""
    called = [each.tool.as_chat(name) for name, each in callables(tools).items()]
    return called + [{"type": tool.type} for tool in tools or () if tool.ignored_as]


ToolsChoice = Annotated[
    Literal["none", "auto", "required"] | NamedFunctionTool | AllowedFunctionTools | OtherNamedTool,
    BeforeValidator(
        plain_choice,
        json_schema_input_type=AnyChoice | TypedChoice | NamedFunctionTool | AllowedFunctionTools,
    ),
]


def input_of(arguments: str) -> str:
    """The text that a custom tool is called with, of a call's arguments, also if they were cut off
    within it."""
    cut_off = [arguments[: len(arguments) - cut] + '"}' for cut in range(ESCAPE_CHARS)]
    for whole in (arguments, *cut_off):
        try:
            text = json.loads(whole)[INPUT]
        except (ValueError, LookupError, TypeError):
            continue
        return text if isinstance(text, str) else json.dumps(text)
    return ""
