"""Tools of chats, and the choice of them.

A model may call functions. Other tools, which a server would run or which are not called in JSON,
are left out of what it sees, and reported as fields without effect are.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Container, Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator, model_validator

from jaxserve.api.errors import RequestError
from jaxserve.server.generation.fields import GIVEN, OpenModel, field_of_type
from jaxserve.server.json_body import JsonObject

FUNCTION: Literal["function"] = "function"
ALLOWED = "allowed_tools"
MAX_TOOLS = 1024  # OpenAI's limit of 128 is short for agents with several MCP servers
MAX_TYPE_CHARS = 64
# as long as Anthropic allows, in all protocols: OpenAI's limit of 64 is short for MCP
NAME = r"^[A-Za-z0-9_.:/-]{1,128}$"
_SHOWN = ("type", "name", "description")
_NAMES = {"input_schema": "parameters"}  # of fields in /v1/messages


def nested(tool: Any) -> Any:
    """Returns a tool, or the choice of one, with its function in a field of its own, also if it was
    written as /v1/responses or /v1/messages have it."""
    if not isinstance(tool, dict) or tool.get("type") not in (None, FUNCTION):
        return tool
    if FUNCTION in tool or "name" not in tool:
        return {**tool, "type": FUNCTION}
    function = {_NAMES.get(name, name): value for name, value in tool.items() if name != "type"}
    return {"type": FUNCTION, FUNCTION: function}


def flat(tool: Any) -> Any:
    """Returns a tool, or the choice of one, with its function's fields among its own, also if it
    was written as /v1/chat/completions or /v1/messages have it."""
    match nested(tool):
        case {"type": "function", "function": {**fields}}:
            return {**fields, "type": FUNCTION}
        case other:
            return other


def unjudged(tool: Any, fields: Container[str], *types: str) -> Any:
    """Returns a tool without the fields in which a tool of some types, or without a type, may be
    wrong, if it is of another."""
    if not isinstance(tool, dict) or tool.get("type") in (None, *types):
        return tool
    return {
        name: value
        for name, value in tool.items()
        if name not in fields or (name in _SHOWN and isinstance(value, str))
    }


def anything(schema: Any) -> Any:
    """Returns a schema as a tool without one has it, if it is that of anything."""
    return None if schema is True else schema


class AnyTool(OpenModel):
    """A tool of some type. The others than functions have no effect."""

    type: Annotated[
        str,
        Field(max_length=MAX_TYPE_CHARS),
        WithJsonSchema({"type": ["string", "null"], "maxLength": MAX_TYPE_CHARS}),
    ] = FUNCTION

    @property
    def ignored_as(self) -> str:
        return "" if self.type == FUNCTION else self.type


class Function(OpenModel):
    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, BeforeValidator(anything)] = None
    strict: bool | None = None

    def as_message(self) -> JsonObject:
        """The function as the model's chat template takes it."""
        shown = self.model_dump(include=set(Function.model_fields), exclude_none=True)
        return {"type": FUNCTION, FUNCTION: shown}


class Tool(AnyTool):
    model_config = field_of_type(FUNCTION, function=GIVEN)

    function: Function | None = None

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, tool: Any) -> Any:
        return unjudged(nested(tool), cls.model_fields, FUNCTION)

    @model_validator(mode="after")
    def _whole(self) -> Tool:
        if self.type == FUNCTION and self.function is None:
            raise ValueError("has no function")
        return self


class NamedFunction(OpenModel):
    name: str


class NamedTool(OpenModel):
    type: Literal["function"]
    function: NamedFunction

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, tool: Any) -> Any:
        return nested(tool)


class OtherTool(OpenModel):
    """Names a tool that is no function."""

    named_otherwise: ClassVar[Sequence[str]] = (FUNCTION, ALLOWED)
    type: str = Field(max_length=MAX_TYPE_CHARS)

    @field_validator("type")
    @classmethod
    def _is_other(cls, type: str) -> str:
        if type in cls.named_otherwise:
            raise ValueError("is not named as a tool of this type is")
        return type


class AllowedTools(OpenModel):
    mode: Literal["auto", "required"]
    tools: list[NamedTool | OtherTool]


class AllowedChoice(OpenModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


AnyChoice = Literal["none", "auto", "required", "any"]


class TypedChoice(OpenModel):
    """A choice of no tool in particular, as Mistral and Anthropic have it."""

    type: AnyChoice


def plain_choice(choice: Any) -> Any:
    """Returns a choice as OpenAI has it, also if it was written as Mistral or Anthropic do. Other
    fields of such a choice have no effect."""
    if isinstance(choice, dict) and choice.get("type") in CHOICES:
        choice = choice["type"]
    return "required" if choice == "any" else choice


CHOICES = get_args(AnyChoice)
Choice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | AllowedChoice | OtherTool,
    # without OtherTool, which `ChosenTools.check` refuses with the reason
    BeforeValidator(
        plain_choice, json_schema_input_type=AnyChoice | TypedChoice | NamedTool | AllowedChoice
    ),
]


def repeated(names: Iterable[str]) -> list[str]:
    """The names that come more than once, as they are reported: the first tool counts."""
    counts = collections.Counter(names)
    return [f"tools.{name} (repeated)" for name, count in counts.items() if count > 1]


@dataclasses.dataclass(frozen=True, slots=True)
class ChosenTools:
    """The tools of a chat that the model may call, and whether it has to call one."""

    tools: Sequence[Tool]
    choice: Choice | None

    @property
    def functions(self) -> Sequence[Function]:
        """Returns the functions that the model may call."""
        functions = [] if self.choice == "none" else self._functions
        if isinstance(self.choice, AllowedChoice):
            return [function for function in functions if function.name in self._names]
        return functions

    @property
    def required(self) -> bool:
        """True if the output must be a call."""
        if isinstance(self.choice, AllowedChoice):
            return self.choice.allowed_tools.mode == "required"
        return self.choice == "required" or isinstance(self.choice, NamedTool)

    @property
    def named(self) -> str | None:
        """The function that must be called, if it is one."""
        return self.choice.function.name if isinstance(self.choice, NamedTool) else None

    def check(self) -> None:
        """Refuses a choice that is not among the functions. Errors: RequestError."""
        names = [function.name for function in self._functions]
        left_out = ""
        if others := {tool.type for tool in self.tools} - {FUNCTION}:
            left_out = f"; tools of type {', '.join(sorted(others))[:100]!a} are left out"
        if isinstance(self.choice, OtherTool):
            raise RequestError("tool_choice", f"{self.choice.type!a:.80} is no function{left_out}")
        for name in self._names:
            if name not in names:
                raise RequestError("tool_choice", f"{name!r:.100} is not among the tools{left_out}")
        if self.required and not self.functions:
            raise RequestError("tool_choice", f"is required, but there is no function{left_out}")

    @property
    def _functions(self) -> list[Function]:
        """Functions by their names; of two of one name the first."""
        functions = [tool.function for tool in self.tools if tool.function is not None]
        return list({function.name: function for function in reversed(functions)}.values())[::-1]

    @property
    def _names(self) -> Sequence[str]:
        """Functions that the choice names."""
        match self.choice:
            case NamedTool(function=function):
                return [function.name]
            case AllowedChoice(allowed_tools=allowed):
                return [tool.function.name for tool in allowed.tools if isinstance(tool, NamedTool)]
        return []
