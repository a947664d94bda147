"""Blocks on disk as their users see them: the bytes that were put, or a miss."""

import contextlib
import os
import stat
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.clock import VirtualClock
from jaxserve.settings.schema import ConfigError
from jaxserve.store.disk import DiskBlocks
from jaxserve.store.host_memory import HostBlocks
from jaxserve.store.record import MAX_KEY_BYTES, record_bytes
from tests.examples import examples
from tests.store.fakes import block_of, key_of

BLOCK = 5000


def opened(folder, records=8, block=BLOCK, **fields):
    return contextlib.closing(DiskBlocks(folder, records * record_bytes(block), block, **fields))


def put(store, number, **fields):
    key = key_of(number)
    return store.put(key, block_of(key, store.block_bytes), **fields)


def got(store, number):
    """Returns True if a block is there; its bytes are checked."""
    into = np.zeros(store.block_bytes, np.uint8)
    found = store.get(key_of(number), into)
    if found:
        assert (into == block_of(key_of(number), store.block_bytes)).all()
    return found


@pytest.mark.parametrize("block", [1, 4096, 5000, 65536])
def test_what_was_put_is_got_also_after_a_restart(tmp_path, block):
    for _ in range(2):
        with opened(tmp_path, block=block) as store:
            for number in range(8):
                assert put(store, number)
            assert all(got(store, number) for number in range(8))
            assert not got(store, 8)
            assert set(store.keys()) == {key_of(number) for number in range(8)}
            assert key_of(7) in store and key_of(8) not in store


def test_bytes_go_straight_from_slots_of_host_memory_and_back(tmp_path):
    slots = HostBlocks(2, 1 << 16)
    key = key_of(0)
    slots.view(0)[:] = block_of(key, 1 << 16)
    slots.seal(1, key)
    slots.seal(0, key)
    with opened(tmp_path, block=1 << 16) as store:
        assert store.put(key, slots.view(0))
        assert store.get(key, slots.view(1))
    assert (slots.view(1) == slots.view(0)).all()


def test_buffers_of_every_kind_are_taken(tmp_path):
    data = block_of(b"any", BLOCK)
    kinds = (data, data.tobytes(), bytearray(data), memoryview(data), data.view("<u4"))
    with opened(tmp_path) as store:
        for number, kind in enumerate(kinds):
            assert store.put(key_of(number), kind)
            into = bytearray(BLOCK)
            assert store.get(key_of(number), into)
            assert into == data.tobytes()


def test_mistakes_of_the_caller_are_told(tmp_path):
    with opened(tmp_path) as store:
        with pytest.raises(ValueError, match="100 bytes; a block has 5000"):
            store.put(b"k", bytes(100))
        with pytest.raises(ValueError, match=f"the limit is {MAX_KEY_BYTES}"):
            store.put(bytes(MAX_KEY_BYTES + 1), bytes(BLOCK))
        with pytest.raises(ValueError, match="read-only"):
            store.get(b"k", bytes(BLOCK))
        assert store.put(bytes(MAX_KEY_BYTES), bytes(BLOCK))
        assert store.put(b"", bytes(BLOCK))
    with pytest.raises(ConfigError, match=r"disk_cache: 8192 bytes .* needs 12288"):
        DiskBlocks(tmp_path, 8192, BLOCK)
    with pytest.raises(ValueError, match="at least 1"):
        DiskBlocks(tmp_path, 8192, 0)


def test_the_oldest_blocks_go_and_the_file_never_grows_beyond_its_capacity(tmp_path):
    with opened(tmp_path, records=5) as store:
        for number in range(23):
            assert put(store, number)
            assert got(store, number)
            assert (tmp_path / "blocks").stat().st_size <= 5 * record_bytes(BLOCK)
        counts = store.counts()
        assert counts.blocks == counts.records == 5
        assert counts.put == counts.hits == 23 and counts.evicted == 18


