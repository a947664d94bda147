"""Writes the answers of /v1/messages: a message of blocks, whole or as events."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Finished, Usage
from jaxserve.server.anthropic.schemas import MessagesRequest
from jaxserve.server.frontend import Frontend
from jaxserve.server.generation.chat import ChatRequest
from jaxserve.server.generation.chat_parts import ChatParts
from jaxserve.server.http_errors import error_body
from jaxserve.server.json_body import JsonObject
from jaxserve.server.streams import Stream
from jaxserve.text.chat_output import Arguments, CallBegin, Part, Reasoning, Text
from jaxserve.text.chat_output.parts import joined
from jaxserve.text.output import Completion, Delta, Output

_KINDS = {  # of the block that a part belongs to
    Text: "text",
    Reasoning: "thinking",
    CallBegin: "tool_use",
    Arguments: "tool_use",
}


class MessagesWriter:
    """Writes messages; see `ResponseWriter`."""

    operation = "chat"
    echoes = False
    named_events = True

    def __init__(self, frontend: Frontend, body: MessagesRequest, chat: ChatRequest):
        self._parts = ChatParts(frontend, chat)
        self._model = body.model or frontend.info.served_name
        self._prompt_tokens = 0
        self._blocks = 0  # that have begun
        self._open = ""  # the type of the block that is being written
        self.head: JsonObject = {}

    def open(self, streams: Sequence[Stream]) -> None:
        self._parts.open(streams[0])
        self._prompt_tokens = len(streams[0].request.prompt)
        self.head = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
        }

    def first_chunks(self) -> Iterator[JsonObject]:
        usage = _usage(Usage(self._prompt_tokens, 0, 0))
        message = {**self.head, "content": [], **_stop("", None), "usage": usage}
        yield {"type": "message_start", "message": message}

    def chunks(self, number: int, output: Output) -> Iterator[JsonObject]:
        if isinstance(output, Delta):
            yield from self._added(self._parts.read(output))
        elif isinstance(output, Finished):
            yield from self._added(self._parts.flush(0))
            yield from self._block_done()
            stop = self._stop_of(output)
            yield {"type": "message_delta", "delta": stop, "usage": self.usage([output])}
            yield {"type": "message_stop"}

    def whole(self, completions: Sequence[Sequence[Completion]]) -> JsonObject:
        completion = completions[0][0]
        parts = joined([*self._parts.read(completion), *self._parts.flush(0)])
        return {
            **self.head,
            "content": list(_blocks(parts)),
            **self._stop_of(completion),
            "usage": self.usage([completion]),
        }

    def usage(self, ended: Sequence[Finished | Completion]) -> JsonObject:
        return _usage(ended[0].usage)

    def failed(self, error: RequestError) -> JsonObject:
        return error_body(error)

    def _stop_of(self, ended: Finished | Completion) -> JsonObject:
        if ended.reason == "stop" and self._parts.calls(0):
            return _stop("tool_use", None)
        return _stop(ended.reason, ended.stop)

    def _added(self, parts: Sequence[Part]) -> Iterator[JsonObject]:
        """Adds parts to the newest block, or begins another."""
        for part in parts:
            kind = _KINDS[type(part)]
            if isinstance(part, CallBegin) or self._open != kind:
                yield from self._block_done()
                self._open = kind
                self._blocks += 1
                block = _block(part)
                yield self._event("content_block_start", content_block=block)
            if not isinstance(part, CallBegin):
                yield self._event("content_block_delta", delta=_delta(part))

    def _block_done(self) -> Iterator[JsonObject]:
        if self._open:
            self._open = ""
            yield self._event("content_block_stop")

    def _event(self, type: str, **fields: Any) -> JsonObject:
        return {"type": type, "index": self._blocks - 1, **fields}


def _block(part: Part) -> JsonObject:
    """The block that a part begins, without the part's text."""
    match part:
        case CallBegin():
            id = f"toolu_{secrets.token_hex(12)}"
            return {"type": "tool_use", "id": id, "name": part.name, "input": {}}
        case Reasoning():
            return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _delta(part: Text | Reasoning | Arguments) -> JsonObject:
    match part:
        case Arguments():
            return {"type": "input_json_delta", "partial_json": part.text}
        case Reasoning():
            return {"type": "thinking_delta", "thinking": part.text}
    return {"type": "text_delta", "text": part.text}


def _blocks(parts: Sequence[Part]) -> Iterator[JsonObject]:
    """The blocks of a whole message."""
    block: JsonObject = {}
    for part in parts:
        if not isinstance(part, Arguments):
            if block:
                yield block
            block = _block(part)
        match part:
            case Arguments():
                block["input"] = _object(part.text)
            case Reasoning():
                block["thinking"] = part.text
            case Text():
                block["text"] = part.text
    if block:
        yield block


def _object(arguments: str) -> Any:
    """The value of a call's arguments; {} for those that were cut off, as `max_tokens` tells."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


def _stop(reason: str, stop: str | int | None) -> JsonObject:
    """Returns the fields that say why a message has ended; reason '': it has not."""
    if reason == "stop":
        reason = "stop_sequence" if isinstance(stop, str) else "end_turn"
    names = {"length": "max_tokens"}
    sequence = stop if isinstance(stop, str) else None
    return {"stop_reason": names.get(reason, reason) or None, "stop_sequence": sequence}


def _usage(usage: Usage) -> JsonObject:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }
