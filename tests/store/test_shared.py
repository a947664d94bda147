"""The store that replicas share: what one puts another finds, and nobody waits for it."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from jaxserve.clock import VirtualClock
from jaxserve.store import shared
from jaxserve.store.shared import LEAST, ROWS, WAITING, SharedTier
from jaxserve.store.tiered import TieredBlocks
from tests.store.test_tiered import SIZE, block, fill, name, put, read
from tests.waiting import SOON, eventually

NAMES = [name(number) for number in range(8)]


class Shelves:
    """A store in a dict, which may hang, fail, lie about what it has, or refuse what is put."""

    def __init__(self):
        self.blocks: dict[bytes, bytes] = {}
        self.ends: dict[bytes, float] = {}
        self.lies: set[bytes] = set()
        self.refuses = False
        self.error: Exception | None = None
        self.go = threading.Event()
        self.go.set()
        self.calls: list[str] = []
        self.closed = False

    def _called(self, what: str) -> None:
        self.calls.append(what)
        self.go.wait(200)
        if self.error is not None:
            raise self.error

    def put(self, keys, blocks, expires=0.0, keep=False) -> list[bool]:
        self._called("put")
        assert len(keys) == len(blocks) <= ROWS and keep == bool(expires)
        if self.refuses:
            return [False] * len(keys)
        for key, data in zip(keys, blocks):
            self.blocks[key] = data.tobytes()
            self.ends[key] = expires
        return [True] * len(keys)

    def get(self, keys, into) -> list[bool]:
        self._called("get")
        assert len(keys) == len(into) <= ROWS
        for key, row in zip(keys, into):
            if key in self.blocks:
                row[:] = np.frombuffer(self.blocks[key], np.uint8)
        return [key in self.blocks for key in keys]

    def contains(self, keys) -> list[bool]:
        self._called("contains")
        return [key in self.blocks or key in self.lies for key in keys]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def store() -> Shelves:
    return Shelves()


@pytest.fixture
def opened(store):
    """Makes replicas' tiers over the store."""
    made: list[TieredBlocks] = []

    def open_(slots: int = 32) -> TieredBlocks:
        made.append(TieredBlocks(slots, SIZE, VirtualClock(), None, SharedTier(store, SIZE)))
        return made[-1]

    yield open_
    store.go.set()
    store.error = None
    for tiers in made:
        tiers.close()
    assert store.closed == bool(made)


def prefetched(tiers: TieredBlocks, keys: list[bytes]) -> None:
    """Waits until what the shared store has of these is in host memory."""
    lookup = tiers.prefetch(keys)
    eventually(lambda: lookup.answered and not tiers.host.expected)


def stocked(store: Shelves, count: int = 8) -> None:
    for number in range(count):
        store.blocks[name(number)] = block(number).tobytes()


def test_what_leaves_host_memory_is_found_by_another_replica(store, opened):
    one, other = opened(4), opened()
    for number in range(8):
        put(one, number)
    fill(one)
    eventually(lambda: set(NAMES) <= set(store.blocks))
    assert not other.holds(name(0)) and not read(other, 0)  # nobody asked for it so far
    prefetched(other, NAMES)
    assert all(read(other, number) for number in range(8))
    assert one.counts().to_shared >= 8 and other.counts().shared_reads == 8
    assert one.outlasts and one.shared


def test_blocks_count_as_there_while_they_come_and_who_reads_one_waits(store, opened):
    stocked(store)
    tiers = opened()
    answered, go = threading.Event(), threading.Event()
    contains, get = store.contains, store.get
    store.contains = lambda keys: (answered.wait(60), contains(keys))[1]
    store.get = lambda keys, into: (go.wait(60), get(keys, into))[1]
    lookup = tiers.prefetch(NAMES)
    assert not lookup.answered and not tiers.holds(name(3))
    answered.set()
    eventually(lambda: lookup.answered)
    assert all(map(tiers.holds, NAMES))
    threading.Timer(0.2, go.set).start()
    assert read(tiers, 3)
    eventually(lambda: not tiers.host.expected and not tiers.prefetcher.pending)


def test_only_blocks_without_a_gap_come_up_to_the_room_for_them(store, opened):
    stocked(store, 100)
    del store.blocks[name(6)]
    tiers = opened(32)
    prefetched(tiers, [name(number) for number in range(12)])
    assert tiers.counts().shared_reads == 6 and not tiers.holds(name(7))
    prefetched(tiers, [name(number) for number in range(20, 80)])
    assert tiers.counts().shared_reads == 6 + 32 // 4
    assert tiers.prefetch_room == 8