def test_blocks_that_were_read_or_are_kept_outlive_others(tmp_path):
    with opened(tmp_path, records=8) as store:
        for number in range(8):
            put(store, number, keep=number == 2)
        assert got(store, 5)
        for number in range(100, 106):
            put(store, number)
        assert store.counts().passed_over == 2
        assert {key_of(2), key_of(5)} <= set(store.keys())
        for number in range(200, 260):
            put(store, number)
        assert got(store, 2) and not got(store, 5)


def test_a_kept_block_is_kept_after_a_restart_too(tmp_path):
    with opened(tmp_path) as store:
        put(store, 0, keep=True)
    with opened(tmp_path) as store:
        for number in range(100, 150):
            put(store, number)
        assert got(store, 0)


def test_the_order_goes_on_after_a_restart(tmp_path):
    for number in range(24):
        with opened(tmp_path, records=5) as store:
            put(store, number)
            newest = range(max(0, number - 4), number + 1)
            assert set(store.keys()) == {key_of(each) for each in newest}


def test_a_block_expires(tmp_path):
    now = [1000.0]
    with opened(tmp_path, now=lambda: now[0]) as store:
        put(store, 0, expires=1010.0)
        put(store, 1)
        now[0] = 1009.9
        assert got(store, 0) and key_of(0) in store
        now[0] = 1010.0
        assert key_of(0) not in store and store.keys() == [key_of(1)]
        assert not got(store, 0)
        now[0] = 1000.0
        put(store, 0, expires=1010.0)
    now[0] = 1010.0
    with opened(tmp_path, now=lambda: now[0]) as store:
        assert not got(store, 0) and got(store, 1)


def test_a_block_put_again_with_another_wish_has_that_from_then_on(tmp_path):
    now = [1000.0]
    with opened(tmp_path, now=lambda: now[0]) as store:
        put(store, 0, expires=1010.0)
        written = store.counts().put
        put(store, 0, expires=1010.0)
        assert store.counts().put == written, "what is there already is not written again"
        put(store, 0, expires=1100.0, keep=True)
    now[0] = 1050.0
    with opened(tmp_path, now=lambda: now[0]) as store:
        assert got(store, 0)
        assert store.counts().blocks == 1


def test_what_was_discarded_does_not_come_back(tmp_path):
    with opened(tmp_path) as store:
        put(store, 0)
        put(store, 0, keep=True)
        put(store, 1)
        store.discard(key_of(0))
        store.discard(key_of(2))
        assert not got(store, 0) and got(store, 1)
    with opened(tmp_path) as store:
        assert not got(store, 0) and got(store, 1)
        assert put(store, 0) and got(store, 0)


@pytest.mark.parametrize("other", [{"identity": b"another model"}, {"block": 9000}])
def test_blocks_of_another_identity_or_size_are_misses_and_overwritten(tmp_path, other):
    with opened(tmp_path) as store:
        for number in range(8):
            put(store, number)
    with opened(tmp_path, **other) as store:
        assert not store.keys()
        assert not got(store, 0)
        for number in range(8):
            put(store, number)
        assert all(got(store, number) for number in range(8))
        size = (tmp_path / "blocks").stat().st_size
        assert size <= 8 * record_bytes(store.block_bytes)
    with opened(tmp_path) as store:
        assert not any(got(store, number) for number in range(8))


def test_a_smaller_capacity_cuts_the_file_and_a_larger_one_is_used(tmp_path):
    with opened(tmp_path, records=8) as store:
        for number in range(8):
            put(store, number)
    with opened(tmp_path, records=3) as store:
        assert set(store.keys()) == {key_of(number) for number in range(3)}
        assert (tmp_path / "blocks").stat().st_size == 3 * record_bytes(BLOCK)
    with opened(tmp_path, records=6) as store:
        for number in range(3, 6):
            put(store, number)
        assert all(got(store, number) for number in range(6))


def test_nobody_else_can_read_what_is_on_disk(tmp_path):
    folder = tmp_path / "new" / "cache"
    with opened(folder) as store:
        put(store, 0)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for file in folder.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
    os.chmod(folder / "blocks", 0o644)
    with opened(folder):
        assert stat.S_IMODE((folder / "blocks").stat().st_mode) == 0o600
    os.chmod(folder, 0o770)
    with pytest.raises(ConfigError, match=r"disk_cache: .* writable by other users"):
        DiskBlocks(folder, 1 << 20, BLOCK)


