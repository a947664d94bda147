"""Bodies of /v1/messages, and the chats that they ask for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from jaxserve.api.errors import RequestError
from jaxserve.server.generation.chat import ChatRequest
from jaxserve.server.generation.fields import FirstFault, OpenModel, add_limits, text_in
from jaxserve.server.generation.tools import FUNCTION, MAX_TOOLS, MAX_TYPE_CHARS, anything, unjudged
from jaxserve.server.json_body import JsonObject

CUSTOM = "custom"  # the type of tools that the client describes
# of content that models need not see again
UNSEEN_BLOCKS = ("thinking", "redacted_thinking")


class ClientTool(OpenModel):
    """A tool that the client describes, or one of Anthropic's, which has no effect."""

    name: str = ""
    type: str | None = Field(None, max_length=MAX_TYPE_CHARS)
    description: str | None = None
    input_schema: Annotated[dict[str, Any] | None, BeforeValidator(anything)] = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _unjudged(cls, tool: Any) -> Any:
        return unjudged(tool, cls.model_fields, CUSTOM)

    @model_validator(mode="after")
    def _named(self) -> ClientTool:
        if not self.name and not self.ignored_as:
            raise ValueError("has no name")
        return self

    @property
    def ignored_as(self) -> str:
        return "" if self.type in (None, CUSTOM) else str(self.type)

    def as_chat(self) -> JsonObject:
        """The tool as a chat's body has it."""
        if self.ignored_as:
            return {"type": self.ignored_as}
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
            "strict": self.strict,
        }
        return {"type": FUNCTION, FUNCTION: function}


class ToolChoice(OpenModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(OpenModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, description="has no effect")


class Message(OpenModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class CountRequest(OpenModel):
    """The body of /v1/messages/count_tokens."""

    model: str = Field("", description="'' or absent means the one that is served")
    messages: Annotated[list[Message], FirstFault(), Field(json_schema_extra={"minItems": 1})]
    system: str | list[dict[str, Any]] | None = None
    tools: Annotated[list[ClientTool], FirstFault()] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None

    def as_chat(self) -> ChatRequest:
        """Returns the chat that this asks for. Errors: RequestError."""
        choice = self.tool_choice
        thinks = self.thinking is None or self.thinking.type != "disabled"
        return ChatRequest.of(
            self,
            messages=list(self._messages()),
            tools=[tool.as_chat() for tool in self.tools or ()],
            tool_choice=_chat_choice(choice),
            parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
            chat_template_kwargs={} if thinks else {"enable_thinking": False},
            **self._renamed(),
        )

    def _renamed(self) -> JsonObject:
        """Returns the chat's fields that have other names here."""
        return {}

    def _messages(self) -> Iterator[JsonObject]:
        if self.system:
            yield {"role": "system", "content": _text(self.system, "system")}
        for number, message in enumerate(self.messages):
            yield from _chat_messages(message, f"messages.{number}")


class MessagesRequest(CountRequest):
    """The body of /v1/messages."""

    model_config = ConfigDict(json_schema_extra=add_limits)

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Annotated[list[str], FirstFault()] | None = None
    stream: bool | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    metadata: dict[str, Any] | None = Field(None, description="has no effect")
    service_tier: str | None = Field(None, description="has no effect")

    def _renamed(self) -> JsonObject:
        return {"stop": self.stop_sequences}


def _chat_choice(choice: ToolChoice | None) -> Any:
    if choice is None or choice.type == "auto":
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise RequestError("tool_choice.name", "is missing")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else "none"


def _chat_messages(message: Message, where: str) -> Iterator[JsonObject]:
    """A message as those of a chat: results of tools are messages of their own, which come first.
    Errors: RequestError."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    texts = []
    calls = []
    for number, block in enumerate(message.content):
        place = f"{where}.content.{number}"
        kind = block.get("type")
        if kind == "text":
            texts.append(text_in(block, "text", place))
        elif kind == "tool_use" and message.role == "assistant":
            calls.append(_chat_call(block, place))
        elif kind == "tool_result" and message.role == "user":
            content = _text(block.get("content") or "", f"{place}.content")
            id = text_in(block, "tool_use_id", place)
            yield {"role": "tool", "tool_call_id": id, "content": content}
        elif kind not in UNSEEN_BLOCKS:
            raise RequestError(f"{place}.type", f"{kind!a:.50} cannot be taken in a message here")
    if texts or calls:
        chat_message: JsonObject = {"role": message.role, "content": "\n".join(texts)}
        yield {**chat_message, "tool_calls": calls} if calls else chat_message


def _chat_call(block: Mapping[str, Any], where: str) -> JsonObject:
    if not isinstance(block.get("input"), dict):
        raise RequestError(f"{where}.input", "must be an object")
    function = {"name": text_in(block, "name", where), "arguments": json.dumps(block["input"])}
    return {"id": text_in(block, "id", where), "type": "function", "function": function}


def _text(content: str | Sequence[Mapping[str, Any]], where: str) -> str:
    """The text of a content. Errors: RequestError for anything but text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(where, "must be a text or a list of texts")
    texts = []
    for number, block in enumerate(content):
        place = f"{where}.{number}"
        if not isinstance(block, dict) or block.get("type") != "text":
            raise RequestError(place, "must be a block of type text")
        texts.append(text_in(block, "text", place))
    return "\n".join(texts)
