"""/v1/chat/completions: conversations, with functions that the model may call."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Finished
from jaxserve.server.frontend import Frontend
from jaxserve.server.generate_call import GenerateCall
from jaxserve.server.openai.responses import Tokens, usage_of
from jaxserve.server.openai.schemas import ROOM, ChatRequest, NamedTool
from jaxserve.server.prompts import Chat
from jaxserve.server.streams import Stream
from jaxserve.text.output import Completion, Delta, Output
from jaxserve.text.structured_output import Guided
from jaxserve.text.tool_calls import Call, CallReader, ToolFormat, call_schema

FORCED = ToolFormat("forced", "\0", "", bare=True)  # where the output can be nothing but a call


def ask_of(body: ChatRequest, id: str, headers: Mapping[str, str]) -> GenerateCall:
    """Errors: RequestError."""
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs", "needs logprobs=true")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    sampling = body.sampling(
        ROOM if limit is None else limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    tools = [tool.model_dump(exclude_none=True) for tool in tools_of(body)]
    guided, name = body.guided()
    if forced(body):
        if guided is not None:
            raise RequestError("tool_choice", f"cannot force a call beside {name}")
        guided = Guided("json_schema", json.dumps(call_schema(tools, _chosen(body))))
        name = "tools"
    return GenerateCall(
        Chat(body.messages, tools, body.chat_template_kwargs or {}),
        sampling,
        id,
        body.model,
        body.slo(headers),
        body.priority or 0,
        body.cache_salt or "",
        body.bypass_prefix_cache or False,
        body.timeout(),
        keep_special=bool(tools) and guided is None,
        guided=guided,
        guided_field=name,
    )


def tools_of(body: ChatRequest) -> Sequence[Any]:
    """The functions that the model is told of. Errors: RequestError where the caller chose one that
    is not among them."""
    tools = body.tools or []
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise RequestError("tools", "has two functions of one name")
    if isinstance(body.tool_choice, NamedTool) and body.tool_choice.function.name not in names:
        raise RequestError(
            "tool_choice", f"{body.tool_choice.function.name!r:.100} is not among the tools"
        )
    if body.tool_choice == "required" and not tools:
        raise RequestError("tool_choice", "is required, but there are no tools")
    return [] if body.tool_choice == "none" else tools


def forced(body: ChatRequest) -> bool:
    """Whether the output must be a call."""
    return body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)


def _chosen(body: ChatRequest) -> str | None:
    return body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None


class ChatWriter:
    operation = "chat"
    echoes = False

    def __init__(self, front: Frontend, body: ChatRequest):
        self._tokens = Tokens(front.tokenizer)
        self._body = body
        template = front.tokenizer and front.tokenizer.template
        self._model = body.model or front.engine.config.source.model
        self._form = (
            FORCED if forced(body) else template.tools if tools_of(body) and template else None
        )
        self._readers: dict[int, CallReader] = {}
        self._calls: dict[int, int] = {}  # of each choice, so far
        self.head: dict[str, Any] = {}

    def open(self, streams: Sequence[Stream]) -> None:
        kind = "chat.completion.chunk" if self._body.stream else "chat.completion"
        self.head = {
            "id": streams[0].id,
            "object": kind,
            "created": int(time.time()),
            "model": self._model,
        }

    def first(self) -> Iterator[dict[str, Any]]:
        for index in range(self._body.n or 1):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def chunks(self, number: int, output: Output) -> Iterator[dict[str, Any]]:
        if isinstance(output, Delta):
            text, calls = self._read(output.index, output.text)
            logprobs = (
                {"content": self._tokens.entries(output.ids, output.logprobs), "refusal": None}
                if output.logprobs
                else None
            )
            if text or logprobs or self._form is None:  # without text, too: tokens came
                yield self._chunk(output.index, {"content": text}, logprobs)
            yield from self._call_chunks(output.index, calls)
        elif isinstance(output, Finished):
            text, calls = self._flush(output.index)
            if text:
                yield self._chunk(output.index, {"content": text})
            yield from self._call_chunks(output.index, calls)
            yield self._chunk(
                output.index,
                {},
                None,
                self._reason(output.reason, self._calls.get(output.index, 0)),
            )

    def whole(self, completions: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        return {
            **self.head,
            "choices": [self._choice(c) for c in completions[0]],
            "usage": usage_of(completions[0]),
        }

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        return {
            **self.head,
            "choices": [
                {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            ],
        }

    def _choice(self, completion: Completion) -> dict[str, Any]:
        text, calls = self._read(completion.index, completion.text)
        rest, more = self._flush(completion.index)
        calls = self._limited(calls + more)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": (text + rest) or (None if calls else ""),
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = [_call_message(call) for call in calls]
        logprobs = None
        if completion.logprobs:
            logprobs = {
                "content": self._tokens.entries(completion.ids, completion.logprobs),
                "refusal": None,
            }
        reason = self._reason(completion.reason, len(calls))
        return {
            "index": completion.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": reason,
        }

    def _read(self, index: int, text: str) -> tuple[str, list[Call]]:
        if self._form is None:
            return text, []
        return self._readers.setdefault(index, CallReader(self._form)).push(text)

    def _flush(self, index: int) -> tuple[str, list[Call]]:
        return self._readers[index].flush() if index in self._readers else ("", [])

    def _limited(self, calls: list[Call]) -> list[Call]:
        return calls[:1] if self._body.parallel_tool_calls is False else calls

    def _call_chunks(self, index: int, calls: list[Call]) -> Iterator[dict[str, Any]]:
        for call in calls:
            at = self._calls.get(index, 0)
            if at and self._body.parallel_tool_calls is False:
                return
            self._calls[index] = at + 1
            yield self._chunk(index, {"tool_calls": [{"index": at, **_call_message(call)}]})

    def _reason(self, reason: str, calls: int) -> str:
        return "tool_calls" if calls and reason == "stop" else reason


def _call_message(call: Call) -> dict[str, Any]:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
