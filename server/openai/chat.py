"""/v1/chat/completions: chats, with tools that the model may call."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Finished
from jaxserve.server.frontend import Frontend
from jaxserve.server.generate_call import GenerateCall
from jaxserve.server.json_body import JsonObject
from jaxserve.server.openai import kv_transfer
from jaxserve.server.openai.answers import TokenWriter, usage_of
from jaxserve.server.openai.schemas import (
    UNLIMITED_TOKENS,
    ChatRequest,
    Function,
    NamedTool,
    Tool,
)
from jaxserve.server.prompts import Chat
from jaxserve.server.streams import Stream
from jaxserve.text.output import Completion, Delta, Output
from jaxserve.text.structured_output import Guided
from jaxserve.text.tool_calls import Call, CallReader, ToolFormat, call_schema

# for outputs that a guide forces to be one call: nothing marks where it begins or ends
FORCED_CALL = ToolFormat("forced", "\0", "", bare=True)


def generate_call(body: ChatRequest, id: str, headers: Mapping[str, str]) -> GenerateCall:
    """The call that a body asks for. Errors: RequestError."""
    kv_transfer.check(body.kv_transfer_params)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs", "needs logprobs=true")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    sampling = body.sampling(
        UNLIMITED_TOKENS if limit is None else limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    tools = [_tool_message(tool) for tool in usable_tools(body)]
    guided, guided_field = body.guided()
    if must_call(body):
        if guided is not None:
            raise RequestError("tool_choice", f"cannot force a call beside {guided_field}")
        guided = Guided("json_schema", json.dumps(call_schema(tools, _named_tool(body))))
        guided_field = "tools"
    return GenerateCall(
        prompt=Chat(body.messages, tools, body.template_variables),
        sampling=sampling,
        request_id=id,
        model=body.model,
        slo=body.slo(headers),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        bypass_prefix_cache=body.bypass_prefix_cache or False,
        cache_retention=body.retention(),
        timeout=body.timeout(),
        keep_special=bool(tools) and guided is None,
        guided=guided,
        guided_field=guided_field,
    )


def _tool_message(tool: Tool) -> JsonObject:
    """A tool as the model's template gets it."""
    known = tool.function.model_dump(include=set(Function.model_fields), exclude_none=True)
    return {"type": tool.type, "function": known}


def usable_tools(body: ChatRequest) -> Sequence[Tool]:
    """Tools that the model is told of. Errors: RequestError for tools of one name, and for a choice
    that is not among them."""
    tools = body.tools or []
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise RequestError("tools", "has two functions of one name")
    named = _named_tool(body)
    if named is not None and named not in names:
        raise RequestError("tool_choice", f"{named!r:.100} is not among the tools")
    if body.tool_choice == "required" and not tools:
        raise RequestError("tool_choice", "is required, but there are no tools")
    return [] if body.tool_choice == "none" else tools


def must_call(body: ChatRequest) -> bool:
    """Whether the output must be a call of a tool."""
    return body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)


def _named_tool(body: ChatRequest) -> str | None:
    return body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None


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
        self._tool_format = _tool_format(frontend, body)
        self._readers: dict[int, CallReader] = {}  # by choice
        self._call_counts: dict[int, int] = {}  # by choice, of calls written so far
        self.head: JsonObject = {}

    def open(self, streams: Sequence[Stream]) -> None:
        self.head = {
            "id": streams[0].id,
            "object": "chat.completion.chunk" if self._body.stream else "chat.completion",
            "created": int(time.time()),
            "model": self._model,
        }

    def first_chunks(self) -> Iterator[JsonObject]:
        for index in range(self._body.n or 1):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def chunks(self, number: int, output: Output) -> Iterator[JsonObject]:
        if isinstance(output, Delta):
            text, calls = self.read(output.index, output.text)
            logprobs = self._logprobs(output) if output.logprobs else None
            # an empty text tells that tokens came; with tools it may be a call that is held back
            if text or logprobs or self._tool_format is None:
                chunk = self._chunk(output.index, {"content": text}, logprobs)
                if self._body.return_token_ids:
                    chunk["choices"][0]["token_ids"] = list(output.ids)
                yield chunk
            yield from self._call_chunks(output.index, calls)
        elif isinstance(output, Finished):
            text, calls = self.flush(output.index)
            if text:
                yield self._chunk(output.index, {"content": text})
            yield from self._call_chunks(output.index, calls)
            reason = _finish_reason(output.reason, self._call_counts.get(output.index, 0))
            yield self._chunk(output.index, {}, None, reason)

    def whole(self, completions: Sequence[Sequence[Completion]]) -> JsonObject:
        ids = {}
        if self._body.return_token_ids:
            ids["prompt_token_ids"] = list(completions[0][0].prompt_ids)
        return {
            **self.head,
            **ids,
            "choices": [self._choice(completion) for completion in completions[0]],
            "usage": usage_of(completions[0]),
            **kv_transfer.answer(self._body.kv_transfer_params),
        }

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
        text, calls = self.read(completion.index, completion.text)
        rest, more = self.flush(completion.index)
        text += rest
        calls += more
        if self._body.parallel_tool_calls is False:
            calls = calls[:1]
        message: JsonObject = {
            "role": "assistant",
            "content": text or (None if calls else ""),
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = [_call_message(call) for call in calls]
        choice = {
            "index": completion.index,
            "message": message,
            "logprobs": self._logprobs(completion) if completion.logprobs else None,
            "finish_reason": _finish_reason(completion.reason, len(calls)),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = list(completion.ids)
        return choice

    def _logprobs(self, output: Delta | Completion) -> JsonObject:
        entries = self._token_writer.chat_logprobs(output.ids, output.logprobs or ())
        return {"content": entries, "refusal": None}

    def read(self, index: int, text: str) -> tuple[str, list[Call]]:
        """Splits new text of a choice into content and calls."""
        if self._tool_format is None:
            return text, []
        return self._readers.setdefault(index, CallReader(self._tool_format)).push(text)

    def flush(self, index: int) -> tuple[str, list[Call]]:
        """What `read` has held back of a choice that has ended."""
        return self._readers[index].flush() if index in self._readers else ("", [])

    def _call_chunks(self, index: int, calls: list[Call]) -> Iterator[JsonObject]:
        for call in calls:
            number = self._call_counts.get(index, 0)
            if number and self._body.parallel_tool_calls is False:
                return
            self._call_counts[index] = number + 1
            yield self._chunk(index, {"tool_calls": [{"index": number, **_call_message(call)}]})


def _tool_format(frontend: Frontend, body: ChatRequest) -> ToolFormat | None:
    """How calls look in the output; None if there can be none."""
    if must_call(body):
        return FORCED_CALL
    template = frontend.tokenizer and frontend.tokenizer.template
    return template.tools if usable_tools(body) and template else None


def _finish_reason(reason: str, calls: int) -> str:
    return "tool_calls" if calls and reason == "stop" else reason


def _call_message(call: Call) -> JsonObject:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
