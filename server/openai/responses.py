"""From streams of outputs to answers, whole or as events: what completions and chats share."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, Protocol

from fastapi import Request as HttpRequest
from starlette.responses import Response

from jaxserve.api.errors import RequestError, internal_error
from jaxserve.api.events import Finished, Logprobs
from jaxserve.server.errors import caller_gone
from jaxserve.server.event_loop import run_in_thread_if
from jaxserve.server.event_stream import EventStream, cancelled_on_disconnect
from jaxserve.server.frontend import Frontend
from jaxserve.server.generate_call import GenerateCall, Origin
from jaxserve.server.http_errors import error_body, header_value
from jaxserve.server.json_body import dump, dump_in_thread_if
from jaxserve.server.streams import Stream
from jaxserve.text.output import Completion, CompletionCollector, Delta, Output

log = logging.getLogger(__name__)
INLINE_TOKENS = 512  # a longer answer is written beside the event loop
INLINE_PROMPT = 4096  # ids of prompts, of which more are made a text there
LOGPROBS = 8  # tokens that are written in the time of one's log-probabilities
WRITE = 1 << 16  # bytes of events that are written without a break
COMMENT = b": waiting\n\n"  # keeps proxies from closing a silent stream
# for clients, vllm's among them, that strip what they read: a comment ends here
AFTER_COMMENT = b":\n\n"
DONE = b"data: [DONE]\n\n"


class ResponseWriter(Protocol):
    """What a kind of answer makes of outputs. A prompt has a number, from 0."""

    operation: str  # as traces name it
    echoes: bool  # prompts, which may be long: `open` makes texts of them
    head: dict[str, Any]  # what all chunks have in common, once `open` was called

    def open(self, streams: Sequence[Stream]) -> None: ...  # maybe beside the event loop
    def first(self) -> Iterable[dict[str, Any]]: ...
    def chunks(self, number: int, output: Output) -> Iterable[dict[str, Any]]: ...
    def whole(self, completions: Sequence[Sequence[Completion]]) -> dict[str, Any]: ...


async def answer(
    front: Frontend,
    asks: Sequence[GenerateCall],
    writer: ResponseWriter,
    request: HttpRequest,
    usage: bool | None,
) -> Response:
    """usage: None for an answer that is whole; else for events, and whether the last of them tells
    the usage. Errors: RequestError."""
    origin = Origin(
        "http",
        request.headers.get("traceparent"),
        request.headers.get("tracestate", ""),
        writer.operation,
    )
    async with contextlib.AsyncExitStack() as stack:
        asks = [dataclasses.replace(ask, origin=origin) for ask in asks]
        streams = [
            await stack.enter_async_context(front.answer(ask, request.state.caller)) for ask in asks
        ]
        headers = {"x-request-id": header_value(streams[0].id)}
        large = (
            writer.echoes and sum(len(stream.request.prompt) for stream in streams) > INLINE_PROMPT
        )
        await run_in_thread_if(large, functools.partial(writer.open, streams))
        if usage is None:
            found: list[list[Completion]] = []
            async with cancelled_on_disconnect(request.receive):
                found = await _gathered(streams)
            if not found:
                raise caller_gone()
            large = (
                sum(_size(completion) for group in found for completion in group) > INLINE_TOKENS
            )
            return Response(
                await dump_in_thread_if(large, functools.partial(writer.whole, found)),
                200,
                headers,
                "application/json",
            )
        for stream in streams:
            stream.cut = request.scope["transport"].abort
        return EventStream(_events(stack.pop_all(), streams, writer, usage), headers)


async def _events(
    stack: contextlib.AsyncExitStack, streams: Sequence[Stream], writer: ResponseWriter, usage: bool
) -> AsyncGenerator[bytes]:
    loop = asyncio.get_running_loop()
    ends = list[Finished]()
    first = writer.first()
    commented = False
    try:
        async with stack:
            async for number, outputs in _outputs(streams):
                chunks: Iterator[dict[str, Any]] = (
                    chunk for output in outputs for chunk in writer.chunks(number, output)
                )
                if any(isinstance(output, (Delta, Finished)) for output in outputs):
                    # once; not before a token, for who measures takes it for one
                    chunks = itertools.chain(first, chunks)
                ends += [output for output in outputs if isinstance(output, Finished)]
                comment = [COMMENT] if streams[number].overdue(loop.time()) else []
                for lines in _batches(chunks, comment):
                    for stream in streams:
                        stream.writing(loop.time())
                    yield lines if lines is COMMENT else AFTER_COMMENT * commented + lines
                    commented = lines is COMMENT
                    for stream in streams:
                        stream.written(loop.time())
                    if len(lines) > WRITE:  # others may come in between
                        await asyncio.sleep(0)
        if usage:
            yield _line({**writer.head, "choices": [], "usage": usage_of(ends)})
        yield DONE
    except RequestError as error:
        yield _line(error_body(error))
    except Exception:
        log.exception("an answer failed")
        yield _line(error_body(internal_error()))


async def _gathered(streams: Sequence[Stream]) -> list[list[Completion]]:
    gathered = [CompletionCollector(stream.request.prompt.tolist()) for stream in streams]
    async for number, outputs in _outputs(streams):
        for output in outputs:
            gathered[number].add(output)
    return [one.completions() for one in gathered]


async def _outputs(streams: Sequence[Stream]) -> AsyncIterator[tuple[int, list[Output]]]:
    """What comes from any of the streams, with the stream's number. Errors: what ended one of
    them."""
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
    """The usage of all prompts and completions of a request. A prompt counts once, however many
    completions it has."""
    usages = [(end.index, end.usage) for end in ends]
    prompt, cached = (
        sum(getattr(usage, name) for index, usage in usages if index == 0)
        for name in ("prompt", "cached")
    )
    completion = sum(usage.completion for _, usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Tokens:
    """Tokens as callers see them."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def bytes(self, id: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.piece(id)

    def text(self, id: int) -> str:
        return (
            f"token_id:{id}" if self._tokenizer is None else self.bytes(id).decode(errors="replace")
        )

    def entry(self, id: int, logprob: float) -> dict[str, Any]:
        """As chats tell a token."""
        return {"token": self.text(id), "logprob": logprob, "bytes": list(self.bytes(id))}

    def entries(self, ids: Sequence[int], logprobs: Sequence[Logprobs]) -> list[dict[str, Any]]:
        return [
            {**self.entry(id, at.chosen), "top_logprobs": [self.entry(*top) for top in at.top]}
            for id, at in zip(ids, logprobs)
        ]


def _size(completion: Completion) -> int:
    """In tokens to write. The prompt may be echoed: as one text, in no time."""
    logprobs = len(completion.logprobs or ()) + len(completion.prompt_logprobs or ())
    return len(completion.ids) + LOGPROBS * logprobs + len(completion.prompt_ids) // LOGPROBS


def _batches(chunks: Iterable[dict[str, Any]], otherwise: Sequence[bytes]) -> Iterator[bytes]:
    """Events in pieces of some size; what else to send where there are none."""
    lines = list[bytes]()
    size = 0
    for chunk in chunks:
        otherwise = ()
        lines.append(_line(chunk))
        size += len(lines[-1])
        if size > WRITE:
            yield b"".join(lines)
            lines = []
            size = 0
    yield from [b"".join(lines)] if lines else otherwise


def _line(chunk: dict[str, Any]) -> bytes:
    return b"data: " + dump(chunk) + b"\n\n"
