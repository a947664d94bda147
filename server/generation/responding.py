"""Makes HTTP responses of streams of outputs, whole or as server-sent events: what completions and
chats have in common."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, Protocol

from fastapi import Request as HttpRequest
from starlette.responses import Response

from jaxserve.api.errors import RequestError, internal_error
from jaxserve.api.events import Finished
from jaxserve.server.errors import caller_gone
from jaxserve.server.event_loop import run_in_thread_if
from jaxserve.server.event_stream import EventStream, cancelled_on_disconnect
from jaxserve.server.frontend import Frontend
from jaxserve.server.generate_call import GenerateCall, Origin
from jaxserve.server.generation.bodies import StreamMode
from jaxserve.server.generation.load_report import load_header, wanted_format
from jaxserve.server.generation.token_writer import RunningUsage
from jaxserve.server.http_errors import header_value
from jaxserve.server.json_body import JsonObject, dump, dump_in_thread_if
from jaxserve.server.streams import Stream
from jaxserve.text.output import Completion, CompletionCollector, Delta, Output

log = logging.getLogger(__name__)
INLINE_TOKENS = 512  # a longer response is written in a thread
INLINE_ECHO_TOKENS = 4096  # longer prompts to echo are detokenized in a thread
LOGPROB_COST = 8  # tokens that are written in the time of one token's log-probabilities
MAX_EVENT_BYTES = 1 << 16  # events written without a break
KEEPALIVE = b": waiting\n\n"  # a comment, so that proxies do not close a silent stream
# clients that strip what they read, vLLM's benchmark among them, need an end of the comment
AFTER_KEEPALIVE = b":\n\n"
DONE = b"data: [DONE]\n\n"
# of routes in the OpenAPI schema
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the answer, whole or as server-sent events (stream: true)",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}


class ResponseWriter(Protocol):
    """Writes the responses of one request, which may have several prompts, numbered from 0."""

    operation: str  # its name in traces: chat or text_completion
    echoes: bool  # whether prompts are repeated in the response
    named_events: bool  # whether chunks are events with names, of which the last one says all
    head: JsonObject  # fields that all chunks share, once `open` was called

    def open(self, streams: Sequence[Stream]) -> None:
        """Called once the engine has accepted all prompts; in a thread if long prompts are to be
        detokenized. Errors: RequestError."""

    def first_chunks(self) -> Iterable[JsonObject]:
        """Chunks to send before the first token."""

    def chunks(self, number: int, output: Output) -> Iterable[JsonObject]:
        """Chunks for one output of a prompt's stream."""

    def whole(self, completions: Sequence[Sequence[Completion]]) -> JsonObject:
        """The response without streaming. completions: by prompt."""

    def usage(self, ended: Sequence[Finished | Completion]) -> JsonObject:
        """The usage of all prompts and completions, of which these are the ends."""

    def failed(self, error: RequestError) -> JsonObject:
        """Returns the last event of a stream that failed."""


async def respond(
    frontend: Frontend,
    calls: Sequence[GenerateCall],
    writer: ResponseWriter,
    request: HttpRequest,
    mode: StreamMode,
    headers: Mapping[str, str],
) -> Response:
    """Submits one call per prompt and returns their response, or the beginning of it if it is
    streamed. headers: to be sent too. Errors: RequestError."""
    origin = Origin.of_http(request.headers, writer.operation)
    report = wanted_format(request.headers)
    async with contextlib.AsyncExitStack() as stack:
        streams: list[Stream] = []
        for call in calls:
            streamed = mode is not StreamMode.OFF
            call = dataclasses.replace(call, origin=origin, streamed=streamed)
            generating = frontend.generate(call, request.state.caller)
            streams.append(await stack.enter_async_context(generating))
        prompt_tokens = sum(len(stream.request.prompt) for stream in streams)
        large = writer.echoes and prompt_tokens > INLINE_ECHO_TOKENS
        await run_in_thread_if(large, functools.partial(writer.open, streams))
        headers = {"x-request-id": header_value(streams[0].id), **headers}
        headers |= await load_headers(frontend, report)
        if mode is StreamMode.OFF:
            body = await _whole_body(streams, writer, request)
            return Response(body, 200, headers, "application/json")
        for stream in streams:
            stream.abort_write = request.scope["transport"].abort
        return EventStream(_events(stack.pop_all(), streams, writer, mode), headers)


async def load_headers(frontend: Frontend, report: str | None) -> dict[str, str]:
    """Headers of an answer that tell how busy the replica is; none where no report is wanted."""
    if report is None:
        return {}
    return load_header(await frontend.ask_replica(frontend.require_replica().load), report)


async def _whole_body(
    streams: Sequence[Stream], writer: ResponseWriter, request: HttpRequest
) -> bytes:
    """The body of a response that is not streamed, once all completions have ended."""
    groups: list[list[Completion]] = []
    async with cancelled_on_disconnect(request.receive):
        groups = await _collect(streams)
    if not groups:
        raise caller_gone()
    size = sum(_write_cost(completion) for group in groups for completion in group)
    return await dump_in_thread_if(size > INLINE_TOKENS, functools.partial(writer.whole, groups))