def test_what_the_store_says_it_has_and_has_not_is_a_miss(store, opened):
    stocked(store, 5)
    store.lies = {name(5), name(6)}
    tiers = opened()
    prefetched(tiers, NAMES)
    assert [read(tiers, number) for number in range(8)] == [True] * 5 + [False] * 3
    assert not tiers.host.expected and not tiers.prefetcher.pending


@pytest.mark.parametrize("method", ["contains", "get", "put"])
def test_a_store_that_fails_is_a_store_with_nothing(store, opened, method, monkeypatch):
    stocked(store)

    def fail(*_, **__):
        raise OSError("gone")

    monkeypatch.setattr(store, method, fail)
    tiers = opened()
    prefetched(tiers, NAMES)
    assert [read(tiers, number) for number in range(8)] == [method == "put"] * 8
    fill(tiers, 100)
    for number in range(200, 240):
        put(tiers, number)
    eventually(lambda: tiers.behind.shared.idle)
    assert not tiers.prefetcher.pending


def test_a_store_that_hangs_keeps_nobody_waiting_and_is_left_alone_then(store, opened, monkeypatch):
    monkeypatch.setattr(shared, "SLOW_SECONDS", 0.2)
    stocked(store)
    blocks, store.blocks = store.blocks, {}  # what hangs finds nothing in the end
    tiers = opened()
    store.go.clear()
    lookup = tiers.prefetch(NAMES)
    for number in range(100, 100 + 32 + 3 * WAITING):
        put(tiers, number)
    assert not lookup.answered
    assert tiers.counts().shared_dropped > 0
    assert not read(tiers, 3)
    time.sleep(0.3)
    store.go.set()
    eventually(lambda: lookup.answered)
    eventually(lambda: not tiers.host.expected)
    calls = len(store.calls)
    assert tiers.prefetch(NAMES).answered and not tiers.holds(name(3))
    eventually(lambda: tiers.behind.shared.idle)
    store.blocks = blocks
    monkeypatch.setattr(shared, "SLOW_SECONDS", SOON)
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + shared.REST_SECONDS)
    monkeypatch.setattr(shared, "time", later)
    prefetched(tiers, NAMES)
    assert read(tiers, 3) and len(store.calls) > calls


def test_what_is_refused_or_there_already_is_not_counted_as_put(store, opened):
    store.refuses = True
    tiers = opened(4)
    for number in range(8):
        put(tiers, number)
    eventually(lambda: tiers.counts().shared_dropped == 4)
    assert tiers.counts().to_shared == 0
    stocked(store)
    puts = store.calls.count("put")
    for number in range(8):
        put(tiers, number)
    eventually(lambda: tiers.behind.shared.idle)
    assert store.calls.count("put") == puts


def test_few_blocks_are_not_worth_a_question(store, opened):
    stocked(store)
    tiers = opened()
    assert tiers.prefetch(NAMES[: LEAST - 1]).answered and not store.calls


def test_at_the_end_what_is_in_host_memory_is_put(store):
    tiers = TieredBlocks(200, SIZE, VirtualClock(), None, SharedTier(store, SIZE))
    for number in range(100):
        put(tiers, number, 600 if number == 7 else 0)
    put(tiers, 100, -1)
    tiers.close()
    assert set(store.blocks) == {name(number) for number in range(100)} and store.closed
    assert store.ends[name(7)] == pytest.approx(time.time() + 600, abs=10)
    assert not store.ends[name(8)]
    assert tiers.prefetch(NAMES).answered


def test_at_the_end_a_store_that_hangs_is_left(store, monkeypatch):
    monkeypatch.setattr(shared, "CLOSE_SECONDS", 0.3)
    monkeypatch.setattr("jaxserve.store.tiered.FLUSH_SECONDS", 0.3)
    tiers = TieredBlocks(200, SIZE, VirtualClock(), None, SharedTier(store, SIZE))
    for number in range(100):
        put(tiers, number)
    store.go.clear()
    began = time.monotonic()
    tiers.close()
    assert time.monotonic() - began < 60, "what hangs does so for longer"
    store.go.set()
