"""jaxserve.v1.Inference: requests in, streams of events out."""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from typing import Any

import grpc
import numpy as np

from jaxserve.clock import WallClock
from jaxserve.completion import Answer, NoText
from jaxserve.config import ServerConfig
from jaxserve.guide import Guide, Guides
from jaxserve.request import Request, RequestError
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.convert import guided_of, prompt_chars, prompt_of, salt_of, sampling_of, slo_of
from jaxserve.server.streams import Mailbox, Stream

log = logging.getLogger(__name__)
INLINE_CHARS = 4096                                     # longer texts, or more ids, are worked on beside the event loop
STARTING, SERVING, DRAINING, BROKEN = "starting", "serving", "draining", "broken"


class Inference:
    """Made on the event loop. It has no engine, and refuses requests, until `open`."""

    def __init__(self, config: ServerConfig):
        self.state = STARTING
        self.streams: dict[str, Stream] = {}
        self.engine: Any = None
        self.guides: Any = None
        self.tokenizer: Any = None
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._clock = WallClock()
        self._mailbox = Mailbox(self._loop)

    def open(self, engine: Any, tokenizer: Any) -> None:
        self.engine, self.tokenizer, self.state = engine, tokenizer, SERVING
        self.guides = Guides(tokenizer, engine.model.vocab, engine.model.eos_ids)

    def check_open(self) -> None:
        if self.state != SERVING:
            raise RequestError("", f"the server is {self.state}", "UNAVAILABLE")

    async def Generate(self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        self.check_open()
        stream = self._submit(message, await self._request(message, context))
        try:
            while messages := await stream.take():
                for event in messages:
                    stream.writing(self._loop.time())
                    await context.write(event)
                    stream.written(self._loop.time())
        except asyncio.CancelledError:
            if stream.failure is None:                  # the caller cancelled or went away
                raise
        finally:
            self._close(stream)
        if stream.failure is not None:
            raise stream.failure

    async def Tokenize(self, message: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        self.check_open()
        return pb.TokenizeResponse(ids=await self._prompt(message))

    async def Detokenize(self, message: pb.DetokenizeRequest, context: grpc.aio.ServicerContext) -> pb.DetokenizeResponse:
        self.check_open()
        if self.tokenizer is None:
            raise RequestError("ids", "this model has no tokenizer", "FAILED_PRECONDITION")
        ids = np.fromiter(message.ids, np.int64, len(message.ids))
        wrong = ids[(ids < 0) | (ids >= self.engine.model.vocab)]
        if wrong.size:
            raise RequestError("ids", f"id {wrong[0]} is not in 0 to {self.engine.model.vocab - 1}")
        skip = message.skip_special if message.HasField("skip_special") else True
        decode = functools.partial(self.tokenizer.decode, ids.tolist(), skip_special=skip)
        return pb.DetokenizeResponse(text=decode() if ids.size < INLINE_CHARS else await asyncio.to_thread(decode))

    def watch(self) -> None:
        """Called now and then: ends streams that nobody reads, keeps silent ones alive, sees whether the engine is."""
        now, config = self._loop.time(), self._config
        for stream in list(self.streams.values()):
            stream.heartbeat(now, 0.75 * config.progress_interval)
            stream.abort_stalled(now, config.stall_timeout)
        if self.engine is not None and not self.engine.alive and self.state != BROKEN:
            log.error("the engine stopped")
            self.state = BROKEN

    def abort_all(self, error: RequestError) -> int:
        """Ends every stream with an error; returns how many there were."""
        for stream in self.streams.values():
            stream.fail(error)
        return len(self.streams)

    async def _prompt(self, message: Any) -> Any:
        read = functools.partial(prompt_of, message, self.tokenizer, self.engine.max_len)
        return read() if prompt_chars(message) < INLINE_CHARS else await asyncio.to_thread(read)

    async def _guide(self, message: pb.GenerateRequest) -> Guide | None:
        """Compiled beside the event loop."""
        spec = guided_of(message.guided)
        return None if spec is None else await asyncio.to_thread(self.guides.compile, spec, f"guided.{spec.kind}")

    async def _request(self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> Request:
        engine, now = self.engine, self._clock.now()
        if message.model and message.model not in (engine.model.name, engine.config.source.model):
            raise RequestError("model", f"{message.model[:100]!r} is not served here; {engine.config.source.model!r} is", "NOT_FOUND")
        left = context.time_remaining()
        sampling = sampling_of(message.sampling)
        if sampling.stop and (message.ids_only or self.tokenizer is None):
            raise RequestError("stop", "stop strings need text")
        rest = {"slo": slo_of(message.slo), "priority": message.slo.priority, "cache_salt": salt_of(message.kv)}
        prompt, guide = await self._prompt(message), await self._guide(message)
        return Request.make(
            message.request_id or f"jaxserve-{secrets.token_hex(8)}", prompt, sampling,
            vocab=engine.model.vocab, max_len=engine.max_len, classes=engine.config.scheduler.class_names, arrival=now,
            deadline=None if left is None else now + left, bypass_prefix_cache=message.kv.bypass_prefix_cache, guide=guide,
            **rest)

    def _submit(self, message: pb.GenerateRequest, request: Request) -> Stream:
        self.check_open()                               # again: reading the prompt may have taken a while
        if request.id in self.streams:
            raise RequestError("request_id", f"{request.id!r} is in use", "ALREADY_EXISTS")
        engine = self.engine
        answer = Answer(request, engine.model.eos_ids, NoText if message.ids_only or self.tokenizer is None else self.tokenizer.stream,
                        functools.partial(engine.stop, request.id))
        stream = Stream(request, answer, self._loop.time())
        engine.submit(request, functools.partial(self._mailbox.put, stream))
        self.streams[request.id] = stream
        return stream

    def _close(self, stream: Stream) -> None:
        stream.closed = True
        del self.streams[stream.request.id]
        if stream.unfinished:
            self.engine.cancel(stream.request.id)
