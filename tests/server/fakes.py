"""A replica and a tokenizer that can be checked by hand: the tokens are bytes, and the next token
is `next_token(all tokens so far)`."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tokenizers
from prometheus_client import CollectorRegistry

from jaxserve.api.attainment import Promise, in_time
from jaxserve.api.errors import RequestError
from jaxserve.api.events import Accepted, Event, Finished, Logprobs, Progress, Timing, Token, Usage
from jaxserve.api.request import Request
from jaxserve.cache.block_events import BlockEvents
from jaxserve.observe.metric_rows import READ
from jaxserve.observe.metrics import Metrics
from jaxserve.replica.adapters import NoAdapters
from jaxserve.replica.info import ReplicaInfo
from jaxserve.replica.protocol import Sink
from jaxserve.replica.weights import NoWeights
from jaxserve.scheduling import Load
from jaxserve.scheduling.events import EventBus, Rejected
from jaxserve.settings.schema import EngineConfig
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.detokenizer import Detokenizer, byte_alphabet

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"  # a caller's traceparent
EOS = 256
VOCAB = 257
MAX_LEN = 4096
EMBEDDING = 8  # dimensions


def next_token(tokens: Sequence[int], index: int) -> int:
    """The letter after the sum of all tokens (and the completion's index); never EOS."""
    return ord("a") + (sum(tokens) + index) % 26


def expected(prompt: Sequence[int], count: int, index: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, index))
    return tokens[len(prompt) :]


def embedding(prompt: Sequence[int]) -> np.ndarray:
    """Counts how often each of EMBEDDING kinds of bytes is in a prompt; equal texts are alike, and
    those that share letters are similar."""
    counts = np.bincount(np.asarray(prompt) % EMBEDDING, minlength=EMBEDDING)
    return counts.astype(np.float32) + 0.25


PIECES = [bytes([byte]) for byte in range(256)]


class ByteDetokenizer(Detokenizer):
    """Takes tokens for bytes; EOS is no text."""

    def __init__(self) -> None:
        super().__init__(PIECES, frozenset(), strips=False)


