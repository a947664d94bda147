"""The publisher as its subscribers see it: over real sockets, decoded by types written from vLLM's
schema, and by its own where vLLM is installed."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time

import numpy as np
import pytest

from jaxserve.cache.block_events import Medium, StoredBlocks
from jaxserve.observe import kv_event_publisher
from jaxserve.observe.kv_event_publisher import KvEventPublisher, topic_of
from jaxserve.observe.kv_events import KvEventLog
from jaxserve.settings.schema import ConfigError
from tests.observe.kv_schema import DECODER, Index
from tests.waiting import eventually
from tests.work import calls_of

zmq = pytest.importorskip("zmq", reason="pip install 'jaxserve[cluster]'")
ANY = "tcp://127.0.0.1:0"
SIZE = 4
MANY = 80  # messages of 100 KB
MS = 60_000  # most that a test waits for a message


def decode(payload: bytes):
    """By vLLM's own types where they can be had: those must read it, too."""
    with contextlib.suppress(ImportError):
        import msgspec
        from vllm.distributed.kv_events import KVEventBatch

        msgspec.msgpack.decode(payload, type=KVEventBatch)
    return DECODER.decode(payload)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def stored(number: int, count: int = 1) -> StoredBlocks:
    keys = [key(number + block) for block in range(count)]
    return StoredBlocks(keys, tokens=np.full(count * SIZE, number, np.int32))


class Subscriber:
    """Reads a publisher as routers do: sees gaps by the numbers, asks for what is missing."""

    def __init__(self, publisher: KvEventPublisher, queue: int = 1000):
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVHWM, queue)
        self.socket.setsockopt(zmq.RCVBUF, 1 << 16)
        self.socket.setsockopt(zmq.RCVTIMEO, MS)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self.socket.connect(publisher.endpoint)
        self._asking = self._context.socket(zmq.DEALER)
        self._asking.setsockopt(zmq.RCVTIMEO, MS)
        if publisher.replay:
            self._asking.connect(publisher.replay)
        self.topics: set[bytes] = set()

    def read(self) -> tuple[int, list]:
        """The number and the events of the next message."""
        topic, number, payload = self.socket.recv_multipart()
        self.topics.add(topic)
        return int.from_bytes(number, "big"), decode(payload).events

    def replay(self, first: int) -> list[tuple[int, list]]:
        """Asks the publisher for what it still has from a number on."""
        self._asking.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while True:
            _, topic, number, payload = self._asking.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == -1:
                return found
            found.append((int.from_bytes(number, "big"), decode(payload).events))

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def open_():
    """Opens publishers and subscribers, and closes them."""
    with contextlib.ExitStack() as stack:

        def enter(one):
            stack.callback(one.close)
            return one

        yield enter


@pytest.fixture
def published(open_) -> tuple[KvEventPublisher, KvEventLog]:
    publisher = open_(KvEventPublisher(ANY, ANY))
    return publisher, publisher.start(topic_of("10.0.0.1:8000", "m/x"), SIZE)


def joined(publisher: KvEventPublisher, events: KvEventLog, open_, **rest) -> Subscriber:
    """A subscriber that gets what is sent from now on: a first block told it so."""
    subscriber = open_(Subscriber(publisher, **rest))
    subscriber.socket.setsockopt(zmq.RCVTIMEO, 20)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        events.stored(stored(10**6))
        with contextlib.suppress(zmq.Again):
            while True:
                subscriber.read()
                subscriber.socket.setsockopt(zmq.RCVTIMEO, 200)
        if subscriber.topics:
            subscriber.socket.setsockopt(zmq.RCVTIMEO, MS)
            return subscriber
    raise AssertionError("the subscriber never heard a word")


def test_a_subscriber_reads_every_kind_of_event_in_order(published, open_):
    publisher, events = published
    subscriber = joined(publisher, events, open_)
    events.stored(stored(1, 3))
    number, first = subscriber.read()
    events.removed([key(3)], Medium.DEVICE)
    events.removed([key(2)], Medium.DEVICE)
    events.cleared(Medium.DEVICE)
    found = [*first]
    while type(found[-1]).__name__ != "AllBlocksCleared":
        number, more = subscriber.read()
        found += more
    assert found[0].block_hashes == [1, 2, 3] and found[0].token_ids == [1] * 3 * SIZE
    assert [number for event in found[1:-1] for number in event.block_hashes] == [3, 2]
    assert subscriber.topics == {b"kv@10.0.0.1:8000@m/x"}


def test_replay_gives_what_was_sent_from_a_number_on(published, open_):
    publisher, events = published
    subscriber = joined(publisher, events, open_)
    sent = []
    for block in range(5):
        events.stored(stored(block))
        sent.append(subscriber.read())
    assert subscriber.replay(sent[2][0]) == sent[2:]
    assert subscriber.replay(0)[-5:] == sent
    assert subscriber.replay(sent[-1][0] + 1) == []


