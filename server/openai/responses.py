"""/v1/responses: the newer of the OpenAI protocol's ways to chat, which agents use.

A body becomes that of a chat, and what comes of it is written as output items: a message, and the
calls of tools. Nothing is stored: each request brings the whole conversation, as agents do with
`store=false`. Tools that a server would run itself (search, files, computers) are refused.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Finished
from jaxserve.server.frontend import Frontend
from jaxserve.server.http_errors import error_body
from jaxserve.server.json_body import JsonObject
from jaxserve.server.openai.chat_parts import ChatParts
from jaxserve.server.openai.schemas import ChatRequest
from jaxserve.server.openai.unknown_fields import OpenModel
from jaxserve.server.streams import Stream
from jaxserve.text.chat_output import Arguments, CallBegin, Part, Reasoning, Text
from jaxserve.text.output import Completion, Delta, Output

MAX_ITEMS = 10_000
NOT_STORED = "responses are not stored here: send the whole conversation as input"
_ITEM_OF: Mapping[type, str] = {
    Text: "message",
    Reasoning: "reasoning",
    CallBegin: "function_call",
    Arguments: "function_call",
}
_PREFIX = {"message": "msg", "reasoning": "rs", "function_call": "fc"}  # of an item's id
_EVENT_OF = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}
_EXTRA: Mapping[str, JsonObject] = {
    "message": {"logprobs": []},
    "reasoning": {},
    "function_call": {},
}
TEXT_PARTS = ("input_text", "output_text", "text")


class TextFormat(OpenModel):
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


class FunctionTool(OpenModel):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(OpenModel):
    type: Literal["function"]
    name: str


class ResponsesRequest(OpenModel):
    model: str = Field("", description="'' or absent means the one that is served")
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    previous_response_id: None = Field(None, description=NOT_STORED)
    conversation: None = Field(None, description=NOT_STORED)
    background: Literal[False] | None = None
    truncation: Literal["disabled", "auto"] | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    store: bool | None = Field(None, description="has no effect: nothing is stored")
    include: list[str] | None = Field(None, description="has no effect")
    metadata: dict[str, Any] | None = Field(None, description="has no effect")
    user: str | None = Field(None, description="has no effect")
    service_tier: str | None = Field(None, description="has no effect")
    safety_identifier: str | None = Field(None, description="has no effect")
    prompt_cache_key: str | None = Field(None, description="has no effect")
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    def as_chat(self) -> ChatRequest:
        """The chat that this asks for. Errors: RequestError."""
        fields: JsonObject = {
            "model": self.model,
            "messages": _messages(self.instructions, self.input),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "cache_salt": self.cache_salt,
            "prompt_cache_retention": self.prompt_cache_retention,
            "tools": [_chat_tool(tool) for tool in self.tools] if self.tools else None,
            "tool_choice": _chat_choice(self.tool_choice),
            "response_format": _chat_format(self.text),
        }
        return ChatRequest.of(fields)


def _chat_tool(tool: FunctionTool) -> JsonObject:
    known = tool.model_dump(include={"name", "description", "parameters", "strict"})
    return {"type": "function", "function": known}


def _chat_choice(choice: str | ToolChoice | None) -> Any:
    if isinstance(choice, ToolChoice):
        return {"type": "function", "function": {"name": choice.name}}
    return choice


def _shown_choice(choice: str | ToolChoice | None) -> Any:
    """The choice as a response tells it."""
    return choice.model_dump() if isinstance(choice, ToolChoice) else choice or "auto"


def _chat_format(text: TextSettings | None) -> JsonObject | None:
    wanted = text.format if text else None
    if wanted is None or wanted.type != "json_schema":
        return None if wanted is None else {"type": wanted.type}
    if wanted.schema_ is None:
        raise RequestError("text.format.schema", "is missing")
    schema = {"name": wanted.name or "answer", "schema": wanted.schema_, "strict": wanted.strict}
    return {"type": "json_schema", "json_schema": schema}


def _messages(instructions: str | None, given: str | list[dict[str, Any]]) -> list[JsonObject]:
    """A conversation as the messages of a chat. Errors: RequestError that names the item."""
    messages: list[JsonObject] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not given or len(given) > MAX_ITEMS:
        raise RequestError("input", f"must have 1 to {MAX_ITEMS} items")
    for number, item in enumerate(given):
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
            call = {"name": _string(item, "name", where)}
            call["arguments"] = _string(item, "arguments", where)
            made = {"id": _string(item, "call_id", where), "type": "function", "function": call}
            if not (messages and messages[-1]["role"] == "assistant"):
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(made)
        case "function_call_output":
            content = _text(item.get("output"), f"{where}.output")
            id = _string(item, "call_id", where)
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
        known = isinstance(part, dict) and part.get("type") in TEXT_PARTS
        if not known or not isinstance(part.get("text"), str):
            raise RequestError(where, f"has a part that is none of {', '.join(TEXT_PARTS)}")
        texts.append(part["text"])
    return "".join(texts)


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    if not isinstance(item.get(name), str):
        raise RequestError(f"{where}.{name}", "must be a text")
    return item[name]


class ResponsesWriter:
    """Writes responses; see `ResponseWriter`."""

    operation = "chat"
    echoes = False
    named_events = True

    def __init__(self, frontend: Frontend, body: ResponsesRequest, chat: ChatRequest):
        self._body = body
        self._parts = ChatParts(frontend, chat)
        self._model = body.model or frontend.info.served_name
        self._number = 0  # of the next event
        self._items: list[JsonObject] = []
        self._open = ""  # the type of the item that is being written
        self._written = ""  # its text so far
        self.head: JsonObject = {}

    def open(self, streams: Sequence[Stream]) -> None:
        self._parts.open(streams[0])
        body = self._body
        self.head = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": _shown_choice(body.tool_choice),
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "metadata": body.metadata or {},
        }
        if body.text is not None and body.text.format is not None:
            shown = body.text.format.model_dump(by_alias=True, exclude_none=True)
            self.head["text"] = {"format": shown}

    def first_chunks(self) -> Iterator[JsonObject]:
        yield self._event("response.created", response=self.head)
        yield self._event("response.in_progress", response=self.head)

    def chunks(self, number: int, output: Output) -> Iterator[JsonObject]:
        if isinstance(output, Delta):
            yield from self._added(self._parts.read(0, output.text))
        elif isinstance(output, Finished):
            yield from self._added(self._parts.flush(0))
            yield from self._item_done()
            response = self._response(self._items, output)
            name = "incomplete" if response["incomplete_details"] else "completed"
            yield self._event(f"response.{name}", response=response)

    def whole(self, completions: Sequence[Sequence[Completion]]) -> JsonObject:
        completion = completions[0][0]
        parts = self._parts.read(0, completion.text) + self._parts.flush(0)
        for _ in (*self._added(parts), *self._item_done()):
            pass  # what a stream would tell: the items are made meanwhile
        return self._response(self._items, completion)

    def failed(self, error: RequestError) -> JsonObject:
        return self._event("error", **error_body(error)["error"])

    def _response(self, items: Sequence[JsonObject], ended: Finished | Completion) -> JsonObject:
        cut = ended.reason == "length"
        usage = ended.usage
        return {
            **self.head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": items,
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt + usage.completion,
            },
        }

    # --- output items

    def _added(self, parts: Iterable[Part]) -> Iterator[JsonObject]:
        """Adds parts to the newest item, or begins another."""
        for part in parts:
            kind = _ITEM_OF[type(part)]
            if isinstance(part, CallBegin) or self._open != kind:
                yield from self._item_done()
                yield from self._item_begun(kind, part)
            if not isinstance(part, CallBegin):
                self._written += part.text
                yield self._of_item(f"{_EVENT_OF[kind]}.delta", delta=part.text, **_EXTRA[kind])

    def _item_begun(self, kind: str, part: Part) -> Iterator[JsonObject]:
        self._open = kind
        self._written = ""
        item: JsonObject = {"id": f"{_PREFIX[kind]}_{secrets.token_hex(12)}", "type": kind}
        match part:
            case CallBegin():
                call = {"call_id": f"call_{secrets.token_hex(12)}", "name": part.name}
                item |= {**call, "arguments": "", "status": "in_progress"}
            case Reasoning():
                item |= {"summary": [], "content": [], "status": "in_progress"}
            case _:
                item |= {"role": "assistant", "status": "in_progress", "content": []}
        self._items.append(item)
        yield self._item_event("response.output_item.added", dict(item))
        if kind != "function_call":
            yield self._of_item("response.content_part.added", part=_part(kind, ""))

    def _item_done(self) -> Iterator[JsonObject]:
        """Ends the newest item, if it is still being written."""
        kind, self._open = self._open, ""
        if not kind:
            return
        item = self._items[-1]
        item["status"] = "completed"
        if kind == "function_call":
            item["arguments"] = self._written
            whole = {"arguments": self._written, "name": item["name"]}
            yield self._of_item(f"{_EVENT_OF[kind]}.done", **whole)
        else:
            part = _part(kind, self._written)
            item["content"] = [part]
            yield self._of_item(f"{_EVENT_OF[kind]}.done", text=self._written, **_EXTRA[kind])
            yield self._of_item("response.content_part.done", part=part)
        yield self._item_event("response.output_item.done", dict(item))

    # --- events

    def _event(self, event: str, **fields: Any) -> JsonObject:
        number, self._number = self._number, self._number + 1
        return {**fields, "type": event, "sequence_number": number}

    def _item_event(self, type: str, item: JsonObject) -> JsonObject:
        return self._event(type, output_index=len(self._items) - 1, item=item)

    def _of_item(self, type: str, **fields: Any) -> JsonObject:
        """An event about the newest item, or about its only part."""
        item = self._items[-1]
        place: JsonObject = {} if item["type"] == "function_call" else {"content_index": 0}
        index = len(self._items) - 1
        return self._event(type, item_id=item["id"], output_index=index, **place, **fields)


def _part(kind: str, text: str) -> JsonObject:
    """The content of an item."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
