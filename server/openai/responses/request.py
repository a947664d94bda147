"""Bodies of /v1/responses, and the chats that they ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import ConfigDict, Field

from jaxserve.api.errors import RequestError
from jaxserve.server.generation.chat import ChatRequest
from jaxserve.server.generation.fields import OpenModel, add_limits, schema_in, text_in
from jaxserve.server.generation.tools import MAX_TOOLS
from jaxserve.server.json_body import JsonObject
from jaxserve.server.openai.responses.tools import FunctionTool, ToolsChoice

MAX_ITEMS = 10_000
LOGPROBS = "message.output_text.logprobs"  # what `include` calls them
TEXT_PARTS = ("input_text", "output_text", "text")


class TextFormat(OpenModel):
    model_config = schema_in("schema")

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = Field(None, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class TextSettings(OpenModel):
    format: TextFormat | None = None
    verbosity: str | None = Field(None, description="has no effect")


class ReasoningSettings(OpenModel):
    effort: str | None = Field(None, max_length=32)
    summary: str | None = Field(None, description="has no effect")


class ResponsesRequest(OpenModel):
    model_config = ConfigDict(json_schema_extra=add_limits)

    model: str = Field("", description="'' or absent means the one that is served")
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = Field(None, description=f"goes with include: [{LOGPROBS!r}]")
    stream: bool | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    previous_response_id: str | None = Field(
        None, description="of a stored response: this one continues its conversation"
    )
    store: bool | None = Field(None, description="whether to store the response; default: no")
    conversation: None = Field(None, description="is not supported: give previous_response_id")
    background: Literal[False] | None = None
    truncation: Literal["disabled", "auto"] | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    include: list[str] | None = Field(None, description=f"only {LOGPROBS} has an effect")
    metadata: dict[str, Any] | None = Field(None, description="has no effect")
    user: str | None = Field(None, description="has no effect")
    service_tier: str | None = Field(None, description="has no effect")
    safety_identifier: str | None = Field(None, description="has no effect")
    prompt_cache_key: str | None = Field(None, description="has no effect")
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def input_items(self) -> list[JsonObject]:
        """The input, item by item."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input

    def as_chat(self, earlier: Sequence[JsonObject] = ()) -> ChatRequest:
        """Returns the chat that this asks for. earlier: items of the conversation that it
        continues. Errors: RequestError."""
        if self.top_logprobs and not self.wants_logprobs:
            raise RequestError("top_logprobs", f"needs include: [{LOGPROBS!r}]")
        return ChatRequest.of(
            self,
            messages=_messages(self.instructions, earlier, self.input_items),
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.wants_logprobs or None,
            reasoning_effort=self.reasoning and self.reasoning.effort,
            tools=[tool.as_chat() for tool in self.tools or ()],
            tool_choice=_chat_choice(self.tool_choice),
            response_format=_chat_format(self.text),
        )


def _chat_choice(choice: ToolsChoice | None) -> Any:
    return choice if choice is None or isinstance(choice, str) else choice.as_chat()


def _chat_format(text: TextSettings | None) -> JsonObject | None:
    wanted = text.format if text else None
    if wanted is None or wanted.type != "json_schema":
        return None if wanted is None else {"type": wanted.type}
    if wanted.schema_ is None:
        raise RequestError("text.format.schema", "is missing")
    schema = {"name": wanted.name or "answer", "schema": wanted.schema_, "strict": wanted.strict}
    return {"type": "json_schema", "json_schema": schema}


def _messages(
    instructions: str | None, earlier: Sequence[JsonObject], items: Sequence[JsonObject]
) -> list[JsonObject]:
    """A conversation as the messages of a chat. Errors: RequestError that names the item."""
    messages: list[JsonObject] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if not items or len(earlier) + len(items) > MAX_ITEMS:
        raise RequestError("input", f"must have 1 to {MAX_ITEMS} items, with those it continues")
    for item in earlier:
        _add_item(messages, item, "previous_response_id")
    for number, item in enumerate(items):
        _add_item(messages, item, f"input.{number}")
    return messages


def _add_item(messages: list[JsonObject], item: Mapping[str, Any], where: str) -> None:
    """Adds an item of a conversation to its messages."""
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if role not in ("user", "assistant", "system", "developer"):
                raise RequestError(f"{where}.role", "must be user, assistant, system or developer")
            role = "system" if role == "developer" else role
            content = _text(item.get("content"), f"{where}.content")
            messages.append({"role": role, "content": content})
        case "function_call":
            call = {"name": text_in(item, "name", where)}
            call["arguments"] = text_in(item, "arguments", where)
            tool_call = {
                "id": text_in(item, "call_id", where),
                "type": "function",
                "function": call,
            }
            if not (messages and messages[-1]["role"] == "assistant"):
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(tool_call)
        case "function_call_output":
            content = _text(item.get("output"), f"{where}.output")
            id = text_in(item, "call_id", where)
            messages.append({"role": "tool", "tool_call_id": id, "content": content})
        case "reasoning":
            pass  # models do not see their earlier thoughts
        case other:
            raise RequestError(f"{where}.type", f"{other!a:.50} is not an item that is known here")


def _text(content: Any, where: str) -> str:
    """The text of a content. Errors: RequestError for anything but text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(where, "must be a text or a list of texts")
    texts = []
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") in TEXT_PARTS
        if not is_text or not isinstance(part.get("text"), str):
            raise RequestError(where, f"has a part that is none of {', '.join(TEXT_PARTS)}")
        texts.append(part["text"])
    return "".join(texts)