def test_replay_keeps_no_more_than_its_limit(published, open_, monkeypatch):
    monkeypatch.setattr(kv_event_publisher, "KEPT_BATCHES", 3)
    publisher, events = published
    subscriber = joined(publisher, events, open_)
    for block in range(6):
        events.stored(stored(block))
        number, _ = subscriber.read()
    assert [one for one, _ in subscriber.replay(0)] == [number - 2, number - 1, number]


def test_a_slow_subscriber_loses_messages_sees_the_gap_and_replays_it(open_, monkeypatch):
    monkeypatch.setattr(kv_event_publisher, "SEND_QUEUE", 20)
    publisher = open_(KvEventPublisher(ANY, ANY))
    events = publisher.start(topic_of("h:1", "m"), SIZE)
    slow = joined(publisher, events, open_, queue=1)
    other = joined(publisher, events, open_, queue=0)
    for block in range(MANY):  # large ones, so that the system's buffers do not hold them all
        events.stored(stored(block * 10_000, 4_000))
        _, found = other.read()  # the other one is not held up
        assert found[0].block_hashes[0] == block * 10_000
    got: dict[int, list] = {}
    slow.socket.setsockopt(zmq.RCVTIMEO, 500)
    with contextlib.suppress(zmq.Again):
        while True:
            number, found = slow.read()
            got[number] = found
    assert len(got) < MANY, "it kept up: nothing is tested"
    first = next(n for n in range(min(got), min(got) + MANY + 1) if n not in got)
    monkeypatch.undo()
    for number, found in slow.replay(first):
        got.setdefault(number, found)
    assert sorted(got) == list(range(min(got), max(got) + 1))


def test_a_request_that_is_no_number_is_ignored_and_the_next_is_served(published, open_, caplog):
    publisher, events = published
    subscriber = joined(publisher, events, open_)
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(publisher.replay)
    for frames in ([b""], [b"", b"short"], [b"x", b"y", b"z"], [b"", b"12345678", b"more"]):
        stranger.send_multipart(frames)
    with caplog.at_level(logging.WARNING):
        eventually(lambda: len(caplog.records) >= 4)
    assert subscriber.replay(0)
    context.destroy(linger=0)


def test_what_cannot_be_sent_is_sent_anew(published, open_, monkeypatch, caplog):
    monkeypatch.setattr(kv_event_publisher, "RETRY_SECONDS", 0.01)
    publisher, events = published
    subscriber = joined(publisher, events, open_)
    take = events.take

    def taken_and_lost():
        if not list(take()):
            return []
        monkeypatch.setattr(events, "take", take)
        raise OSError("no room")

    monkeypatch.setattr(events, "take", taken_and_lost)
    events.stored(stored(7))
    index = Index()
    while 7 not in index.blocks():
        for event in subscriber.read()[1]:
            index.apply(event)
    assert "no room" in caplog.text


def test_close_ends_thread_and_sockets(open_):
    publisher = KvEventPublisher(ANY, ANY)
    publisher.start("kv@h:1@m", SIZE)
    publisher.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kv-events"]
    again = open_(KvEventPublisher(publisher.endpoint, publisher.replay))
    assert again.endpoint == publisher.endpoint


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:5557", "tcp://127.0.0.1", "tcp://h:70000", "ipc:///tmp/x", "tcp://:1"]
)
def test_an_endpoint_that_is_none_is_refused_by_name(endpoint):
    with pytest.raises(ConfigError, match=r"kv_events: must be like tcp://127\.0\.0\.1:5557"):
        KvEventPublisher(endpoint)


def test_a_port_that_is_taken_is_said(open_):
    first = open_(KvEventPublisher(ANY))
    with pytest.raises(ConfigError, match=r"kv_events_replay: cannot listen on .* in use"):
        KvEventPublisher(ANY, first.endpoint)


def test_without_the_libraries_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "msgpack", None)
    with pytest.raises(ConfigError, match=r"needs msgpack: pip install 'jaxserve\[cluster\]'"):
        KvEventPublisher(ANY)


def test_the_cache_s_thread_hands_over_a_chunk_with_few_calls(open_):
    """The calls for each block of a chunk that a step publishes."""
    publisher = open_(KvEventPublisher(ANY))
    events = publisher.start(topic_of("h:1", "m"), 16)
    tokens = np.arange(1024, dtype=np.int32)
    chunks = [
        StoredBlocks([key(chunk * 64 + block) for block in range(64)], tokens=tokens)
        for chunk in range(200)
    ]
    publish = lambda: [events.stored(chunk) for chunk in chunks]
    assert calls_of(publish) < 4 * 64 * len(chunks)
