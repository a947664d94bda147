"""/v1/chat/completions: chats, with tools that the model may call."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Finished
from jaxserve.server.frontend import Frontend
from jaxserve.server.generation.chat import ChatRequest
from jaxserve.server.generation.chat_parts import ChatParts
from jaxserve.server.generation.token_writer import TokenWriter, usage_of
from jaxserve.server.generation.weight_version import version_field
from jaxserve.server.http_errors import error_body
from jaxserve.server.json_body import JsonObject
from jaxserve.server.kv_tickets import ticket_fields
from jaxserve.server.streams import Stream
from jaxserve.text.chat_output import Arguments, CallBegin, Part, Reasoning, Text, whole_calls
from jaxserve.text.output import Completion, Delta, Output


class ChatWriter:
    """Writes chat completions; see `ResponseWriter`."""

    operation = "chat"
    echoes = False
    named_events = False

    def __init__(self, frontend: Frontend, body: ChatRequest):
        as_ids = body.return_tokens_as_token_ids or False
        self._token_writer = TokenWriter(frontend.tokenizer, as_ids)
        self._body = body
        self._model = body.model or frontend.info.served_name
        self._parts = ChatParts(frontend, body)
        self._prompt_ids: list[int] = []  # where they are asked for
        self._ticket_fields: JsonObject = {}
        self.head: JsonObject = {}

    def open(self, streams: Sequence[Stream]) -> None:
        self._parts.open(streams[0])
        self._ticket_fields = ticket_fields(self._body.kv_transfer_params, streams[0].kv_ticket)
        if self._body.return_token_ids:
            self._prompt_ids = streams[0].request.prompt.tolist()
        self.head = {
            "id": streams[0].id,
            "object": "chat.completion.chunk" if self._body.stream else "chat.completion",
            "created": int(time.time()),
            "model": self._model,
        }

    def first_chunks(self) -> Iterator[JsonObject]:
        for index in range(self._body.n or 1):
            chunk = self._chunk(index, {"role": "assistant", "content": ""})
            if self._body.return_token_ids and index == 0:
                chunk["prompt_token_ids"] = self._prompt_ids
            yield chunk

    def chunks(self, number: int, output: Output) -> Iterator[JsonObject]:
        if isinstance(output, Delta):
            yield from self._delta_chunks(output)
        elif isinstance(output, Finished):
            index = output.index
            for delta in self._deltas(index, self._parts.flush(index)):
                yield self._chunk(index, delta)
            chunk = self._chunk(index, {}, None, self._finish_reason(output))
            chunk["choices"][0] |= {"stop_reason": output.stop, "in_time": output.in_time}
            yield {**chunk, **version_field([output]), **self._ticket_fields}

    def _delta_chunks(self, output: Delta) -> Iterator[JsonObject]:
        deltas = self._deltas(output.index, self._parts.read(output))
        logprobs = self._logprobs(output)
        # an empty text tells that tokens came; with tools it may be a call that is held back
        if not deltas and (logprobs or not self._parts.has_tools):
            deltas = [{"content": ""}]
        ids = list(output.ids) if self._body.return_token_ids else None
        for delta in deltas:
            chunk = self._chunk(output.index, delta, logprobs)
            if ids is not None:
                chunk["choices"][0]["token_ids"] = ids
                ids = []
            logprobs = None
            yield chunk

    def _deltas(self, index: int, parts: Sequence[Part]) -> list[JsonObject]:
        """Returns what the newest parts add to a choice's message."""
        begun = sum(isinstance(part, CallBegin) for part in parts)
        call = self._parts.calls(index) - begun - 1  # the number of the newest before these
        deltas = []
        for part in parts:
            call += isinstance(part, CallBegin)
            deltas.append(self._with_calls(_delta(part, call)))
        return deltas

    def _with_calls(self, message: JsonObject) -> JsonObject:
        """A message, or a part of one, with calls in the form in which the tools were described."""
        if not (self._body.has_functions and "tool_calls" in message):
            return message
        rest = dict(message)
        (call,) = rest.pop("tool_calls")
        return {**rest, "function_call": call["function"]}

    def whole(self, completions: Sequence[Sequence[Completion]]) -> JsonObject:
        ids: JsonObject = {}
        if self._body.return_token_ids:
            ids["prompt_token_ids"] = list(completions[0][0].prompt_ids)
        if self._body.prompt_logprobs is not None:
            ids["prompt_logprobs"] = self._token_writer.prompt_logprobs(completions[0][0])
        choices = [self._choice(completion) for completion in completions[0]]
        return {
            **self.head,
            **ids,
            "choices": choices,
            "usage": self.usage(completions[0]),  # of what has been read
            **version_field(completions[0]),
            **self._ticket_fields,
        }

    def usage(self, ended: Sequence[Finished | Completion]) -> JsonObject:
        details = {"reasoning_tokens": self._parts.reasoning_tokens}
        return usage_of(ended) | {"completion_tokens_details": details}

    def failed(self, error: RequestError) -> JsonObject:
        return error_body(error)

    def _chunk(
        self,
        index: int,
        delta: JsonObject,
        logprobs: JsonObject | None = None,
        reason: str | None = None,
    ) -> JsonObject:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return {**self.head, "choices": [choice]}

    def _choice(self, completion: Completion) -> JsonObject:
        index = completion.index
        parts = self._parts.read(completion) + self._parts.flush(index)
        choice = {
            "index": index,
            "message": self._with_calls(_message(parts)),
            "logprobs": self._logprobs(completion),
            "finish_reason": self._finish_reason(completion),
            "stop_reason": completion.stop,
            "in_time": completion.in_time,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = list(completion.ids)
        return choice

    def _logprobs(self, output: Delta | Completion) -> JsonObject | None:
        if not output.logprobs:
            return None
        entries = self._token_writer.chat_logprobs(output.ids, output.logprobs)
        return {"content": entries, "refusal": None}

    def _finish_reason(self, ended: Finished | Completion) -> str:
        if ended.reason != "stop" or not self._parts.calls(ended.index):
            return ended.reason
        return "function_call" if self._body.has_functions else "tool_calls"


def _delta(part: Part, call: int) -> JsonObject:
    """Returns what a part adds to a message. call: the number of the call that it belongs to, if
    any."""
    match part:
        case Text():
            return {"content": part.text}
        case Reasoning():
            return {"reasoning_content": part.text}
        case CallBegin():
            return {"tool_calls": [{"index": call, **_call_message(part.name, "")}]}
        case Arguments():
            return {"tool_calls": [{"index": call, "function": {"arguments": part.text}}]}


def _message(parts: Sequence[Part]) -> JsonObject:
    """The message of these parts."""
    text = "".join(part.text for part in parts if isinstance(part, Text))
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    calls = whole_calls(parts)
    message: JsonObject = {
        "role": "assistant",
        "content": text or (None if calls else ""),
        "refusal": None,
    }
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [_call_message(name, arguments) for name, arguments in calls]
    return message


def _call_message(name: str, arguments: str) -> JsonObject:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
