"""From streams of outputs to answers, whole or as events: what completions and chats share."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from typing import Any, Protocol

from fastapi import Request as HttpRequest
from starlette.responses import Response

from jaxserve.completion import Completion, Delta, Gathered, Output
from jaxserve.request import Finished, Logprobs, RequestError, internal_error
from jaxserve.server.front import Ask, Front
from jaxserve.server.http import EventStream, when_gone
from jaxserve.server.openai.errors import body_of, header_value
from jaxserve.server.streams import Stream
from jaxserve.server.trail import Origin

log = logging.getLogger(__name__)
INLINE_TOKENS = 512                                     # a longer answer is written beside the event loop
COMMENT = b": waiting\n\n"                              # keeps proxies from closing a silent stream
AFTER_COMMENT = b":\n\n"                                # for clients, vllm's among them, that strip what they read: a comment ends here
DONE = b"data: [DONE]\n\n"


class Writer(Protocol):
    """What a kind of answer makes of outputs. A prompt has a number, from 0."""

    operation: str                                      # as traces name it
    head: dict[str, Any]                                # what all chunks have in common, once `open` was called

    def open(self, streams: Sequence[Stream]) -> None: ...
    def first(self) -> Iterable[dict[str, Any]]: ...
    def chunks(self, number: int, output: Output) -> Iterable[dict[str, Any]]: ...
    def whole(self, completions: Sequence[Sequence[Completion]]) -> dict[str, Any]: ...


async def answer(front: Front, asks: Sequence[Ask], writer: Writer, request: HttpRequest, usage: bool | None) -> Response:
    """usage: None for an answer that is whole; else for events, and whether the last of them tells the usage. Errors: RequestError."""
    origin = Origin("http", request.headers.get("traceparent"), request.headers.get("tracestate", ""), writer.operation)
    async with contextlib.AsyncExitStack() as stack:
        asks = [dataclasses.replace(ask, origin=origin) for ask in asks]
        streams = [await stack.enter_async_context(front.answer(ask, request.state.caller)) for ask in asks]
        headers = {"x-request-id": header_value(streams[0].id)}
        writer.open(streams)
        if usage is None:
            found: list[list[Completion]] = []
            async with when_gone(request.receive):
                found = await _gathered(streams)
            if not found:
                raise RequestError("", "the caller went away", "CANCELLED")
            whole = functools.partial(_whole, writer, found)
            large = sum(len(one.ids) for group in found for one in group) > INLINE_TOKENS
            return Response(await asyncio.to_thread(whole) if large else whole(), 200, headers, "application/json")
        for stream in streams:
            stream.cut = request.scope["transport"].abort
        return EventStream(_events(stack.pop_all(), streams, writer, usage), headers)


async def _events(stack: contextlib.AsyncExitStack, streams: Sequence[Stream], writer: Writer, usage: bool) -> AsyncGenerator[bytes]:
    loop, ends, first, commented = asyncio.get_running_loop(), list[Finished](), writer.first(), False
    try:
        async with stack:
            async for number, outputs in _outputs(streams):
                chunks = [chunk for output in outputs for chunk in writer.chunks(number, output)]
                if any(isinstance(output, (Delta, Finished)) for output in outputs):
                    chunks = [*first, *chunks]           # once; not before a token, for who measures takes it for one
                ends += [output for output in outputs if isinstance(output, Finished)]
                if not chunks and not streams[number].overdue(loop.time()):
                    continue
                for stream in streams:
                    stream.writing(loop.time())
                yield AFTER_COMMENT * commented + _lines(chunks) if chunks else COMMENT
                commented = not chunks
                for stream in streams:
                    stream.written(loop.time())
        if usage:
            yield _lines([{**writer.head, "choices": [], "usage": usage_of(ends)}])
        yield DONE
    except RequestError as error:
        yield _lines([body_of(error)])
    except Exception:
        log.exception("an answer failed")
        yield _lines([body_of(internal_error())])


async def _gathered(streams: Sequence[Stream]) -> list[list[Completion]]:
    gathered = [Gathered(stream.request.prompt.tolist()) for stream in streams]
    async for number, outputs in _outputs(streams):
        for output in outputs:
            gathered[number].add(output)
    return [one.completions() for one in gathered]


async def _outputs(streams: Sequence[Stream]) -> AsyncIterator[tuple[int, list[Output]]]:
    """What comes from any of the streams, with the stream's number. Errors: what ended one of them."""
    if len(streams) == 1:
        while outputs := await streams[0].take():
            yield 0, outputs
        if streams[0].failure is not None:
            raise streams[0].failure
        return
    taking = {asyncio.ensure_future(stream.take()): number for number, stream in enumerate(streams)}
    try:
        while taking:
            done, _ = await asyncio.wait(taking, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = taking.pop(task)
                if outputs := task.result():
                    yield number, outputs
                    taking[asyncio.ensure_future(streams[number].take())] = number
                elif (failure := streams[number].failure) is not None:
                    raise failure
    finally:
        for task in taking:
            task.cancel()


def usage_of(ends: Iterable[Finished | Completion]) -> dict[str, Any]:
    """The usage of all prompts and completions of a request. A prompt counts once, however many completions it has."""
    usages = [(end.index, end.usage) for end in ends]
    prompt, cached = (sum(getattr(usage, name) for index, usage in usages if index == 0) for name in ("prompt", "cached"))
    completion = sum(usage.completion for _, usage in usages)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached}}


class Tokens:
    """Tokens as callers see them."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def bytes(self, id: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.piece(id)

    def text(self, id: int) -> str:
        return f"token_id:{id}" if self._tokenizer is None else self.bytes(id).decode(errors="replace")

    def entry(self, id: int, logprob: float) -> dict[str, Any]:
        """As chats tell a token."""
        return {"token": self.text(id), "logprob": logprob, "bytes": list(self.bytes(id))}

    def entries(self, ids: Sequence[int], logprobs: Sequence[Logprobs]) -> list[dict[str, Any]]:
        return [{**self.entry(id, at.chosen), "top_logprobs": [self.entry(*top) for top in at.top]} for id, at in zip(ids, logprobs)]


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _whole(writer: Writer, found: Sequence[Sequence[Completion]]) -> bytes:
    """Choice by choice: writing one keeps the interpreter from other threads."""
    whole = writer.whole(found)
    choices = b",".join(map(_json, whole.pop("choices")))
    return _json(whole)[:-1] + b',"choices":[' + choices + b"]}"


def _lines(chunks: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(b"data: " + _json(chunk) + b"\n\n" for chunk in chunks)