class FakeTokenizer:
    vocab = VOCAB
    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", {})

    @property
    def template_text(self) -> str:
        return self.template.source

    def encode(self, text: str, special: bool = True, added: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    @property
    def config(self) -> dict:
        return {"eos_token": "<end>", "chat_template": self.template.source}

    def to_json(self) -> str:
        """Describes a tokenizer of the library: a token for each byte."""
        alphabet = byte_alphabet()
        vocabulary = {alphabet[byte]: byte for byte in range(256)} | {"<end>": EOS}
        library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
        library.decoder = tokenizers.decoders.ByteLevel()
        library.add_special_tokens(["<end>"])
        return library.to_str()

    def piece(self, id: int) -> bytes:
        return bytes([id]) if id < 256 else b""

    def chat(self, messages: list[dict], **rest) -> list[int]:
        return self.encode(self.template.render(messages, **rest))

    def is_token(self, text: str) -> bool:
        return False

    def stream(self, skip_special: bool = True, prompt: Sequence[int] = ()) -> ByteDetokenizer:
        return ByteDetokenizer()

    def positions(self, text: str, ids: Sequence[int]) -> list[int]:
        return ByteDetokenizer().positions(*ids)


@dataclasses.dataclass(frozen=True)
class FakeModel:
    """A model's description, as far as `jaxserve.llm` asks for it."""

    name: str = "fake"
    vocab: int = VOCAB
    eos_ids: tuple[int, ...] = (EOS,)
    sampling: tuple[tuple[str, float], ...] = ()


class Running:
    """A request in the fake replica."""

    def __init__(self, request: Request, sink: Sink):
        self.request = request
        self.sink = sink
        prompt = [int(token) for token in request.prompt]
        self.tokens = {index: [*prompt, *request.output(index)] for index in request.completions}
        self.ended: dict[int, str] = {}  # index -> reason, decided outside of the step
        self.prefilled = 0
        going_on = request.continuation
        self.first = 0.0 if going_on is None else going_on.first_token or 0.0


class FakeReplica:
    """A `Replica` with one thread; a step takes `step_seconds` and gives each running completion a
    token. A prompt takes one step per `chunk` tokens.

    Tests may set `alive`, `paused`, `fault` (raised by `submit`) and `overdue_seconds` (of a step
    that hangs), and read what was asked for: `requests`, `submitted`, `stopped`, `cancelled`,
    `prefill_steps`, `guides_seen`.
    """

    def __init__(
        self,
        step_seconds: float = 0.0,
        chunk: int = 10**9,
        max_queue: int = 10**6,
        script: Sequence[int] = (),
    ):
        self.config = EngineConfig()  # with `model` and `max_len`, of the engine: for jaxserve.llm
        self.model = FakeModel()
        self.max_len = MAX_LEN
        self.alive = True
        self.available = True
        self.block_events = BlockEvents()
        self.adapters = NoAdapters()
        self.weights = NoWeights()
        self.paused = False
        self.fault: Exception | None = None
        self.overdue_seconds: float | None = None
        self.bus = EventBus()
        self.metrics = Metrics(4, ("chat",), lambda: dict.fromkeys(READ, 3.0))
        self.metrics.listen(self.bus, prefix_caching=True)
        self.requests: dict[str, Running] = {}
        self._chunk = chunk
        self._max_queue = max_queue
        self.play(script, step_seconds)
        self._lock = threading.RLock()
        self._work = threading.Event()
        self._closed = False
        self._draining = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def play(self, script: Sequence[int] = (), step_seconds: float = 0.0) -> None:
        """Begins to say a script, and forgets what was asked for before."""
        self._script = script
        self._step_seconds = step_seconds
        self.submitted: list[Request] = []
        self.guides_seen: list[Any] = []
        self.stopped: list[tuple[str, int]] = []
        self.cancelled: list[str] = []
        self.prefill_steps = 0

    @property
    def info(self) -> ReplicaInfo:
        return ReplicaInfo(
            served_name=self.config.source.model,
            model=self.model.name,
            vocab=self.model.vocab,
            layers=1,
            heads=1,
            kv_heads=1,
            head_dim=1,
            d_model=EMBEDDING,
            kv_bytes_per_token=4,
            bos_id=None,
            eos_ids=self.model.eos_ids,
            max_model_len=MAX_LEN,
            mesh=self.config.mesh,
            dtype=self.config.source.dtype,
            kv_dtype=self.config.source.dtype,
            platform="cpu",
            block_size=self.config.cache.block_size,
            pages_per_lane=10,
            max_seqs=self.config.scheduler.max_seqs,
            max_queue=self._max_queue,
            chunk_tokens=self.config.scheduler.chunk_tokens,
            class_names=tuple(self.config.scheduler.class_names),
            settings=dataclasses.asdict(self.config),
            sampling_defaults=dict(self.model.sampling),
        )

    @property
    def metrics_registry(self) -> CollectorRegistry:
        return self.metrics.registry

    def count_rejected(self, reason: str) -> None:
        self.bus.publish(Rejected(reason))

    def now(self) -> float:
        return time.monotonic()

    def start(self) -> None:
        self._thread.start()

    def drain(self) -> None:
        self._draining = True

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._work.set()
        if self._thread.is_alive():
            self._thread.join()
        self._end_all(RequestError("", "the engine was closed", "UNAVAILABLE"))

    def post(self, command: Callable[[], object]) -> None:
        command()

    def submit(self, request: Request, sink: Sink) -> None:
        if self.fault:
            raise self.fault
        with self._lock:
            if self._draining or self._closed:
                raise RequestError("", "the engine is not running", "UNAVAILABLE")
            if request.id in self.requests:
                raise RequestError("request_id", f"{request.id!r} is running", "ALREADY_EXISTS")
            if len(self.requests) >= self._max_queue and request.continuation is None:
                raise RequestError(
                    "queue",
                    f"{self._max_queue} requests wait already",
                    "RESOURCE_EXHAUSTED",
                    reason="queue",
                )
            if len(request.prompt) >= MAX_LEN:
                raise RequestError("prompt", f"has {len(request.prompt)} tokens")
            self.requests[request.id] = running = Running(request, sink)
            self.submitted.append(request)
            if request.guide is not None:
                self.guides_seen.append(request.guide)
            self._tell(running, [Accepted(len(self.requests) - 1)])
        self._work.set()

    def cancel(self, request_id: str, reason: str = "cancelled") -> bool:
        with self._lock:
            running = self.requests.get(request_id)
            if running is None:
                return False
            self.cancelled.append(request_id)
            self._tell(running, self._ends(running, reason))
            return True

    def stop(self, request_id: str, index: int) -> bool:
        with self._lock:
            self.stopped.append((request_id, index))
            running = self.requests.get(request_id)
            if running is None or index not in running.tokens:
                return False
            running.ended[index] = "stop"
            return True

    def load(self) -> Load:
        return Load(
            running=len(self.requests),
            waiting=0,
            queued_prefill_tokens=0,
            queued_prefill_seconds=0.0,
            pages_free=10,
            pages_total=10,
            pages_cached=0,
        )

    def overdue(self) -> float | None:
        return self.overdue_seconds

    def view(self, since: int = 0) -> dict[str, Any]:
        return {"model": self.info.model, "mesh": str(self.info.mesh), "alive": self.alive}

    def flush_cache(self) -> int:
        return 0

    def die(self) -> None:
        """Ends the replica as a broken device loop does."""
        with self._lock:
            self.alive = False
            self._end_all(RequestError("", "the engine stopped", "INTERNAL"))

    def _end_all(self, error: RequestError) -> None:
        with self._lock:
            for running in list(self.requests.values()):
                self._tell(running, self._ends(running, "error", error))

    def _tell(self, running: Running, events: Sequence[Event]) -> None:
        """Passes the events of a step to the sink; one that raises gets no more."""
        try:
            running.sink(events)
        except Exception:
            running.sink = lambda events: None
            self.cancel(running.request.id)

    def _run(self) -> None:
        while not self._closed:
            if self.paused or not self.requests:
                self._work.wait(0.005)
                self._work.clear()
                continue
            if self._step_seconds:
                time.sleep(self._step_seconds)
            with self._lock:
                for running in list(self.requests.values()):
                    self._step(running)

    def _step(self, running: Running) -> None:
        request = running.request
        if request.deadline is not None and time.monotonic() > request.deadline:
            self._tell(running, self._ends(running, "deadline"))
            return
        if running.prefilled < len(request.prompt):
            self.prefill_steps += 1
            running.prefilled = min(len(request.prompt), running.prefilled + self._chunk)
            self._tell(running, [Progress(0, running.prefilled, len(request.prompt))])
            return
        running.first = running.first or time.monotonic()
        if request.embed:
            self._tell(running, self._ends(running, "stop"))
            return
        events = [event for index in list(running.tokens) for event in self._emit(running, index)]
        self._tell(running, events)

    def _emit(self, running: Running, index: int) -> list[Event]:
        """Events of a step of one completion: its next token, and its end where that is the
        last."""
        sampling = running.request.sampling
        tokens = running.tokens[index]
        if index in running.ended:
            return [self._end(running, index, running.ended[index])]
        made = len(tokens) - len(running.request.prompt)
        token = self._script[made] if made < len(self._script) else next_token(tokens, index)
        tokens.append(token)
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
        value = -0.5 - (made + 16 * index) / 64  # differs by token and completion; exact in binary
        logprobs = None if sampling.logprobs is None else Logprobs(value, ((token, value),))
        events: list[Event] = [Token(index, token, logprobs)]
        if token in ends and made + 1 >= sampling.min_tokens:
            events.append(self._end(running, index, "stop"))
        elif made + 1 >= sampling.max_tokens:
            events.append(self._end(running, index, "length"))
        return events

    def _ends(
        self, running: Running, reason: str, error: RequestError | None = None
    ) -> list[Event]:
        """Ends all completions of a request that have not ended."""
        return [self._end(running, index, reason, error) for index in list(running.tokens)]

    def _end(
        self, running: Running, index: int, reason: str, error: RequestError | None = None
    ) -> Finished:
        request = running.request
        now = time.monotonic()
        made = len(running.tokens.pop(index)) - len(request.prompt)
        timing = Timing(0.0, max(running.first - request.arrival, 0.0), now - request.arrival)
        logprobs = (
            None
            if request.sampling.prompt_logprobs is None
            else (None, *[Logprobs(-1.0)] * (len(request.prompt) - 1))
        )
        if not running.tokens:
            del self.requests[request.id]
        usage = Usage(len(request.prompt), 0, made)
        embedded = embedding(request.prompt) if request.embed and reason == "stop" else None
        slo = request.slo
        promise = Promise(slo.ttft or math.inf, slo.tpot or math.inf)
        tpot = timing.tpot(made) if running.first else 0.0
        kept = promise.kept(timing.first_token, tpot)
        return Finished(
            index,
            reason,
            usage,
            timing,
            logprobs,
            error,
            embedding=embedded,
            in_time=in_time(reason, kept),
        )
