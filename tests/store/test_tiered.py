"""Blocks in host memory and on a slower tier behind it: what was put comes back, or is a miss."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.api.request import EPHEMERAL, NORMAL_RETENTION
from jaxserve.cache.hashes import FIRST_PART
from jaxserve.clock import VirtualClock
from jaxserve.store import tiered
from jaxserve.store.tiered import TieredBlocks
from tests.store.fakes import flip_bit, slot_of
from tests.waiting import eventually

SIZE = 4096


class Shelf:
    """A slow tier in a dict."""

    def __init__(self):
        self.blocks: dict[bytes, bytes] = {}
        self.ends: dict[bytes, float] = {}  # unix seconds
        self.closed = False

    def __contains__(self, key: bytes) -> bool:
        return key in self.blocks

    def keys(self) -> list[bytes]:
        return list(self.blocks)

    def listen(self, changed) -> None:
        self.changed = changed

    def counts(self) -> SimpleNamespace:
        return SimpleNamespace(blocks=len(self.blocks))

    def put(self, key: bytes, data: np.ndarray, expires: float = 0.0, keep: bool = False) -> bool:
        assert keep == bool(expires)
        self.blocks[key] = data.tobytes()
        self.ends[key] = expires
        self.changed(key, True)
        return True

    def expires(self, key: bytes) -> float | None:
        return self.ends.get(key)

    def get(self, key: bytes, into: np.ndarray) -> bool:
        if key in self.blocks:
            into[:] = np.frombuffer(self.blocks[key], np.uint8)
        return key in self.blocks

    def close(self) -> None:
        self.closed = True


def name(number: int) -> bytes:
    return FIRST_PART + number.to_bytes(16, "little")


def block(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SIZE, dtype=np.uint8)


def put(tiers: TieredBlocks, number: int, retention: int = NORMAL_RETENTION) -> bool:
    return tiers.put(name(number), lambda out: np.copyto(out, block(number)), retention)


def read(tiers: TieredBlocks, number: int) -> bool:
    """Returns True if the block is there; fails if it has other bytes."""
    into = np.empty(SIZE, np.uint8)
    found = tiers.read(name(number), into)
    assert not found or (into == block(number)).all(), f"block {number} has other bytes"
    return found


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def tiers(shelf, clock) -> TieredBlocks:
    return TieredBlocks(4, SIZE, clock, shelf)


def test_what_was_put_comes_back(tiers):
    assert put(tiers, 1) and read(tiers, 1) and not read(tiers, 2)
    assert tiers.holds(name(1)) and not tiers.holds(name(2))
    assert (tiers.counts().stored, tiers.counts().host_reads, tiers.counts().missed) == (1, 1, 1)


def test_what_leaves_host_memory_is_found_behind_it_and_comes_up_again(tiers, shelf):
    for number in range(8):
        put(tiers, number)
    assert sorted(shelf.blocks) == sorted(map(name, range(4)))
    assert all(read(tiers, number) for number in range(8))
    assert tiers.counts().disk_reads >= 4 and tiers.counts().host_blocks == 4


def test_blocks_are_prefetched_into_a_share_of_host_memory(shelf):
    tiers = TieredBlocks(8, SIZE, VirtualClock(), shelf)
    for number in range(24):
        put(tiers, number)
    tiers.prefetch([name(number) for number in (3, 99, 4, 5, 23)])
    eventually(lambda: not tiers.prefetcher.pending)
    assert tiers.counts().prefetched == 2  # there is room for two
    assert read(tiers, 3) and read(tiers, 4) and not tiers.counts().disk_reads
    assert read(tiers, 5) and tiers.counts().disk_reads == 1
    tiers.close()
    tiers.prefetch([name(6)])
    assert tiers.counts().prefetched == 2


def test_without_a_tier_behind_it_what_leaves_is_gone():
    tiers = TieredBlocks(2, SIZE, VirtualClock())
    for number in range(3):
        put(tiers, number)
    assert not tiers.holds(name(0)) and not read(tiers, 0) and read(tiers, 2)


@pytest.mark.parametrize("bit", [0, 5, 8 * SIZE - 1])
def test_a_flipped_bit_in_host_memory_is_a_miss_and_is_forgotten(bit):
    tiers = TieredBlocks(2, SIZE, VirtualClock())
    put(tiers, 1)
    flip_bit(tiers, slot_of(tiers, name(1)), bit)
    assert not read(tiers, 1) and not tiers.holds(name(1)) and tiers.counts().wrong == 1
    assert put(tiers, 1) and read(tiers, 1)


def test_a_wrong_block_is_counted_and_does_not_go_to_the_tier_behind(tiers, shelf):
    for number in range(4):
        put(tiers, number)
    flip_bit(tiers, slot_of(tiers, name(0)), 56)
    put(tiers, 4)
    assert not shelf.blocks and not read(tiers, 0)
    assert tiers.counts().wrong == 1


def test_a_block_that_could_not_be_written_is_not_there(tiers):
    def fail(out: np.ndarray) -> None:
        raise OSError("the device failed")

    with pytest.raises(OSError):
        tiers.put(name(1), fail)
    assert not tiers.holds(name(1)) and put(tiers, 1) and read(tiers, 1)


def test_who_reads_a_block_that_is_being_put_waits_for_it(tiers):
    begun, go = threading.Event(), threading.Event()

    def slowly(out: np.ndarray) -> None:
        begun.set()
        go.wait(60)
        np.copyto(out, block(1))

    thread = threading.Thread(target=tiers.put, args=(name(1), slowly))
    thread.start()
    assert begun.wait(60)
    threading.Timer(0.1, go.set).start()
    assert read(tiers, 1)
    thread.join(60)


def test_a_block_on_its_way_counts_as_there_and_who_reads_it_waits_for_it(tiers):
    tiers.expect([name(1)])
    assert tiers.holds(name(1)) and not tiers.wait(name(1), 0)
    assert tiers.seconds([name(1)]) < tiers.seconds([name(2)])

    def come() -> None:
        put(tiers, 1)
        tiers.settle([name(1)])

    timer = threading.Timer(0.1, come)
    timer.start()
    assert read(tiers, 1)
    timer.join(60)
    assert tiers.holds(name(1)) and not tiers.host.expected


def test_nobody_waits_on_for_a_block_that_does_not_come_after_all(tiers, monkeypatch):
    monkeypatch.setattr(tiered, "FILL_SECONDS", 200.0)
    tiers.expect([name(1)])
    timer = threading.Timer(0.1, tiers.settle, [[name(1)]])
    timer.start()
    began = time.monotonic()
    assert not read(tiers, 1) and not tiers.holds(name(1))
    assert time.monotonic() - began < 60
    timer.join(60)


def test_the_wait_for_a_block_that_is_never_heard_of_again_is_bounded(tiers, monkeypatch):
    monkeypatch.setattr(tiered, "FILL_SECONDS", 0.05)
    tiers.expect([name(1)])
    assert not read(tiers, 1)


def test_who_reads_a_block_that_is_on_disk_does_not_wait_until_it_comes_again(tiers, shelf):
    for number in range(8):
        put(tiers, number)
    assert name(0) in shelf.blocks
    tiers.expect([name(0)])
    began = time.monotonic()
    assert read(tiers, 0) and time.monotonic() - began < tiered.FILL_SECONDS / 2


def test_a_block_on_its_way_to_disk_counts_as_there_and_who_reads_it_waits_for_it(tiers, shelf):
    begun, go = threading.Event(), threading.Event()
    write = shelf.put

    def slowly(*block, **keep) -> bool:
        begun.set()
        go.wait(60)
        return write(*block, **keep)

    for number in range(4):
        put(tiers, number)
    shelf.put = slowly
    thread = threading.Thread(target=put, args=(tiers, 4))
    thread.start()
    assert begun.wait(60) and not shelf.blocks and tiers.holds(name(0))
    threading.Timer(0.1, go.set).start()
    assert read(tiers, 0)
    thread.join(60)
    assert not tiers.host.expected


def test_a_disk_that_fails_leaves_nothing_expected(tiers, shelf):
    def fail(*block, **keep) -> bool:
        raise OSError("the disk is gone")

    for number in range(4):
        put(tiers, number)
    shelf.put = fail
    with pytest.raises(OSError):
        put(tiers, 4)
    assert not tiers.host.expected and not tiers.holds(name(0)) and not tiers.holds(name(4))


COMINGS = st.lists(
    st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=3), st.sampled_from("pf")),
    max_size=12,
)


@given(COMINGS, st.randoms(use_true_random=False))
def test_once_all_has_come_or_failed_nothing_is_expected(comings, random):
    """Launches of blocks overlap and name blocks twice; p: they are put, f: they fail."""
    tiers = TieredBlocks(3, SIZE, VirtualClock())
    coming = []
    while comings or coming:
        if comings and random.random() < 0.5:
            coming.append(comings.pop(0))
            tiers.expect(map(name, coming[-1][0]))
        elif coming:
            numbers, end = coming.pop(0)
            if end == "p":
                for number in numbers:
                    put(tiers, number)
            tiers.settle(map(name, numbers))
        on_their_way = {name(number) for numbers, _ in coming for number in numbers}
        assert all(tiers.holds(key) for key in on_their_way)
        assert set(tiers.host.expected) == on_their_way
    there = [number for number in range(6) if tiers.holds(name(number))]
    assert len(there) <= 3 and all(read(tiers, number) for number in there)


def test_at_the_end_all_goes_to_the_tier_behind(tiers, shelf):
    for number in range(3):
        put(tiers, number)
    tiers.close()
    assert sorted(shelf.blocks) == sorted(map(name, range(3))) and shelf.closed


def test_many_threads_never_get_other_bytes(tiers):
    wrong = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for number in rng.integers(0, 12, 200).tolist():
                put(tiers, number) if rng.random() < 0.5 else read(tiers, number)
        except AssertionError as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    tiers.host.check()
    assert all(put(tiers, number) for number in range(100, 104)), "a block is pinned for ever"


# --- requests' wishes


def fill(tiers: TieredBlocks, first: int = 100) -> None:
    """Puts more blocks than host memory holds."""
    for number in range(first, first + 8):
        put(tiers, number)


def left(shelf: Shelf, number: int) -> float:
    """For how many seconds a block is kept behind host memory."""
    return shelf.ends[name(number)] - time.time()


def test_an_ephemeral_block_is_in_host_memory_for_a_while_and_nowhere_else(tiers, shelf):
    put(tiers, 1, EPHEMERAL)
    assert read(tiers, 1)
    put(tiers, 2, EPHEMERAL)
    fill(tiers)
    assert not tiers.holds(name(1)) and name(1) not in shelf.blocks
    put(tiers, 3, EPHEMERAL)
    tiers.close()
    assert not {name(1), name(2), name(3)} & set(shelf.blocks)


def test_a_block_to_be_kept_stays_in_host_memory_and_is_kept_as_long_behind_it(tiers, shelf):
    put(tiers, 1, 600)
    fill(tiers)
    assert name(1) not in shelf.blocks and read(tiers, 1)
    tiers.close()
    assert left(shelf, 1) == pytest.approx(600, abs=5) and not shelf.ends[name(107)]


def test_a_block_that_comes_back_is_kept_as_long_as_before(tiers, shelf, clock):
    for number in (1, 2, 3):  # more than half of host memory: the first is kept behind it
        put(tiers, number, 600)
    fill(tiers)
    shelf.ends[name(1)] = time.time() + 600
    assert read(tiers, 1) and tiers.counts().disk_reads == 1
    fill(tiers, 200)
    assert read(tiers, 1) and tiers.counts().disk_reads == 1
    clock.advance(700)
    fill(tiers, 300)
    assert name(1) not in tiers.host


def test_who_asks_for_longer_has_it_kept_longer_where_it_lies_already(tiers, shelf):
    put(tiers, 1)
    fill(tiers)
    assert not shelf.ends[name(1)]
    put(tiers, 1, 60)  # it was on a page too
    tiers.keep([name(1), name(99)], 600)
    tiers.keep([name(1)], NORMAL_RETENTION)
    tiers.close()
    assert left(shelf, 1) == pytest.approx(600, abs=5)


def test_who_asks_for_less_shortens_nothing(tiers, shelf):
    put(tiers, 1, 600)
    tiers.keep_all()
    shelf.ends[name(1)] = kept = time.time() + 5000
    tiers.keep_all()
    assert shelf.ends[name(1)] == kept


def test_a_block_whose_time_is_over_leaves_as_others_do(tiers, shelf, clock):
    put(tiers, 1, 600)
    clock.advance(601)
    fill(tiers)
    assert name(1) not in tiers.host and shelf.ends[name(1)] == 0.0
