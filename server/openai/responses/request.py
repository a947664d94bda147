"""Bodies of /v1/responses, and the chats that they ask for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from jaxserve.api.errors import RequestError
from jaxserve.api.sampling import RANGES
from jaxserve.server.generation.chat import ChatRequest
from jaxserve.server.generation.fields import (
    GIVEN,
    INCLUDED_LOGPROBS,
    Integer,
    OnlyValues,
    OpenModel,
    SchemaField,
    add_limits,
    field_of_type,
)
from jaxserve.server.generation.tools import MAX_TOOLS
from jaxserve.server.json_body import JsonObject
from jaxserve.server.openai.responses.items import ITEM_SCHEMA, is_read, messages_of
from jaxserve.server.openai.responses.tools import (
    FunctionTool,
    ToolsChoice,
    chat_tools,
    repeated_tools,
)


class TextFormat(OpenModel):
    model_config = field_of_type("json_schema", schema=GIVEN)

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = Field(None, max_length=64)
    description: str | None = None
    schema_: SchemaField | None = Field(None, alias="schema")
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
    input: str | Annotated[list[dict[str, Any]], Field(json_schema_extra={"items": ITEM_SCHEMA})]
    instructions: str | None = None
    max_output_tokens: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Integer | None = Field(
        None, description=f"goes with include: [{INCLUDED_LOGPROBS!r}]"
    )
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
    background: Annotated[Any, OnlyValues(False, None, why="is not supported")] = None
    truncation: Literal["disabled", "auto"] | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    include: list[str] | None = Field(None, description=f"only {INCLUDED_LOGPROBS} has an effect")
    metadata: dict[str, Any] | None = Field(None, description="has no effect")
    user: str | None = Field(None, description="has no effect")
    service_tier: str | None = Field(None, description="has no effect")
    safety_identifier: str | None = Field(None, description="has no effect")
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return INCLUDED_LOGPROBS in (self.include or ())

    @property
    def input_items(self) -> list[JsonObject]:
        """The input, item by item."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input

    @property
    def left_out(self) -> Iterable[str]:
        types = dict.fromkeys(
            str(item.get("type")) for item in self.input_items if not is_read(item)
        )
        return [*(f"input.{kind}" for kind in types), *repeated_tools(self.tools)]

    def as_chat(self, earlier: Sequence[JsonObject] = ()) -> ChatRequest:
        """Returns the chat that this asks for. earlier: items of the conversation that it
        continues. Errors: RequestError."""
        if self.top_logprobs and not self.wants_logprobs:
            raise RequestError("top_logprobs", f"needs include: [{INCLUDED_LOGPROBS!r}]")
        if self.max_output_tokens is not None:
            RANGES["max_tokens"].check("max_output_tokens", self.max_output_tokens)
        return ChatRequest.of(
            self,
            messages=messages_of(self.instructions, earlier, self.input_items),
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.wants_logprobs or None,
            reasoning_effort=self.reasoning and self.reasoning.effort,
            tools=chat_tools(self.tools),
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
