"""Writes responses: whole, or as the events of their making."""

from __future__ import annotations

import bisect
import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Finished
from jaxserve.server.frontend import Frontend
from jaxserve.server.generation.chat import ChatRequest
from jaxserve.server.generation.chat_parts import ChatParts
from jaxserve.server.generation.token_writer import TokenWriter
from jaxserve.server.http_errors import error_body
from jaxserve.server.json_body import JsonObject
from jaxserve.server.openai.responses.request import ResponsesRequest
from jaxserve.server.openai.responses.tools import CUSTOM, callables, input_of
from jaxserve.server.streams import Stream
from jaxserve.text.chat_output import Arguments, CallBegin, Part, Reasoning, Text
from jaxserve.text.output import Completion, Delta, Output

_ITEM_OF: Mapping[type, str] = {
    Text: "message",
    Reasoning: "reasoning",
    CallBegin: "function_call",
    Arguments: "function_call",
}
_CUSTOM_CALL = "custom_tool_call"
_CALLS = ("function_call", _CUSTOM_CALL)
# of an item's id
_PREFIX = {"message": "msg", "reasoning": "rs", "function_call": "fc", _CUSTOM_CALL: "ctc"}
_EVENT_OF = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    _CUSTOM_CALL: "response.custom_tool_call_input",
}