async def _events(
    stack: contextlib.AsyncExitStack,
    streams: Sequence[Stream],
    writer: ResponseWriter,
    mode: StreamMode,
) -> AsyncGenerator[bytes]:
    """The events of a streamed response. stack: closes the streams."""
    loop = asyncio.get_running_loop()
    finished: list[Finished] = []
    running = RunningUsage(streams) if mode is StreamMode.WITH_RUNNING_USAGE else None
    first: Iterable[JsonObject] = writer.first_chunks()
    if running is not None:
        first = running.added((), first)
    event = _named_event if writer.named_events else _event
    after_keepalive = False
    try:
        async with stack:
            async for number, outputs in _outputs(streams):
                chunks: Iterator[JsonObject] = (
                    chunk for output in outputs for chunk in writer.chunks(number, output)
                )
                if not writer.named_events:
                    chunks = _ends_joined(chunks)
                if running is not None:
                    chunks = running.added(outputs, chunks)
                if any(isinstance(output, (Delta, Finished)) for output in outputs):
                    # not before a token: benchmarks measure TTFT by the first chunk
                    chunks = itertools.chain(first, chunks)
                finished += [output for output in outputs if isinstance(output, Finished)]
                otherwise = [KEEPALIVE] if streams[number].heartbeat_due(loop.time()) else []
                for data in _batches(chunks, otherwise, event):
                    for stream in streams:
                        stream.write_began(loop.time())
                    yield AFTER_KEEPALIVE + data if _ends_comment(after_keepalive, data) else data
                    after_keepalive = data is KEEPALIVE
                    for stream in streams:
                        stream.write_ended(loop.time())
                    if len(data) > MAX_EVENT_BYTES:  # lets other streams write in between
                        await asyncio.sleep(0)
        if mode in (StreamMode.WITH_USAGE, StreamMode.WITH_RUNNING_USAGE):
            yield _event({**writer.head, "choices": [], "usage": writer.usage(finished)})
        if not writer.named_events:
            yield DONE
    except RequestError as error:
        yield event(writer.failed(error))
    except Exception:
        log.exception("a streamed response failed")
        yield event(writer.failed(internal_error()))


def _ends_joined(chunks: Iterable[JsonObject]) -> Iterator[JsonObject]:
    """Chunks, of which one that only says how a choice has ended is joined to the one before, if
    that is of the same choice: load generators count a token for each chunk."""
    previous: JsonObject | None = None
    for chunk in chunks:
        if previous is not None:
            choice = chunk["choices"][0]
            last = previous["choices"][0]
            only_ends = choice["finish_reason"] and not (choice.get("text") or choice.get("delta"))
            if only_ends and choice["index"] == last["index"] and not last["finish_reason"]:
                last |= {key: choice[key] for key in ("finish_reason", "stop_reason", "in_time")}
                previous |= {key: chunk[key] for key in chunk if key not in previous}
                continue
            yield previous
        previous = chunk
    if previous is not None:
        yield previous


def _ends_comment(after_keepalive: bool, data: bytes) -> bool:
    return after_keepalive and data is not KEEPALIVE


async def _collect(streams: Sequence[Stream]) -> list[list[Completion]]:
    """All completions of each stream, once they have ended."""
    collectors = [CompletionCollector(stream.request.prompt.tolist()) for stream in streams]
    async for number, outputs in _outputs(streams):
        for output in outputs:
            collectors[number].add(output)
    return [collector.completions() for collector in collectors]


async def _outputs(streams: Sequence[Stream]) -> AsyncIterator[tuple[int, list[Output]]]:
    """Outputs of any of the streams as they come, with the stream's number. Errors: what ended one
    of them."""
    if len(streams) == 1:
        while outputs := await streams[0].take():
            yield 0, outputs
        if streams[0].failure is not None:
            raise streams[0].failure
        return
    taking = {asyncio.ensure_future(stream.take()): number for number, stream in enumerate(streams)}
    try:
        while taking:
            ended, _ = await asyncio.wait(taking, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                number = taking.pop(task)
                if outputs := task.result():
                    yield number, outputs
                    taking[asyncio.ensure_future(streams[number].take())] = number
                elif (failure := streams[number].failure) is not None:
                    raise failure
    finally:
        for task in taking:
            task.cancel()


def _write_cost(completion: Completion) -> int:
    """About how long writing a completion takes, in tokens of plain output. An echoed prompt is
    written as one text, which costs little."""
    logprobs = len(completion.logprobs or ()) + len(completion.prompt_logprobs or ())
    echo = len(completion.prompt_ids) // LOGPROB_COST
    return len(completion.ids) + LOGPROB_COST * logprobs + echo


def _batches(
    chunks: Iterable[JsonObject], otherwise: Sequence[bytes], event: Callable[[JsonObject], bytes]
) -> Iterator[bytes]:
    """Events of chunks, joined up to about MAX_EVENT_BYTES; `otherwise` if there are none."""
    events: list[bytes] = []
    size = 0
    for chunk in chunks:
        otherwise = ()
        events.append(event(chunk))
        size += len(events[-1])
        if size > MAX_EVENT_BYTES:
            yield b"".join(events)
            events = []
            size = 0
    if events:
        yield b"".join(events)
    else:
        yield from otherwise


def _event(chunk: JsonObject) -> bytes:
    return b"data: " + dump(chunk) + b"\n\n"


def _named_event(chunk: JsonObject) -> bytes:
    return f"event: {chunk['type']}\n".encode() + _event(chunk)
