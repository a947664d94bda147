"""Tools of /v1/responses and the choice of them, and what they are in a chat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from jaxserve.server.generation.fields import OpenModel
from jaxserve.server.generation.tools import (
    ALLOWED,
    FUNCTION,
    AnyTool,
    OtherTool,
    anything,
    flat,
    unjudged,
)
from jaxserve.server.json_body import JsonObject

CUSTOM = "custom"
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
    or a tool of another type, which has no effect."""

    name: str | None = None
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, BeforeValidator(anything)] = None
    strict: bool | None = None
    format: dict[str, Any] | None = Field(None, description="of a custom tool's text")

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, tool: Any) -> Any:
        return unjudged(flat(tool), cls.model_fields, FUNCTION, CUSTOM)

    @property
    def ignored_as(self) -> str:
        return "" if self.type == CUSTOM else super().ignored_as

    @model_validator(mode="after")
    def _named(self) -> FunctionTool:
        if self.name is None and not self.ignored_as:
            raise ValueError("has no name")
        return self

    def as_chat(self) -> JsonObject:
        """The tool as a chat's body has it."""
        if self.ignored_as:
            return {"type": self.type}
        if self.type == CUSTOM:
            function = {
                "name": self.name,
                "description": self._custom_description(),
                "parameters": _INPUT_SCHEMA,
            }
            return {"type": FUNCTION, FUNCTION: function}
        fields = self.model_dump(include={"name", "description", "parameters", "strict"})
        return {"type": FUNCTION, FUNCTION: fields}

    def _custom_description(self) -> str:
        """What the model is told of a custom tool: also the grammar of its text, which is not
        enforced."""
        texts = [
            self.description or "",
            f"The argument {INPUT!r} is the tool's whole input, a text.",
        ]
        grammar = (self.format or {}).get("definition")
        if isinstance(grammar, str):
            texts.append(f"It matches this grammar:\n{grammar}")
        return "\n".join(filter(None, texts))


class NamedFunctionTool(OpenModel):
    type: Literal["function", "custom"]
    name: str

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, tool: Any) -> Any:
        return flat(tool)

    def as_chat(self) -> JsonObject:
        """The choice as a chat's body has it."""
        return {"type": FUNCTION, FUNCTION: {"name": self.name}}


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


ToolsChoice = (
    Literal["none", "auto", "required"] | NamedFunctionTool | AllowedFunctionTools | OtherNamedTool
)


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