class ResponsesWriter:
    """Writes responses; see `ResponseWriter`."""

    operation = "chat"
    echoes = False
    named_events = True

    def __init__(
        self,
        frontend: Frontend,
        body: ResponsesRequest,
        chat: ChatRequest,
        store: Callable[[JsonObject], None] | None,
    ):
        """store: called with the response once it is whole, unless it is None."""
        self._body = body
        self._store = store
        self._tokens = TokenWriter(frontend.tokenizer)
        self._parts = ChatParts(frontend, chat)
        self._callables = callables(body.tools)
        self._model = body.model or frontend.info.served_name
        self._number = 0  # of the next event
        self._items: list[JsonObject] = []
        self._open = ""  # the type of the item that is being written
        self._written = ""  # its text so far
        self._logprobs: list[JsonObject] = []  # its tokens', where it is a message
        self._pending_logprobs: list[JsonObject] = []  # of tokens whose text no item has yet
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
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None},
            "store": self._store is not None,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": _shown_choice(body),
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
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
            self._read_logprobs(output)
            yield from self._added(self._parts.read(output))
        elif isinstance(output, Finished):
            yield from self._added(self._parts.flush(0))
            yield from self._item_done()
            response = self._response(self._items, output)
            name = "incomplete" if response["incomplete_details"] else "completed"
            yield self._event(f"response.{name}", response=response)

    def whole(self, completions: Sequence[Sequence[Completion]]) -> JsonObject:
        completion = completions[0][0]
        self._read_logprobs(completion)
        parts = self._parts.read(completion) + self._parts.flush(0)
        for _ in (*self._added(parts), *self._item_done()):
            pass  # what a stream would tell: the items are made meanwhile
        return self._response(self._items, completion)

    def usage(self, ended: Sequence[Finished | Completion]) -> JsonObject:
        usage = ended[0].usage
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": self._parts.reasoning_tokens},
            "total_tokens": usage.prompt + usage.completion,
        }

    def failed(self, error: RequestError) -> JsonObject:
        return self._event("error", **error_body(error)["error"])

    def _response(self, items: Sequence[JsonObject], ended: Finished | Completion) -> JsonObject:
        cut = ended.reason == "length"
        response = {
            **self.head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": items,
            "usage": self.usage([ended]),
        }
        if self._store is not None:
            self._store(response)
        return response

    # --- output items

    def _added(self, parts: Iterable[Part]) -> Iterator[JsonObject]:
        """Adds parts to the newest item, or begins another."""
        for part in parts:
            kind = self._kind(part)
            if isinstance(part, CallBegin) or self._open != kind:
                yield from self._item_done()
                yield from self._item_begun(kind, part)
            if not isinstance(part, CallBegin):
                self._written += part.text
                if kind == _CUSTOM_CALL:  # sent when its text can be read
                    continue
                logprobs = self._made(kind, part.text) if self._pending_logprobs else []
                extra = {"logprobs": logprobs} if kind == "message" else {}
                yield self._of_item(f"{_EVENT_OF[kind]}.delta", delta=part.text, **extra)

    def _kind(self, part: Part) -> str:
        """The type of the item that a part belongs to."""
        match part:
            case CallBegin(name=name) if name in self._callables:
                if self._callables[name].tool.type == CUSTOM:
                    return _CUSTOM_CALL
            case Arguments() if self._open == _CUSTOM_CALL:
                return _CUSTOM_CALL
        return _ITEM_OF[type(part)]

    def _item_begun(self, kind: str, part: Part) -> Iterator[JsonObject]:
        self._open = kind
        self._written = ""
        self._logprobs = []
        item: JsonObject = {"id": f"{_PREFIX[kind]}_{secrets.token_hex(12)}", "type": kind}
        match part:
            case CallBegin():
                call: JsonObject = {"call_id": f"call_{secrets.token_hex(12)}", "name": part.name}
                if part.name in self._callables:
                    call |= self._callables[part.name].called()
                field = "input" if kind == _CUSTOM_CALL else "arguments"
                item |= {**call, field: "", "status": "in_progress"}
            case Reasoning():
                item |= {"summary": [], "content": [], "status": "in_progress"}
            case _:
                item |= {"role": "assistant", "status": "in_progress", "content": []}
        self._items.append(item)
        yield self._item_event("response.output_item.added", dict(item))
        if kind not in _CALLS:
            yield self._of_item("response.content_part.added", part=self._part())

    def _item_done(self) -> Iterator[JsonObject]:
        """Ends the newest item, if it is still being written."""
        kind = self._open
        if not kind:
            return
        item = self._items[-1]
        item["status"] = "completed"
        if kind == "function_call":
            item["arguments"] = self._written
            fields = {"arguments": self._written, "name": item["name"]}
            yield self._of_item(f"{_EVENT_OF[kind]}.done", **fields)
        elif kind == _CUSTOM_CALL:
            item["input"] = input_of(self._written)
            yield self._of_item(f"{_EVENT_OF[kind]}.delta", delta=item["input"])
            yield self._of_item(f"{_EVENT_OF[kind]}.done", input=item["input"])
        else:
            part = self._part()
            item["content"] = [part]
            extra = {"logprobs": self._logprobs} if kind == "message" else {}
            yield self._of_item(f"{_EVENT_OF[kind]}.done", text=self._written, **extra)
            yield self._of_item("response.content_part.done", part=part)
        yield self._item_event("response.output_item.done", dict(item))
        self._open = ""

    def _part(self) -> JsonObject:
        """The content of the newest item, a message or reasoning, so far."""
        if self._open == "reasoning":
            return {"type": "reasoning_text", "text": self._written}
        extra: JsonObject = {"annotations": [], "logprobs": self._logprobs}
        return {"type": "output_text", "text": self._written, **extra}

    # --- log-probabilities

    def _read_logprobs(self, output: Delta | Completion) -> None:
        if output.logprobs:
            self._pending_logprobs += self._tokens.chat_logprobs(output.ids, output.logprobs)

    def _made(self, kind: str, text: str) -> list[JsonObject]:
        """Takes the tokens that made further text of an item, and those before it: markers, which
        are no item's. Returns their log-probabilities, which a message has and no other item."""
        pending = self._pending_logprobs
        written = b"".join(bytes(token["bytes"]) for token in pending)
        wanted = text.encode()
        begin = written.find(wanted)
        message = kind == "message"
        if begin < 0 and not message:
            return []  # arguments that a parser rewrote: the next text is found behind them
        if begin < 0:  # bytes that are no text are shown as others
            begin, wanted = 0, written
        ends = list(itertools.accumulate(len(token["bytes"]) for token in pending))
        end = begin + len(wanted)
        first = bisect.bisect_right(ends, begin)
        # A token that also begins the next item is left to it, where that may be a message.
        last = bisect.bisect_left(ends, end) + 1 if message else bisect.bisect_right(ends, end)
        self._pending_logprobs = pending[last:]
        shown = pending[first:last] if message else []
        self._logprobs += shown
        return shown

    # --- events

    def _event(self, event: str, **fields: Any) -> JsonObject:
        number, self._number = self._number, self._number + 1
        return {**fields, "type": event, "sequence_number": number}

    def _item_event(self, type: str, item: JsonObject) -> JsonObject:
        return self._event(type, output_index=len(self._items) - 1, item=item)

    def _of_item(self, type: str, **fields: Any) -> JsonObject:
        """An event about the newest item, or about its only part."""
        item = self._items[-1]
        place: JsonObject = {} if item["type"] in _CALLS else {"content_index": 0}
        index = len(self._items) - 1
        return self._event(type, item_id=item["id"], output_index=index, **place, **fields)


def _shown_choice(body: ResponsesRequest) -> Any:
    """The choice of tools as a response tells it."""
    match body.tool_choice:
        case None:
            return "auto"
        case str() as choice:
            return choice
        case choice:
            return choice.model_dump()
