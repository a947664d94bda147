"""Tools of /v1/responses and the choice of them, and what they are in a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

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


class FunctionTool(AnyTool):
    """A function, or a tool of another type, which has no effect."""

    name: str | None = None
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, BeforeValidator(anything)] = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, tool: Any) -> Any:
        return unjudged(flat(tool), cls.model_fields, FUNCTION)

    @model_validator(mode="after")
    def _named(self) -> FunctionTool:
        if self.name is None and self.type == FUNCTION:
            raise ValueError("has no name")
        return self

    def as_chat(self) -> JsonObject:
        """The tool as a chat's body has it."""
        if self.type != FUNCTION:
            return {"type": self.type}
        fields = self.model_dump(include={"name", "description", "parameters", "strict"})
        return {"type": FUNCTION, FUNCTION: fields}


class NamedFunctionTool(OpenModel):
    type: Literal["function"]
    name: str

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, tool: Any) -> Any:
        return flat(tool)

    def as_chat(self) -> JsonObject:
        """The choice as a chat's body has it."""
        return {"type": FUNCTION, FUNCTION: {"name": self.name}}


class OtherNamedTool(OtherTool):
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
