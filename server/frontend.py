"""Turns calls of any protocol into requests to the replica, and its events into streams of outputs.

gRPC (`grpc.inference`) and HTTP (`openai`, `anthropic`) only translate: they make a `GenerateCall`
of what they read, and write what the `Stream` yields.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

import numpy as np

from jaxserve.api.errors import RequestError, check_integer, internal_error
from jaxserve.api.request import UNKNOWN_MODEL, Request, another_id
from jaxserve.replica.info import ReplicaInfo
from jaxserve.replica.protocol import Replica
from jaxserve.server.auth.access import Caller, Reservation
from jaxserve.server.event_loop import run_in_thread_if
from jaxserve.server.frontend_metrics import FrontendMetrics
from jaxserve.server.generate_call import GenerateCall
from jaxserve.server.kv_handoff import KvHandoff, offered_kv, refuse_transfer
from jaxserve.server.prompts import Prompt, is_continued, prompt_cost, prompt_ids, to_array
from jaxserve.server.request_log import Outcome, RequestLog
from jaxserve.server.streams import Mailbox, Stream
from jaxserve.server.tracing import Tracer
from jaxserve.server.usage import UsageTable
from jaxserve.settings.schema import ServerConfig
from jaxserve.text import Tokenizer
from jaxserve.text.chat_output import ChatFormats
from jaxserve.text.output import Detokenizer, NoText, OutputProcessor, PromptProcessor
from jaxserve.text.structured_output import Guides

log = logging.getLogger(__name__)
INLINE_CHARS = 4096  # longer texts, and longer lists of ids, are converted in a thread
MAX_SALT_CHARS = 1024
MAX_DETOKENIZED_IDS = 2**18  # of one call; or the model's maximum length, if that is more
REPLICA_THREADS = 4  # for calls that may wait for a step
HEARTBEAT_SHARE = 0.75  # of progress_interval: `poll` runs a few times within the rest
STARTING = "starting"
SERVING = "serving"
DRAINING = "draining"
STOPPING = "stopping"
STUCK = "stuck"
RESTARTING = "waiting for its processes, which start again"
BROKEN = "broken"
FAULTS = {BROKEN: "the engine stopped", STUCK: "the devices do not answer"}  # by state
T = TypeVar("T")


class Frontend:
    """Serves calls with one replica. Must be made on the event loop, to which all methods belong.

    There is no replica, and calls are refused, until `open`. `streams` are those in progress, by
    request id. `handoff`: by which routers pass KV to and from the replica, where it has a port for
    others. metrics: of the server. name: of the model, where the server has several. `who`: the
    server, or that model, for people.
    """

    def __init__(self, config: ServerConfig, metrics: FrontendMetrics, name: str = ""):
        self.config = config
        self.name = name
        self.who = f"the model {name!r}" if name else "the server"
        self.state = STARTING
        self.started = int(time.time())
        self.streams: dict[str, Stream] = {}
        self.replica: Replica | None = None
        self.tokenizer: Tokenizer | None = None
        self.guides: Guides | None = None
        self.handoff: KvHandoff | None = None
        self.chat_formats = ChatFormats()
        self.metrics = metrics
        self.usage = UsageTable()
        self.request_log = RequestLog(Tracer(config.traces_endpoint))
        self._loop = asyncio.get_running_loop()
        self._mailbox = Mailbox(self._loop)
        self._replica_threads = concurrent.futures.ThreadPoolExecutor(REPLICA_THREADS, "replica")
        self._state_before_stuck = STARTING
        self._last_token_at = -math.inf

    def open(self, replica: Replica, tokenizer: Tokenizer | None, guides: Guides) -> None:
        """Begins to serve. tokenizer: None for a model that takes and gives token ids only."""
        self.replica = replica
        self.tokenizer = tokenizer
        self.guides = guides
        if tokenizer is not None and tokenizer.template_text:
            chosen = (self.config.tool_call_parser, self.config.reasoning_parser)
            self.chat_formats = ChatFormats.of(tokenizer.template_text, *chosen)
        self.state = SERVING
        self.request_log.model = replica.info.served_name

    def close(self) -> None:
        """Ends the threads and sends the spans that are left; blocks for seconds if no collector
        takes them."""
        if self.guides is not None:
            self.guides.close()
        self._replica_threads.shutdown(wait=False, cancel_futures=True)
        self.request_log.close()

    def check_open(self) -> None:
        """Refuses unless requests are accepted. Errors: RequestError, UNAVAILABLE."""
        if self.state != SERVING:
            raise self._unavailable()

    def require_replica(self) -> Replica:
        """The replica. Errors: RequestError, UNAVAILABLE, while it is built."""
        if self.replica is None:
            raise self._unavailable()
        return self.replica

    def _unavailable(self) -> RequestError:
        return RequestError("", f"{self.who} is {self.state}", "UNAVAILABLE")

    @property
    def info(self) -> ReplicaInfo:
        """Facts about the replica. Errors: as of `require_replica`."""
        return self.require_replica().info

    def check_model(self, name: str) -> str:
        """Returns the identity of the adapter that a model's name stands for, '' where it stands
        for the model itself. Errors: RequestError."""
        if name in ("", self.name) or name in self.info.names:
            return ""
        adapter = self.require_replica().adapters.by_name.get(name)
        if adapter is None:
            raise RequestError(
                "model",
                f"{name[:100]!r} is not served here; {self.info.served_name!r} is",
                "NOT_FOUND",
                reason=UNKNOWN_MODEL,
            )
        return adapter.identity

    @contextlib.asynccontextmanager
    async def generate(self, call: GenerateCall, caller: Caller) -> AsyncIterator[Stream]:
        """Submits a request and gives its stream; cancels what has not ended at the exit.

        Errors: RequestError, at the entry if the call is refused, at the exit if the stream failed.
        """
        stream: Stream | None = None
        try:
            with self._reserve(caller) as reservation:
                request = await self._request(call, caller)
                reservation.add_prompt(len(request.prompt))
                with (
                    offered_kv(self.handoff, request, call.kv_transfer) as ticket,
                    self.request_log.follow(request, call.origin, caller.tenant) as outcome,
                ):
                    stream = self._submit(call, request, caller, reservation, outcome)
                    stream.kv_ticket = ticket
                    try:
                        await stream.accepted()
                        caller.usage.throttle.accepted(self._loop.time())
                        yield stream
                    except asyncio.CancelledError:
                        if stream.failure is None:  # the caller cancelled or went away
                            raise
                    finally:
                        self._close(stream)
                        if not (stream.refused or call.origin.internal):
                            model = call.model or self.info.served_name
                            self.usage.count(caller, model, len(request.prompt), outcome)
                        if self.handoff is not None:
                            self.handoff.ended(request, outcome.finished)
                    if stream.failure is not None:
                        raise stream.failure
        except RequestError as error:
            if stream is not None and stream.refused:
                caller.usage.throttle.refused(error, self._loop.time())
            before_acceptance = stream is None or stream.refused
            if before_acceptance and not call.origin.internal:
                self._count_rejected(error)
            raise

    def _count_rejected(self, error: RequestError) -> None:
        if error.status == "RESOURCE_EXHAUSTED" and self.replica is not None:
            self.replica.count_rejected(error.reason or error.field)

    async def tokenize(self, prompt: Prompt, caller: Caller) -> np.ndarray:
        """Token ids of a prompt. Errors: RequestError."""
        with self._reserve(caller):
            return await self._ids(prompt)

    async def render(self, call: GenerateCall, caller: Caller) -> np.ndarray:
        """Token ids that a call would give the model. Errors: RequestError, as of `generate`."""
        with self._reserve(caller):
            return (await self._request(call, caller)).prompt

    async def detokenize(
        self, ids: Sequence[int], caller: Caller, skip_special: bool = True, field: str = "ids"
    ) -> str:
        """Text of token ids. field: the protocol's name of `ids`, for errors. Errors:
        RequestError."""
        with self._reserve(caller):
            if self.tokenizer is None:
                raise RequestError(field, "this model has no tokenizer", "FAILED_PRECONDITION")
            limit = max(MAX_DETOKENIZED_IDS, self.info.max_model_len)
            if len(ids) > limit:
                raise RequestError(field, f"has {len(ids)} ids; the limit is {limit}")
            work = functools.partial(self._text, self.tokenizer, ids, skip_special, field)
            return await run_in_thread_if(len(ids) >= INLINE_CHARS, work)

    def _reserve(self, caller: Caller) -> contextlib.closing[Reservation]:
        """Counts a request against the caller's limits until the exit. Errors: RequestError."""
        self.check_open()
        return contextlib.closing(caller.reserve(self._loop.time()))

    async def _ids(self, prompt: Prompt) -> np.ndarray:
        work = functools.partial(prompt_ids, prompt, self.tokenizer, self.info.max_model_len)
        return await run_in_thread_if(prompt_cost(prompt) >= INLINE_CHARS, work)

    def _text(
        self, tokenizer: Tokenizer, ids: Sequence[int], skip_special: bool, field: str
    ) -> str:
        array = to_array(field, ids)
        vocab = self.info.vocab
        wrong = array[(array < 0) | (array >= vocab)]
        if wrong.size:
            raise RequestError(field, f"id {wrong[0]} is not in 0 to {vocab - 1}")
        return tokenizer.decode(array.tolist(), skip_special=skip_special)

    @property
    def seconds_since_token(self) -> float:
        """Seconds since any request's last token; infinite before the first."""
        return self._loop.time() - self._last_token_at

    async def abort(self, ids: Sequence[str]) -> int:
        """Ends requests with the reason cancelled; returns how many were running."""
        replica = self.require_replica()
        return await self.ask_replica(lambda: sum(replica.cancel(id) for id in ids))

    async def ask_replica(self, work: Callable[[], T]) -> T:
        """Runs a call of the replica that may wait for seconds, while a step is issued slowly, on
        threads that nothing else uses; returns its result."""
        return await self._loop.run_in_executor(self._replica_threads, work)

    def poll(self) -> None:
        """Sends heartbeats, ends streams whose callers do not read, and follows the replica's
        health. Called a few times a second."""
        now = self._loop.time()
        for stream in list(self.streams.values()):
            stream.send_heartbeat(now)
            stream.abort_stalled(now, self.config.stall_timeout)
        if self.replica is not None and self.state != BROKEN:
            self._check_replica(self.replica)

    def _check_replica(self, replica: Replica) -> None:
        overdue = replica.overdue()
        if not replica.alive:
            log.error(FAULTS[BROKEN])
            self.state = BROKEN
        elif overdue is not None and self.state in (SERVING, DRAINING, STOPPING):
            log.error("a step is overdue by %.1f s: requests are refused until it ends", overdue)
            self._state_before_stuck = self.state
            self.state = STUCK
            self.abort_all(RequestError("", FAULTS[STUCK], "UNAVAILABLE"))
        elif not replica.available and self.state == SERVING:
            log.error("%s lost its processes: requests are refused until it is back", self.who)
            self.state = RESTARTING
        elif replica.available and self.state == RESTARTING:
            log.warning("the processes of %s have started again", self.who)
            self.state = SERVING
        elif overdue is None and self.state == STUCK:
            log.warning("the step that was overdue has ended")
            self.state = self._state_before_stuck

    def abort_all(self, error: RequestError) -> int:
        """Ends every stream with an error; returns how many there were."""
        for stream in self.streams.values():
            stream.fail(error)
        return len(self.streams)

    async def _request(self, call: GenerateCall, caller: Caller) -> Request:
        """Checks a call against the model, and makes a request of it. Errors: RequestError."""
        info = self.info
        arrival = self.require_replica().now()
        self.check_model(call.model)
        if call.kv_transfer is not None and self.handoff is None:
            refuse_transfer(call.kv_transfer)
        if len(call.cache_salt) > MAX_SALT_CHARS:
            length = len(call.cache_salt)
            raise RequestError(
                "cache_salt", f"has {length} characters; the limit is {MAX_SALT_CHARS}"
            )
        if call.sampling.stop and (call.ids_only or self.tokenizer is None):
            raise RequestError("stop", "stop strings need text")
        prompt = self._truncated(call, await self._ids(call.prompt))
        guide = None
        if call.guided is not None:
            assert self.guides is not None
            guide = await asyncio.wrap_future(self.guides.submit(call.guided, call.guided_field))
        request = Request.make(
            self._unused_id(caller, call.request_id),
            prompt,
            call.sampling,
            vocab=info.vocab,
            max_len=info.max_model_len,
            classes=info.class_names,
            arrival=arrival,
            deadline=None if call.timeout is None else arrival + call.timeout,
            guide=guide,
            streamed=call.streamed,
            probe=call.origin.internal,
            **{
                **call.options(),
                "cache_salt": caller.cache_salt(call.cache_salt),
                "adapter": self.check_model(call.model),  # as its name stands for it now
                "tenant": caller.tenant,
            },
        )
        if call.kv_transfer is None or self.handoff is None:
            return request
        return self.handoff.applied(request, call.kv_transfer)

    def _unused_id(self, caller: Caller, given: str) -> str:
        """The id of a new request: the one that its caller gives it, unless another has it. One
        X-Request-Id often stands on all requests of a trace."""
        id = caller.scoped_id(given or f"jaxserve-{secrets.token_hex(8)}")
        return another_id(id) if id in self.streams else id

    def _truncated(self, call: GenerateCall, prompt: np.ndarray) -> np.ndarray:
        """The end of a prompt that the call asks for. Errors: RequestError."""
        count = call.truncate_prompt_tokens
        if count is None:
            return prompt
        limit = self.info.max_model_len - 1
        if count != -1:
            check_integer("truncate_prompt_tokens", count, 1, limit)
        return prompt[-(limit if count == -1 else count) :]

    def _submit(
        self,
        call: GenerateCall,
        request: Request,
        caller: Caller,
        reservation: Reservation,
        outcome: Outcome,
    ) -> Stream:
        self.check_open()  # again: tokenizing may have taken a while
        replica = self.require_replica()
        stream = Stream(
            request,
            self._processor(call, request, replica),
            caller,
            given_id=call.request_id,
            now=self._loop.time(),
            heartbeat_seconds=HEARTBEAT_SHARE * self.config.progress_interval,
            on_tokens=functools.partial(self._tokens_came, reservation),
            outcome=outcome,
        )
        self.streams[request.id] = stream
        replica.post(functools.partial(self._enter, replica, stream))
        return stream

    def _processor(self, call: GenerateCall, request: Request, replica: Replica) -> OutputProcessor:
        detokenizer: Callable[[], Detokenizer] = NoText
        if self.tokenizer is not None and not call.ids_only:
            before = request.prompt.tolist() if is_continued(call.prompt) else ()
            detokenizer = functools.partial(self.tokenizer.stream, not call.keep_special, before)
        kind = PromptProcessor if call.prompt_only else OutputProcessor
        return kind(
            request,
            replica.info.eos_ids,
            detokenizer,
            lambda index: replica.post(functools.partial(replica.stop, request.id, index)),
        )

    def _enter(self, replica: Replica, stream: Stream) -> None:
        """Hands a request to the replica. Runs on the replica's thread."""
        if stream.closed:  # its caller went away meanwhile
            return
        try:
            replica.submit(stream.request, functools.partial(self._mailbox.put, stream))
            if stream.closed:  # while it was submitted: the cancellation may have come too early
                replica.cancel(stream.request.id)
            return
        except RequestError as error:
            refusal = error
        except Exception:
            log.exception("a request could not be submitted")
            refusal = internal_error()
        with contextlib.suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(stream.refuse, refusal)

    def _tokens_came(self, reservation: Reservation) -> None:
        self._last_token_at = self._loop.time()
        reservation.prompt_done()

    def _close(self, stream: Stream) -> None:
        stream.closed = True
        del self.streams[stream.request.id]
        if stream.unfinished and not stream.refused:
            replica = self.require_replica()
            replica.post(functools.partial(replica.cancel, stream.request.id))
