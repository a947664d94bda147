"""Sends KV events over ZeroMQ as vLLM does, so that its subscribers read ours unchanged.

A PUB socket sends frames: topic, sequence number (8 bytes, big-endian), msgpack of [time, events,
rank]. A subscriber that sees a gap asks the ROUTER socket with the first number it lacks, and gets
what is still kept as frames: '', topic, number, payload; the last has the number -1. Frames and
fields: vLLM's vllm/distributed/kv_events.py. A subscriber that is too slow loses messages, and
no other does.

Events carry the tokens of prompts, and ZeroMQ as it is used here authenticates no client: any that
reaches the port can read them (SECURITY.md).
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from types import ModuleType
from typing import Any

from jaxserve.observe.kv_events import KvEvent, KvEventLog
from jaxserve.settings.schema import ConfigError

ENDPOINT = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.*-]+):(?P<port>[0-9]{1,5})")
KEPT_BATCHES = 10_000  # for replay, as vLLM has it
KEPT_BYTES = 64 << 20
SEND_QUEUE = 20_000  # messages that wait for a slow subscriber
ANSWER_QUEUE = 2 * KEPT_BATCHES  # the same, of what it asked for: an answer fits as a whole
POLL_SECONDS = 0.05  # between looks for requests of replay
RETRY_SECONDS = 1.0  # after a fault
CLOSE_SECONDS = 2.0
MAX_REQUEST_BYTES = 1024  # of what subscribers send
NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
RANK = 0  # of data parallelism, of which a replica has none
log = logging.getLogger(__name__)


def topic_of(address: str, model: str) -> str:
    """The topic under which llm-d's router subscribes. address: HOST:PORT of the HTTP port."""
    return f"kv@{address}@{model}"


def endpoint_host(field: str, endpoint: str) -> str:
    """The host of tcp://HOST:PORT. Errors: ConfigError of `field`."""
    match = ENDPOINT.fullmatch(endpoint)
    if match is None or int(match["port"]) > 65535:
        raise ConfigError(field, f"must be like tcp://127.0.0.1:5557, not {endpoint[:100]!r}")
    return match["host"]


def _libraries(field: str) -> tuple[ModuleType, ModuleType]:
    """ZeroMQ and msgpack. Errors: ConfigError where they are not installed."""
    try:
        import msgpack
        import zmq
    except ImportError as error:
        said = f"needs {error.name}: pip install 'jaxserve[cluster]'"
        raise ConfigError(field, said) from None
    return zmq, msgpack


class KvEventPublisher:
    """Listens from the moment it is made; sends what `log` has from `start` on.

    endpoint, replay: tcp://HOST:PORT of the PUB and of the ROUTER socket; port 0 takes a free one.
    `endpoint` and `replay` tell what was taken. Errors: ConfigError for an endpoint that cannot be
    had, or without the libraries of jaxserve[cluster].
    """

    def __init__(self, endpoint: str, replay: str | None = None):
        self._zmq, self._msgpack = _libraries("kv_events")
        self._context = self._zmq.Context()
        self._router: Any = None
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._number = 0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.log: KvEventLog | None = None
        self.replay: str | None = None
        try:
            self._publisher, self.endpoint = self._bind(
                "kv_events", self._zmq.PUB, endpoint, SEND_QUEUE
            )
            if replay is not None:
                self._router, self.replay = self._bind(
                    "kv_events_replay", self._zmq.ROUTER, replay, ANSWER_QUEUE
                )
        except ConfigError:
            self._context.destroy(linger=0)
            raise

    def _bind(self, field: str, kind: int, endpoint: str, queue: int) -> tuple[Any, str]:
        host = endpoint_host(field, endpoint)
        socket = self._context.socket(kind)
        socket.setsockopt(self._zmq.SNDHWM, queue)
        socket.setsockopt(self._zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        socket.setsockopt(self._zmq.IPV6, int(":" in host))
        try:
            # ZeroMQ has a star where others have port 0
            socket.bind(re.sub(r":0+$", ":*", endpoint))
        except self._zmq.ZMQError as error:
            raise ConfigError(field, f"cannot listen on {endpoint}: {error.strerror}") from None
        return socket, socket.getsockopt_string(self._zmq.LAST_ENDPOINT)

    def start(self, topic: str, block_size: int) -> KvEventLog:
        """Sends under this topic what is written into the log that is returned."""
        events = self.log = KvEventLog(block_size)
        self._topic = topic.encode()
        self._thread = threading.Thread(
            target=self._run, args=(events,), name="kv-events", daemon=True
        )
        self._thread.start()
        return events

    def close(self) -> None:
        """Sends what there is and ends; waits seconds at most."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                log.error("the thread of KV events does not end")
                return
        self._context.destroy(linger=0)

    def _run(self, events: KvEventLog) -> None:
        while not self._closing.is_set():
            events.changed.wait(POLL_SECONDS)
            try:
                self._send_all(events)
                if self._router is not None and self._router.poll(0):
                    self._answer(self._router.recv_multipart())
            except Exception:
                log.exception("KV events could not be sent")
                events.lose()
                self._closing.wait(RETRY_SECONDS)

    def _send_all(self, events: KvEventLog) -> None:
        for batch in events.take():
            self._send(batch)

    def _send(self, events: list[KvEvent]) -> None:
        payload = self._msgpack.packb([time.time(), events, RANK])
        number = self._number
        self._number += 1
        self._publisher.send_multipart([self._topic, _bytes_of(number), payload])
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > KEPT_BATCHES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer(self, frames: list[bytes]) -> None:
        """Sends a subscriber the batches that it lacks and that are still kept."""
        if len(frames) != 3 or frames[1] or len(frames[2]) != NUMBER_BYTES:
            log.warning("a request for KV events is no number of %d bytes", NUMBER_BYTES)
            return
        asking = frames[0]
        first = int.from_bytes(frames[2], "big")
        for number, payload in self._kept:
            if number >= first:
                self._router.send_multipart([asking, b"", self._topic, _bytes_of(number), payload])
        self._router.send_multipart([asking, b"", b"", END, b""])


def _bytes_of(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "big")