def test_after_close_nothing_is_taken_and_nothing_found(tmp_path):
    with opened(tmp_path) as store:
        put(store, 0)
    assert not put(store, 1) and not got(store, 0)
    assert key_of(0) not in store and not store.keys()
    store.discard(key_of(0))
    store.close()
    with opened(tmp_path) as store:
        assert got(store, 0) and not got(store, 1)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "get", "discard", "restart", "wait"]),
        st.integers(0, 6),
        st.sampled_from([0.0, 5.0]),
        st.booleans(),
    ),
    max_size=30,
)


class Model:
    """A store with an endless disk: expiry by key."""

    def __init__(self):
        self.expires: dict[int, float] = {}

    def has(self, number: int, now: float) -> bool:
        return number in self.expires and not 0 < self.expires[number] <= now


@settings(deadline=None, max_examples=examples(100))
@given(st.integers(1, 5), ACTIONS)
def test_like_a_dict_that_may_forget(tmp_path_factory, records, actions):
    folder = tmp_path_factory.mktemp("store")
    clock = VirtualClock(1000.0)
    model = Model()
    written = 0
    store = DiskBlocks(folder, records * record_bytes(700), 700, now=clock.now)
    for action, number, seconds, keep in actions:
        if action == "put":
            expires = clock.now() + seconds if seconds else 0.0
            written += 1
            assert put(store, number, expires=expires, keep=keep)
            model.expires[number] = expires
            assert got(store, number), "the last block put is there"
        elif action == "get":
            assert not got(store, number) or model.has(number, clock.now())
        elif action == "discard":
            store.discard(key_of(number))
            model.expires.pop(number, None)
        elif action == "wait":
            clock.advance(clock.now() + 3)
        else:
            before = set(store.keys())
            store.close()
            store = DiskBlocks(folder, records * record_bytes(700), 700, now=clock.now)
            assert set(store.keys()) == before
        there = [each for each in range(7) if key_of(each) in store]
        assert len(there) <= records
        assert all(model.has(each, clock.now()) for each in there)
        if written <= records:
            assert there == [each for each in range(7) if model.has(each, clock.now())]
    store.close()


def test_many_threads_put_get_discard_and_evict_at_once(tmp_path):
    wrong, hits = [], [0]

    def use(seed, store):
        random = np.random.default_rng(seed)
        try:
            for _ in range(200):
                number = int(random.integers(24))
                action = random.random()
                if action < 0.45:
                    put(store, number, keep=bool(random.integers(2)))
                elif action < 0.95:
                    hits[0] += got(store, number)
                else:
                    store.discard(key_of(number))
        except BaseException as error:
            wrong.append(error)

    with opened(tmp_path, records=12, block=20000) as store:
        threads = [threading.Thread(target=use, args=(seed, store)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counts = store.counts()
        assert not wrong and hits[0] > 10 and counts.evicted > 10
        assert counts.damaged == 0 and counts.blocks <= 12
        there = {number for number in range(24) if key_of(number) in store}
        assert all(got(store, number) for number in there)
    with opened(tmp_path, records=12, block=20000) as store:
        assert {number for number in range(24) if got(store, number)} == there


def test_close_waits_for_the_calls_of_other_threads(tmp_path):
    failed = []
    stop = threading.Event()

    def use(store):
        try:
            while not stop.is_set():
                put(store, 1)
                got(store, 1)
                store.discard(key_of(1))
        except BaseException as error:
            failed.append(error)

    for _ in range(10):
        with opened(tmp_path) as store:
            threads = [threading.Thread(target=use, args=(store,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            time.sleep(0.02)
        # a file opened now may get the number that the closed one had
        with open(tmp_path / "innocent", "w+b") as innocent:
            time.sleep(0.01)
            assert os.fstat(innocent.fileno()).st_size == 0
        stop.set()
        for thread in threads:
            thread.join()
        stop.clear()
    assert not failed
