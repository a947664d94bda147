"""/v1/chat/completions: chats, with tools that the model may call."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Finished
from jaxserve.server.frontend import Frontend
from jaxserve.server.generate_call import GenerateCall
from jaxserve.server.http_errors import error_body
from jaxserve.server.json_body import JsonObject
from jaxserve.server.openai import kv_transfer
from jaxserve.server.openai.answers import TokenWriter, usage_of
from jaxserve.server.openai.chat_parts import ChatParts
from jaxserve.server.openai.schemas import UNLIMITED_TOKENS, ChatRequest, Function, Tool
from jaxserve.server.prompts import Chat
from jaxserve.server.streams import Stream
from jaxserve.text.chat_output import Arguments, CallBegin, Part, Reasoning, Text, whole_calls
from jaxserve.text.output import Completion, Delta, Output
from jaxserve.text.structured_output import Guided
from jaxserve.text.structured_output.tools import calls_guide, forced_call


def generate_call(
    frontend: Frontend, body: ChatRequest, id: str, headers: Mapping[str, str]
) -> GenerateCall:
    """The call that a body asks for. Errors: RequestError."""
    body.check_tools()
    kv_transfer.check(body.kv_transfer_params)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs", "needs logprobs=true")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    sampling = body.sampling(
        UNLIMITED_TOKENS if limit is None else limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    tools = [tool_message(tool) for tool in body.usable_tools]
    guided, guided_field = body.guided()
    if body.must_call:
        # a response format is one of texts, and a forced call is none
        if body.structured_outputs is not None and guided is not None:
            raise RequestError("tool_choice", f"cannot force a call beside {guided_field}")
        guided = forced_call(tools, body.named_tool)
        guided_field = "tools"
    strict = None if guided else _strict_calls(frontend, tools)
    return GenerateCall(
        prompt=Chat(
            body.messages,
            tools,
            body.template_variables,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=body.continue_final_message or False,
        ),
        sampling=sampling,
        request_id=id,
        model=body.model,
        slo=body.slo(headers),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        bypass_prefix_cache=body.bypass_prefix_cache or False,
        cache_retention=body.retention(),
        timeout=body.timeout(),
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        keep_special=guided is None and (bool(tools) or frontend.chat_formats.keeps_special),
        guided=strict or guided,
        guided_field="tools" if strict else guided_field,
    )


def _strict_calls(frontend: Frontend, tools: Sequence[JsonObject]) -> Guided | None:
    """What holds calls that the model is free to make to the schemas of strict tools; None where no
    tool is strict, or where the model's calls have a form that cannot be held to schemas."""
    form = frontend.chat_formats.tools
    tokenizer = frontend.tokenizer
    if form is None or tokenizer is None or not form.is_json_between_marks:
        return None
    if not any(tool["function"].get("strict") for tool in tools):
        return None
    marks = form.marks
    return calls_guide(tools, marks.begin, marks.end, tokenizer.is_token(marks.begin))


def tool_message(tool: Tool) -> JsonObject:
    """A tool as the model's template gets it."""
    known = tool.function.model_dump(include=set(Function.model_fields), exclude_none=True)
    return {"type": tool.type, "function": known}


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
        self.head: JsonObject = {}

    def open(self, streams: Sequence[Stream]) -> None:
        self._parts.open(streams[0])
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
            chunk["choices"][0]["stop_reason"] = output.stop
            yield chunk

    def _delta_chunks(self, output: Delta) -> Iterator[JsonObject]:
        deltas = self._deltas(output.index, self._parts.read(output))
        logprobs = self._logprobs(output) if output.logprobs else None
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
        """What the newest parts add to a choice's message."""
        begun = sum(isinstance(part, CallBegin) for part in parts)
        call = self._parts.calls(index) - begun - 1  # the number of the newest before these
        deltas = []
        for part in parts:
            call += isinstance(part, CallBegin)
            deltas.append(_delta(part, call))
        return deltas

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
            **kv_transfer.answer(self._body.kv_transfer_params),
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
            "message": _message(parts),
            "logprobs": self._logprobs(completion) if completion.logprobs else None,
            "finish_reason": self._finish_reason(completion),
            "stop_reason": completion.stop,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = list(completion.ids)
        return choice

    def _logprobs(self, output: Delta | Completion) -> JsonObject:
        entries = self._token_writer.chat_logprobs(output.ids, output.logprobs or ())
        return {"content": entries, "refusal": None}

    def _finish_reason(self, ended: Finished | Completion) -> str:
        called = self._parts.calls(ended.index) > 0
        return "tool_calls" if called and ended.reason == "stop" else ended.reason


def _delta(part: Part, call: int) -> JsonObject:
    """What a part adds to a message. call: the number of the call that it belongs to, if any."""
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
