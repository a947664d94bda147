"""The client of a Mooncake Store, beside a real master and a host that lends its memory."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from jaxserve.clock import VirtualClock
from jaxserve.group.channel import free_port
from jaxserve.settings.schema import ConfigError
from jaxserve.store import mooncake
from jaxserve.store.mooncake import MooncakeBlocks, address_towards
from jaxserve.store.shared import SharedTier
from jaxserve.store.tiered import TieredBlocks
from tests.store.fakes import block_of, key_of
from tests.store.mooncake_processes import (
    HOST,
    master_program,
    overwrite,
    start_lender,
    start_master,
    value_of,
)
from tests.waiting import eventually

BLOCK = 300_000
SECONDS = 2.0  # that a call may take here
LATE = 3.0  # more that a loaded machine may add

try:
    mooncake.load_client()
    MISSING = "" if master_program() else "there is no mooncake_master"
except ConfigError as error:
    MISSING = str(error)
needs_mooncake = pytest.mark.skipif(bool(MISSING), reason=MISSING)


class Cluster:
    """A master and a lender, which tests may end and start anew."""

    def __init__(self, folder):
        self.log = folder / "log"
        self.port, self.metrics_port = free_port(HOST), free_port(HOST)
        self.start()

    def start(self):
        self.master = start_master(self.port, self.metrics_port, self.log)
        self.lender = start_lender(self.port, self.log)

    def end(self):
        for process in (self.lender, self.master):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait(10)

    @contextlib.contextmanager
    def opened(self, **fields):
        store = MooncakeBlocks(f"{HOST}:{self.port}", BLOCK, HOST, seconds=SECONDS, **fields)
        try:
            eventually(lambda: store.connected)
            yield store
        finally:
            store.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("mooncake"))
    yield cluster
    cluster.end()


@pytest.fixture
def own_cluster(tmp_path):
    """For tests that end its processes."""
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.end()


def put(store, *numbers, **fields):
    keys = [key_of(number) for number in numbers]
    return store.put(keys, [block_of(key, BLOCK) for key in keys], **fields)


def got(store, *numbers):
    """Returns which blocks came; their bytes are checked."""
    keys = [key_of(number) for number in numbers]
    into = [np.zeros(BLOCK, np.uint8) for _ in keys]
    came = store.get(keys, into)
    for key, block, arrived in zip(keys, into, came):
        assert not arrived or (block == block_of(key, BLOCK)).all()
    return came


def bounded(call, *arguments):
    """Calls within the deadline, while another thread goes on; returns the result."""
    gaps = []
    done = threading.Event()

    def tick():
        last = time.monotonic()
        while not done.wait(0.01):
            gaps.append(time.monotonic() - last)
            last = time.monotonic()

    ticking = threading.Thread(target=tick)
    ticking.start()
    began = time.monotonic()
    result = call(*arguments)
    took = time.monotonic() - began
    done.set()
    ticking.join()
    assert took < SECONDS + LATE
    assert max(gaps, default=0.0) < 1.0, "other threads go on meanwhile"
    return result


@needs_mooncake
def test_what_one_replica_put_another_one_gets(cluster):
    with cluster.opened() as one, cluster.opened() as other:
        numbers = range(2 * mooncake.ROWS + 3)
        assert all(put(one, *numbers))
        assert all(got(other, *numbers))
        assert got(other, 0, 1000, 1) == [True, False, True]
        assert other.contains([key_of(0), key_of(1000)]) == [True, False]
        assert put(other, 0) == [True], "what is there already is there"
        other.discard([key_of(0), key_of(1)])
        assert got(one, 0, 1, 2) == [False, False, True]
        assert one.contains([key_of(0), key_of(2)]) == [False, True]
        assert one.put([], []) == one.get([], []) == one.contains([]) == []


@needs_mooncake
def test_blocks_of_another_identity_are_misses(cluster):
    with cluster.opened(identity=b"one") as one, cluster.opened(identity=b"two") as two:
        assert put(one, 1, keep=True) == [True]
        assert got(two, 1) == [False] and got(one, 1) == [True]


@needs_mooncake
def test_blocks_expire_and_can_be_put_anew(cluster):
    clock = VirtualClock(1000.0)
    with cluster.opened(identity=b"expiry", now=clock.now) as store:
        assert put(store, 1, expires=1010.0, keep=True) == [True]
        assert got(store, 1) == [True]
        clock.advance(1010.0)
        assert got(store, 1) == [False]
        assert put(store, 1) == [True] and got(store, 1) == [True]


@needs_mooncake
def test_any_changed_bit_is_a_miss_and_mended_by_the_next_put(cluster):
    random = np.random.default_rng(0)
    with cluster.opened(identity=b"bits") as store:
        name = store.names([key_of(1)])[0]
        assert put(store, 1) == [True]
        value = value_of(cluster.lender, name)
        trailer = range(8 * BLOCK, 8 * len(value))
        bits = [*random.choice(8 * BLOCK, 10), *random.choice(trailer, 40, replace=False)]
        for bit in bits:
            damaged = bytearray(value)
            damaged[bit // 8] ^= 1 << bit % 8
            overwrite(cluster.lender, name, bytes(damaged))
            assert got(store, 1) == [False], bit
        assert put(store, 1) == [True] and got(store, 1) == [True]


@needs_mooncake
def test_another_blocks_value_is_a_miss(cluster):
    with cluster.opened(identity=b"swap") as store:
        assert all(put(store, 1, 2))
        one, two = store.names([key_of(1), key_of(2)])
        overwrite(cluster.lender, one, value_of(cluster.lender, two))
        assert got(store, 1, 2) == [False, True]
        overwrite(cluster.lender, two, b"short")
        assert got(store, 2) == [False]


@needs_mooncake
@pytest.mark.matrix
def test_a_lender_that_stands_still_is_a_miss_in_time_and_comes_back(own_cluster):
    with own_cluster.opened() as store:
        assert all(put(store, 1, 2))
        own_cluster.lender.send_signal(signal.SIGSTOP)
        try:
            for _ in range(mooncake.THREADS + 1):
                assert bounded(got, store, 1, 2) == [False, False]
        finally:
            own_cluster.lender.send_signal(signal.SIGCONT)
        eventually(lambda: all(put(store, 3)) and all(got(store, 3)), 60)


@needs_mooncake
def test_a_lender_that_dies_takes_its_blocks_along_and_nothing_else(own_cluster):
    with own_cluster.opened() as store:
        assert all(put(store, 1, 2))
        own_cluster.lender.kill()
        own_cluster.lender.wait(10)
        assert bounded(got, store, 1, 2) == [False, False]
        own_cluster.lender = start_lender(own_cluster.port, own_cluster.log)
        eventually(lambda: all(put(store, 5)) and all(got(store, 5)), 60)


@needs_mooncake
@pytest.mark.matrix  # the client takes seconds to leave
@pytest.mark.parametrize("blow", [signal.SIGSTOP, signal.SIGKILL])
def test_a_master_that_is_gone_makes_everything_a_miss_in_time(own_cluster, blow):
    with own_cluster.opened() as store:
        assert all(put(store, 1))
        own_cluster.master.send_signal(blow)
        assert bounded(got, store, 1) == [False]
        assert bounded(put, store, 2) == [False]
        assert bounded(store.contains, [key_of(1)]) == [False]
        bounded(store.discard, [key_of(1)])


@needs_mooncake
def test_without_a_master_everything_is_a_miss_until_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(mooncake, "RETRY_SECONDS", 0.2)
    port = free_port(HOST)
    store = bounded(lambda: MooncakeBlocks(f"{HOST}:{port}", BLOCK, HOST, seconds=SECONDS))
    try:
        assert bounded(put, store, 1) == [False] and bounded(got, store, 1) == [False]
        assert not store.connected
        master = start_master(port, free_port(HOST), tmp_path / "log")
        try:
            eventually(lambda: store.connected)
            lender = start_lender(port, tmp_path / "log")
            eventually(lambda: all(put(store, 1)) and all(got(store, 1)))
            lender.kill()
            lender.wait(10)
        finally:
            master.kill()
            master.wait(10)
    finally:
        store.close()


@needs_mooncake
def test_mistakes_of_the_caller_are_told(cluster):
    with cluster.opened() as store:
        with pytest.raises(ValueError, match="10 bytes; a block has 300000"):
            store.put([b"k"], [bytes(10)])
        with pytest.raises(ValueError, match="1 keys and 0 blocks"):
            store.get([b"k"], [])
        with pytest.raises(ValueError, match="read-only"):
            store.get([b"k"], [bytes(BLOCK)])
    assert put(store, 1) == [False] and got(store, 1) == [False], "closed"
    for master in ("nowhere", "host:", ":50051", "host:0", "host:65536"):
        with pytest.raises(ConfigError, match="kv_store"):
            MooncakeBlocks(master, BLOCK, HOST)


def test_without_the_package_the_setting_is_a_mistake():
    hidden = (
        "import sys\n"
        "sys.modules['mooncake.store'] = None\n"
        "from jaxserve.store.mooncake import MooncakeBlocks\n"
        "MooncakeBlocks('127.0.0.1:1', 10, '127.0.0.1')\n"
    )
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True)
    assert "kv_store: needs pip install 'jaxserve[mooncake]'" in done.stderr


@needs_mooncake
def test_a_process_with_a_hanging_call_ends(own_cluster):
    program = (
        "import signal, os, sys\n"
        "from tests.store.test_mooncake import BLOCK, HOST, MooncakeBlocks, eventually, got, put\n"
        "store = MooncakeBlocks(sys.argv[1], BLOCK, HOST, seconds=2.0)\n"
        "eventually(lambda: store.connected, 20)\n"
        "eventually(lambda: all(put(store, 1)), 20)\n"
        "os.kill(int(sys.argv[2]), signal.SIGSTOP)\n"
        "print(got(store, 1), flush=True)\n"
    )
    arguments = [f"{HOST}:{own_cluster.port}", str(own_cluster.lender.pid)]
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.stdout == "[False]\n", done.stderr
    assert done.returncode == 0, done.stderr


@needs_mooncake
def test_what_leaves_one_replicas_host_memory_is_found_by_another_one(cluster):
    with cluster.opened() as one, cluster.opened() as other:
        here = TieredBlocks(4, BLOCK, VirtualClock(), None, SharedTier(one, BLOCK))
        there = TieredBlocks(64, BLOCK, VirtualClock(), None, SharedTier(other, BLOCK))
        keys = [key_of(1000 + number) for number in range(20)]
        for key in keys:
            here.put(key, lambda view, key=key: np.copyto(view, block_of(key, BLOCK)))
        eventually(lambda: here.counts().to_shared == 16)
        lookup = there.prefetch(keys)
        eventually(lambda: lookup.answered and not there.host.expected)
        assert there.counts().shared_reads == 16
        into = np.empty(BLOCK, np.uint8)
        for key in keys[:16]:
            assert there.read(key, into) and (into == block_of(key, BLOCK)).all()
        assert not there.read(keys[16], into)
        here.close()
        eventually(lambda: all(other.contains(keys)))


def test_this_machines_address_is_the_one_that_the_master_sees():
    assert address_towards("127.0.0.1:50051") == "127.0.0.1"
    with pytest.raises(ConfigError, match="kv_store: there is no way to no-such-host"):
        address_towards("no-such-host.invalid:50051")
