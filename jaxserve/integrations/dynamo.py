"""A jaxserve engine as a backend of NVIDIA Dynamo: its frontend and router in front, our scheduler,
cache and engine behind.

  python -m jaxserve.integrations.dynamo --model=FOLDER --served_model_name=NAME \\
      --discovery_backend=file --mesh=kvp=2

Dynamo tokenizes and detokenizes; requests come as token ids. The router learns which prefixes are
here from KV events, which Dynamo's worker reads on a loopback port. Source: Dynamo's
dynamo.common.backend, release 1.6, whose API is marked beta; see docs/routers.md.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from dynamo.common.backend import EngineConfig as DynamoConfig
from dynamo.common.backend import LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.publisher import KvEventSource, ZmqSource
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, WorkerUnavailable

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Event, Finished
from jaxserve.api.request import Request
from jaxserve.cli.engine_flags import engine_config, engine_groups
from jaxserve.integrations.dynamo_requests import Chunk, TokenText, chunks_of, request_of
from jaxserve.llm import open_engine
from jaxserve.observe.kv_event_publisher import KvEventPublisher, topic_of
from jaxserve.replica.protocol import Replica
from jaxserve.settings.fields import Option
from jaxserve.settings.flags import Command, UsageError, parse
from jaxserve.settings.schema import ConfigError, EngineConfig
from jaxserve.settings.schema.engine import SERVED
from jaxserve.text import Tokenizer

EVENTS_ENDPOINT = "tcp://127.0.0.1:0"
DYNAMO = [
    Option("served_model_name", str, "", "name that requests ask for; default: the model's"),
    Option("namespace", str, "dynamo", "Dynamo's namespace"),
    Option("component", str, "jaxserve", "name of this component in the namespace"),
    Option(
        "discovery_backend",
        str,
        "etcd",
        "where Dynamo's parts find each other",
        choices=("etcd", "kubernetes", "file", "mem"),
    ),
    Option("event_plane", str, "zmq", "how Dynamo sends events", choices=("zmq", "nats")),
]
COMMAND = Command({"dynamo": DYNAMO, **engine_groups(**SERVED)}, lambda values: 0)
ERRORS = {"UNAVAILABLE": WorkerUnavailable, "RESOURCE_EXHAUSTED": WorkerUnavailable}


class JaxserveEngine(LLMEngine):
    """One replica, driven by Dynamo's worker: `start`, `generate`, `abort`, `cleanup`."""

    def __init__(self, config: EngineConfig, name: str):
        self._config = config
        self._name = name
        self._replica: Replica | None = None
        self._tokenizer: Tokenizer | None = None
        self._publisher: KvEventPublisher | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[JaxserveEngine, WorkerConfig]:
        """Reads the flags: those of `jaxserve serve` for the engine, and Dynamo's. Errors:
        SystemExit for flags that cannot be used."""
        try:
            values = parse(COMMAND, sys.argv[1:] if argv is None else argv)
            config = engine_config(values)
        except (UsageError, ConfigError) as error:
            raise SystemExit(f"jaxserve.integrations.dynamo: {error}") from None
        model = config.source.model
        name = values["served_model_name"] or os.path.basename(model.rstrip("/"))
        return cls(config, name), WorkerConfig(
            namespace=values["namespace"],
            component=values["component"],
            model_name=model,
            served_model_name=name,
            discovery_backend=values["discovery_backend"],
            event_plane=values["event_plane"],
        )

    async def start(self, worker_id: int) -> DynamoConfig:
        """Loads and compiles the model. Errors: ConfigError."""
        build = functools.partial(open_engine, self._config, progress=False)
        replica, self._tokenizer = await asyncio.to_thread(build)
        self._replica = replica
        info = replica.info
        self._publisher = KvEventPublisher(EVENTS_ENDPOINT)
        events = self._publisher.start(topic_of(str(worker_id), self._name), info.block_size)
        replica.block_events.subscribe(events)
        replica.start()
        return DynamoConfig(
            model=self._config.source.model,
            served_model_name=self._name,
            llm=LlmRegistration(
                context_length=info.max_model_len,
                kv_cache_block_size=info.block_size,
                total_kv_blocks=info.pages_per_lane * info.mesh.kvp,
                max_num_seqs=info.max_seqs,
                max_num_batched_tokens=info.chunk_tokens,
            ),
        )

    async def kv_event_sources(self) -> list[KvEventSource]:
        """Returns the addresses at which Dynamo's worker reads our KV events."""
        assert self._publisher is not None
        return [ZmqSource(endpoint=self._publisher.endpoint)]

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[Chunk, None]:
        """Streams the tokens of a request. Errors: Dynamo's own, by which its frontend answers."""
        replica = self._replica
        if replica is None:
            raise EngineShutdown("the engine is closed")
        try:
            ours = request_of(request, context.id(), replica.info, replica.now())
            async for chunk in _stream(replica, ours, self._token_text):
                yield chunk
        except RequestError as error:
            raise ERRORS.get(error.status, InvalidArgument)(str(error)) from None

    def _token_text(self, id: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{id}"
        return self._tokenizer.piece(id).decode(errors="replace")

    async def abort(self, context: Any) -> None:
        """Ends a request whose caller went away."""
        if (replica := self._replica) is not None:
            replica.post(functools.partial(replica.cancel, context.id()))

    async def cleanup(self) -> None:
        """Ends engine and events; may be called again, and after a start that failed."""
        replica, self._replica = self._replica, None
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            await asyncio.to_thread(publisher.close)
        if replica is not None:
            await asyncio.to_thread(replica.close)


async def _stream(
    replica: Replica, request: Request, text: TokenText
) -> AsyncGenerator[Chunk, None]:
    """The chunks of a request until all its completions have ended; cancels it where the caller
    stops before. Errors: RequestError."""
    loop = asyncio.get_running_loop()
    came: asyncio.Queue[Sequence[Event] | RequestError] = asyncio.Queue()

    def tell(what: Sequence[Event] | RequestError) -> None:
        """Runs on the replica's thread."""
        loop.call_soon_threadsafe(came.put_nowait, what)

    def enter() -> None:
        try:
            replica.submit(request, lambda events: tell(list(events)))
        except RequestError as error:
            tell(error)

    replica.post(enter)
    remaining = request.sampling.n
    try:
        while remaining:
            events = await came.get()
            if isinstance(events, RequestError):
                remaining = 0
                raise events
            remaining -= sum(isinstance(event, Finished) for event in events)
            for chunk in chunks_of(events, text):
                yield chunk
    finally:
        if remaining:
            replica.post(functools.partial(replica.cancel, request.id))


if __name__ == "__main__":
    from dynamo.common.backend.run import run

    run(JaxserveEngine)
