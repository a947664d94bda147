"""Bodies of /v1/messages, and the chats that they ask for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from jaxserve.api.errors import RequestError
from jaxserve.server.anthropic.blocks import (
    assistant_messages,
    left_out,
    system_text,
    user_messages,
)
from jaxserve.server.generation.chat import ChatRequest
from jaxserve.server.generation.fields import (
    GIVEN,
    FirstFault,
    Integer,
    OpenModel,
    SchemaField,
    add_limits,
    field_of_type,
)
from jaxserve.server.generation.tools import (
    FUNCTION,
    MAX_TOOLS,
    MAX_TYPE_CHARS,
    NAME,
    anything,
    repeated,
    unjudged,
)
from jaxserve.server.json_body import JsonObject

CUSTOM = "custom"  # the type of tools that the client describes


class ClientTool(OpenModel):
    """A tool that the client describes, or one of Anthropic's, which has no effect."""

    model_config = field_of_type(CUSTOM, name={"pattern": NAME})

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
    model_config = field_of_type("tool", name=GIVEN)

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(OpenModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Integer | None = Field(None, description="has no effect")


class Message(OpenModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]

    @model_validator(mode="before")
    @classmethod
    def _given(cls, message: Any) -> Any:
        """A message whose content is null, of an assistant, has none."""
        if isinstance(message, dict) and message.get("role") == "assistant":
            return {**message, "content": message.get("content") or []}
        return message

    @property
    def left_out(self) -> Iterable[str]:
        types = left_out(self.content) if self.role == "assistant" else ()
        return [f"content.{kind}" for kind in types]

    def as_chat(self, where: str) -> Iterator[JsonObject]:
        """Yields the message as those of a chat. Errors: RequestError."""
        if self.role == "assistant":
            return assistant_messages(self.content)
        return user_messages(self.content, self.role, where)


class JsonFormat(OpenModel):
    type: Literal["json_schema"]
    schema_: SchemaField = Field(alias="schema")

    def as_chat(self) -> JsonObject:
        """The format as a chat's body has it."""
        return {"type": self.type, self.type: {"name": "answer", "schema": self.schema_}}


class OutputConfig(OpenModel):
    format: JsonFormat | None = None
    effort: Annotated[str | None, Field(max_length=32)] = None


class CountRequest(OpenModel):
    """The body of /v1/messages/count_tokens."""

    model_config = ConfigDict(json_schema_extra=add_limits)

    model: str = Field("", description="'' or absent means the one that is served")
    messages: Annotated[list[Message], FirstFault(), Field(json_schema_extra={"minItems": 1})]
    system: str | list[dict[str, Any]] | None = None
    tools: Annotated[list[ClientTool], FirstFault()] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(None, description="as output_config.format")

    @property
    def left_out(self) -> Iterable[str]:
        return repeated(tool.name for tool in self.tools or () if tool.name)

    def as_chat(self) -> ChatRequest:
        """Returns the chat that this asks for. Errors: RequestError."""
        choice = self.tool_choice
        thinks = self.thinking is None or self.thinking.type != "disabled"
        output = self.output_config or OutputConfig()
        form = output.format or self.output_format
        messages = list(self._messages())
        return ChatRequest.of(
            self,
            messages=messages,
            continue_final_message=any(map(_is_begun, messages[-1:])),
            response_format=form and form.as_chat(),
            reasoning_effort=output.effort,
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
            yield {"role": "system", "content": system_text(self.system)}
        for number, message in enumerate(self.messages):
            yield from message.as_chat(f"messages.{number}")


class MessagesRequest(CountRequest):
    """The body of /v1/messages."""

    max_tokens: Integer
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    stop_sequences: Annotated[list[str], FirstFault()] | None = None
    stream: bool | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    metadata: dict[str, Any] | None = Field(None, description="has no effect")
    service_tier: str | None = Field(None, description="has no effect")

    def _renamed(self) -> JsonObject:
        return {"stop": self.stop_sequences}


def _is_begun(message: JsonObject) -> bool:
    """Returns True for the last message of a chat if it is an answer that is to be continued."""
    has_text = message["role"] == "assistant" and bool(message["content"].strip())
    return has_text and "tool_calls" not in message


def _chat_choice(choice: ToolChoice | None) -> Any:
    if choice is None or choice.type == "auto":
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise RequestError("tool_choice.name", "is missing")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else "none"
