"""What all protocols share. A request is asked for here, whichever way it came, and answered by a
stream of outputs.

gRPC (`service`) and HTTP (`openai`) are translators: they make an `GenerateCall` of what they read and write
what the `Stream` gives.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import math
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxserve.api.errors import RequestError, internal_error
from jaxserve.api.events import Finished
from jaxserve.api.request import Request
from jaxserve.clock import WallClock
from jaxserve.server.auth.access import Caller, Lease
from jaxserve.server.event_loop import run_in_thread_if
from jaxserve.server.frontend_metrics import FrontendMetrics
from jaxserve.server.generate_call import GenerateCall
from jaxserve.server.prompts import Prompt, array_of, ids_of, size_of
from jaxserve.server.request_log import RequestLog
from jaxserve.server.streams import Mailbox, Stream
from jaxserve.server.tracing import Tracer
from jaxserve.settings.schema import ServerConfig
from jaxserve.text.output import NoText, OutputProcessor
from jaxserve.text.structured_output import Guides

log = logging.getLogger(__name__)
# longer texts, or more ids to make a text of, are worked on beside the event loop
INLINE_CHARS = 4096
MAX_SALT_CHARS = 1024
MAX_IDS = 2**18  # to make a text of, or as many as the model has room for
ASKERS = 4  # threads for questions to the engine
STARTING = "starting"
SERVING = "serving"
DRAINING = "draining"
STOPPING = "stopping"
STUCK = "stuck"
BROKEN = "broken"
T = TypeVar("T")


class Frontend:
    """Made on the event loop. It has no engine, and refuses requests, until `open`."""

    def __init__(self, config: ServerConfig):
        self.config = config
        self.state = STARTING
        self._before = STARTING
        self.streams: dict[str, Stream] = {}
        self.engine: Any = None
        self.guides: Any = None
        self._asking = concurrent.futures.ThreadPoolExecutor(ASKERS, "engine")
        self.tokenizer: Any = None
        self.metrics = FrontendMetrics()
        self.trail = RequestLog(Tracer(config.traces_endpoint))
        self._loop = asyncio.get_running_loop()
        self._clock = WallClock()
        self._mailbox = Mailbox(self._loop)
        self._spoke_at = -math.inf

    def open(self, engine: Any, tokenizer: Any, guides: Guides) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.guides = guides
        self.state = SERVING
        self.trail.model = engine.config.source.model

    def close(self) -> None:
        """Blocks for some seconds where nobody takes the spans that are left."""
        if self.guides is not None:
            self.guides.close()
        self._asking.shutdown(wait=False, cancel_futures=True)
        self.trail.close()

    def check_open(self) -> None:
        if self.state != SERVING:
            raise RequestError("", f"the server is {self.state}", "UNAVAILABLE")

    @property
    def running(self) -> Any:
        """The engine. Errors: RequestError where there is none yet."""
        if self.engine is None:
            raise RequestError("", f"the server is {self.state}", "UNAVAILABLE")
        return self.engine

    def check_model(self, name: str) -> None:
        """Errors: RequestError for a model that is not served here; '' is the one that is."""
        if name and name not in (self.engine.model.name, self.engine.config.source.model):
            raise RequestError(
                "model",
                f"{name[:100]!r} is not served here; {self.engine.config.source.model!r} is",
                "NOT_FOUND",
            )

    @contextlib.asynccontextmanager
    async def answer(self, ask: GenerateCall, caller: Caller) -> AsyncIterator[Stream]:
        """Submits a request; what the caller has not waited for is cancelled at the end. Errors:
        RequestError, before anything is computed, and at the end what ended the stream."""
        stream: Stream | None = None
        try:
            with self._admitted(caller) as lease:
                request = await self._request(ask, caller)
                lease.queue(len(request.prompt))
                with self.trail.follow(request, ask.origin, caller.tenant) as ends:
                    stream = self._submit(ask, request, caller, lease, ends)
                    try:
                        await stream.entered()
                        yield stream
                    except asyncio.CancelledError:
                        if stream.failure is None:  # the caller cancelled or went away
                            raise
                    finally:
                        self._close(stream)
                    if stream.failure is not None:
                        raise stream.failure
        except RequestError as error:
            if (
                (stream is None or stream.refused)
                and not ask.origin.internal
                and error.status == "RESOURCE_EXHAUSTED"
            ):
                self.engine.metrics.rejected(error.reason or error.field)
            raise

    async def ids(self, prompt: Prompt, caller: Caller) -> np.ndarray:
        """Token ids of a prompt. Errors: RequestError."""
        with self._admitted(caller):
            return await self._ids(prompt)

    async def text(
        self, ids: Sequence[int], caller: Caller, skip_special: bool = True, name: str = "ids"
    ) -> str:
        """Text of token ids. name: of the field that has them. Errors: RequestError."""
        with self._admitted(caller):
            if self.tokenizer is None:
                raise RequestError(name, "this model has no tokenizer", "FAILED_PRECONDITION")
            if len(ids) > (most := max(MAX_IDS, self.engine.max_len)):
                raise RequestError(name, f"has {len(ids)} ids; the limit is {most}")
            return await run_in_thread_if(
                len(ids) >= INLINE_CHARS, functools.partial(self._text, ids, skip_special, name)
            )

    def _admitted(self, caller: Caller) -> contextlib.closing[Lease]:
        self.check_open()
        return contextlib.closing(caller.admit(self._clock.now()))

    async def _ids(self, prompt: Prompt) -> np.ndarray:
        return await run_in_thread_if(
            size_of(prompt) >= INLINE_CHARS,
            functools.partial(ids_of, prompt, self.tokenizer, self.engine.max_len),
        )

    def _text(self, ids: Sequence[int], skip_special: bool, name: str) -> str:
        array = array_of(name, ids)
        wrong = array[(array < 0) | (array >= self.engine.model.vocab)]
        if wrong.size:
            raise RequestError(name, f"id {wrong[0]} is not in 0 to {self.engine.model.vocab - 1}")
        return self.tokenizer.decode(array.tolist(), skip_special=skip_special)

    @property
    def quiet_seconds(self) -> float:
        """Since anybody's last token."""
        return self._loop.time() - self._spoke_at

    async def abort(self, ids: Sequence[str]) -> int:
        """Ends requests as cancelled; returns how many there were."""
        return await self.of_engine(lambda: sum(self.engine.cancel(id) for id in ids))

    async def of_engine(self, ask: Callable[[], T]) -> T:
        """What the engine answers. It may take seconds, while a step is issued slowly: on threads
        that nothing else waits for."""
        return await self._loop.run_in_executor(self._asking, ask)

    def watch(self) -> None:
        """Called now and then: ends streams that nobody reads, keeps silent ones alive, sees
        whether the engine is."""
        now = self._loop.time()
        config = self.config
        for stream in list(self.streams.values()):
            stream.heartbeat(now)
            stream.abort_stalled(now, config.stall_timeout)
        if self.engine is not None and self.state != BROKEN:
            self._watch_engine()

    def _watch_engine(self) -> None:
        late = self.engine.stuck()
        if not self.engine.alive:
            log.error("the engine stopped")
            self.state = BROKEN
        elif late is not None and self.state in (SERVING, DRAINING, STOPPING):
            log.error("a step is overdue by %.1f s: nothing is taken until it ends", late)
            self._before = self.state
            self.state = STUCK
            self.abort_all(RequestError("", "the devices do not answer", "UNAVAILABLE"))
        elif late is None and self.state == STUCK:
            log.warning("the step that was overdue has ended")
            self.state = self._before

    def abort_all(self, error: RequestError) -> int:
        """Ends every stream with an error; returns how many there were."""
        for stream in self.streams.values():
            stream.fail(error)
        return len(self.streams)

    async def _request(self, ask: GenerateCall, caller: Caller) -> Request:
        engine = self.engine
        now = self._clock.now()
        self.check_model(ask.model)
        if len(ask.cache_salt) > MAX_SALT_CHARS:
            raise RequestError(
                "cache_salt", f"has {len(ask.cache_salt)} characters; the limit is {MAX_SALT_CHARS}"
            )
        if ask.sampling.stop and (ask.ids_only or self.tokenizer is None):
            raise RequestError("stop", "stop strings need text")
        prompt = await self._ids(ask.prompt)
        guide = (
            None
            if ask.guided is None
            else await asyncio.wrap_future(self.guides.submit(ask.guided, ask.guided_field))
        )
        return Request.make(
            caller.scoped(ask.request_id or f"jaxserve-{secrets.token_hex(8)}"),
            prompt,
            ask.sampling,
            vocab=engine.model.vocab,
            max_len=engine.max_len,
            classes=engine.config.scheduler.class_names,
            arrival=now,
            deadline=None if ask.timeout is None else now + ask.timeout,
            slo=ask.slo,
            priority=ask.priority,
            cache_salt=caller.salt(ask.cache_salt),
            bypass_prefix_cache=ask.bypass_prefix_cache,
            guide=guide,
        )

    def _submit(
        self,
        ask: GenerateCall,
        request: Request,
        caller: Caller,
        lease: Lease,
        ends: list[Finished],
    ) -> Stream:
        self.check_open()  # again: reading the prompt may have taken a while
        if request.id in self.streams:
            raise RequestError("request_id", f"{ask.request_id!r} is in use", "ALREADY_EXISTS")
        engine = self.engine
        text = (
            NoText
            if ask.ids_only or self.tokenizer is None
            else functools.partial(self.tokenizer.stream, not ask.keep_special)
        )
        answer = OutputProcessor(
            request,
            engine.model.eos_ids,
            text,
            lambda index: engine.post(functools.partial(engine.stop, request.id, index)),
        )
        patience = 0.75 * self.config.progress_interval  # `watch` looks at it a few times in that
        stream = Stream(
            request,
            answer,
            caller,
            self._loop.time(),
            patience,
            functools.partial(self._spoke, lease),
            ends,
        )
        self.streams[request.id] = stream
        engine.post(functools.partial(self._enter, stream))
        return stream

    def _enter(self, stream: Stream) -> None:
        """On the engine's thread."""
        try:
            self.engine.submit(stream.request, functools.partial(self._mailbox.put, stream))
            return
        except RequestError as error:
            refusal = error
        except Exception:
            log.exception("a request was not taken")
            refusal = internal_error()
        with contextlib.suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(stream.refuse, refusal)

    def _spoke(self, lease: Lease) -> None:
        self._spoke_at = self._loop.time()
        lease.started()

    def _close(self, stream: Stream) -> None:
        stream.closed = True
        del self.streams[stream.request.id]
        if stream.unfinished and not stream.refused:
            self.engine.post(functools.partial(self.engine.cancel, stream.request.id))
