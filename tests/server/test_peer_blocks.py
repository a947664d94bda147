"""Blocks of KV from one replica to another over real sockets: in order, checked, and whatever
fails, nothing waits for ever and nothing is left."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from jaxserve.api.request import KvSource
from jaxserve.cache.hashes import FIRST_PART, BlockHashes
from jaxserve.group.channel import free_port
from jaxserve.server import block_service, part_stream, peer_blocks
from jaxserve.server.block_service import MAX_SENDING, BlockService
from jaxserve.server.peer_blocks import PeerReplicas, PeerStream
from jaxserve.server.replica_service import ReplicaService
from jaxserve.store.block_part import BlockPart, PartBytes
from jaxserve.transfer import Plane, TcpPlane, TcpTransfer
from tests.waiting import SOON, eventually

SECRET = b"of the tests of peers' blocks"
LAYOUT = PartBytes(BlockPart(range(5), range(2)), 400, 100)
BLOCK = LAYOUT.bytes


def key(number: int) -> bytes:
    return FIRST_PART + number.to_bytes(16, "little")


def content(key: bytes) -> np.ndarray:
    rng = np.random.default_rng(int.from_bytes(key, "little"))
    return rng.integers(0, 256, BLOCK, dtype=np.uint8)


class Blocks:
    """A `BlockExporter` that the tests fill by hand. live: ids of requests that compute blocks."""

    layout = LAYOUT
    layer_groups = ()

    def __init__(self, have: Sequence[int] = ()):
        self.have = {key(number) for number in have}
        self.live: set[str] = set()
        self.wanted: list[bytes] = []
        self.asked: list[bytes] = []  # in the order of the reads
        self._changed = threading.Condition()

    def add(self, numbers: Sequence[int]) -> None:
        with self._changed:
            self.have.update(map(key, numbers))
            self._changed.notify_all()

    def want(self, keys: Sequence[bytes]) -> None:
        self.wanted.extend(keys)

    def unwant(self, keys: Sequence[bytes]) -> None:
        for one in keys:
            self.wanted.remove(one)

    def keys_of(self, hashes: BlockHashes, blocks: int) -> list[bytes]:
        return list(hashes.keys(0, blocks))

    def coming(self, request_id: str) -> bool:
        return request_id in self.live

    def read(self, key: bytes, into: np.ndarray, seconds: float) -> bool:
        with self._changed:
            self.asked.append(key)
            if not self._changed.wait_for(lambda: key in self.have, seconds):
                return False
        np.copyto(into, content(key))
        return True


class Source:
    """A replica's port with blocks, without a replica behind it. planes: taken before tcp."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        have: Sequence[int] = (),
        secret=SECRET,
        planes: Sequence[Plane] = (),
    ):
        self.blocks = Blocks(have)
        self.transfer = TcpTransfer(np.empty(1, np.uint8), secret)
        self.planes = planes
        self.service = BlockService([*planes, TcpPlane(self.transfer)])
        self.service.open(self.blocks)
        server = ReplicaService(secret, blocks=self.service)
        self.address = f"127.0.0.1:{server.start('127.0.0.1:0')}"
        stack.callback(self.transfer.close)
        stack.callback(server.stop)

    def of(self, request_id: str = "") -> KvSource:
        return KvSource(self.address, 1000, request_id)


@pytest.fixture
def peers(stack) -> PeerReplicas:
    peers = PeerReplicas(SECRET)
    stack.callback(peers.close)
    return peers


def asked(
    peers: PeerReplicas,
    source: KvSource,
    numbers: Sequence[int],
    time_left: float = math.inf,
    layout: PartBytes = LAYOUT,
) -> PeerStream:
    return peers.open(source, list(map(key, numbers)), time_left, layout)


def fetch(peers: PeerReplicas, source: KvSource, numbers: Sequence[int]) -> int:
    """Returns how many of the blocks came; all of them are right."""
    into = np.empty(BLOCK, np.uint8)
    with contextlib.closing(asked(peers, source, numbers)) as stream:
        for place, number in enumerate(numbers):
            if not stream.read(key(number), into):
                assert not stream.read(key(number), into), "nothing comes behind what is missing"
                return place
            assert (into == content(key(number))).all()
    return len(numbers)


def assert_nothing_left(peers: PeerReplicas, *sources: Source) -> None:
    assert not len(peers) and not peers.buffers.used and not peers.transfer.counts().windows
    for source in sources:
        eventually(lambda s=source: not s.blocks.wanted and not s.service.streams)
        assert not source.transfer.counts().tickets and not source.service.places.taken


def test_blocks_come_in_the_order_asked(stack, peers):
    source = Source(stack, range(100))
    numbers = random.Random(0).sample(range(100), 60)
    assert fetch(peers, source.of(), numbers) == 60
    assert_nothing_left(peers, source)


def test_blocks_come_to_the_port_that_is_named(stack):
    port = free_port("127.0.0.1")
    peers = PeerReplicas(SECRET, "127.0.0.1", port)
    stack.callback(peers.close)
    assert fetch(peers, Source(stack, range(5)).of(), range(5)) == 5
    assert peers.transfer.address == f"127.0.0.1:{port}"


def test_more_blocks_than_windows_hold(stack, peers, monkeypatch):
    monkeypatch.setattr(peer_blocks, "WINDOW_BYTES", 3 * BLOCK + 1)
    source = Source(stack, range(100))
    assert fetch(peers, source.of(), range(100)) == 100
    assert fetch(peers, source.of(), range(7)) == 7
    assert_nothing_left(peers, source)


def test_blocks_that_are_made_later_come_when_they_are_made(stack, peers):
    source = Source(stack, range(3))
    source.blocks.live.add("job")

    def compute() -> None:
        for number in range(3, 12):
            time.sleep(0.2)
            source.blocks.add([number])
        time.sleep(1.5)  # longer than a word of the source is away
        source.blocks.add([12])

    threading.Thread(target=compute).start()
    assert fetch(peers, source.of("job"), range(13)) == 13
    assert_nothing_left(peers, source)


@pytest.mark.parametrize("what", ["want", "read", "write"])
def test_a_source_that_lives_is_waited_for_however_long_its_work_takes(
    stack, peers, monkeypatch, what
):
    """A step of its engine may take longer than it may be silent."""
    monkeypatch.setattr(part_stream, "SILENT_SECONDS", 5.0)
    monkeypatch.setattr(block_service, "ALIVE_SECONDS", 0.2)
    source = Source(stack, range(5))
    owner = source.transfer if what == "write" else source.blocks
    quick = getattr(owner, what)
    calls = []

    def slow(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            time.sleep(6.0)
        return quick(*arguments)

    monkeypatch.setattr(owner, what, slow)
    assert fetch(peers, source.of(), range(5)) == 5
    assert_nothing_left(peers, source)


def test_a_source_ends_streams_that_take_too_long(stack, peers, monkeypatch):
    monkeypatch.setattr(block_service, "STREAM_SECONDS", 3.0)
    monkeypatch.setattr(block_service, "ALIVE_SECONDS", 0.1)
    source = Source(stack, range(3))
    source.blocks.live.add("job")
    assert fetch(peers, source.of("job"), range(4)) == 3
    assert_nothing_left(peers, source)


def test_what_will_not_come_ends_the_stream_soon(stack, peers):
    source = Source(stack, range(5))
    began = time.monotonic()
    assert fetch(peers, source.of("ended"), range(8)) == 5
    assert time.monotonic() - began < SOON < block_service.STREAM_SECONDS
    source.service.open(None)  # as a replica that offers no blocks
    assert fetch(peers, source.of(), range(5)) == 0
    assert_nothing_left(peers, source)


def test_nobody_there_gives_none(peers):
    assert fetch(peers, KvSource("127.0.0.1:1", 5), range(5)) == 0
    assert_nothing_left(peers)


def test_another_secret_is_refused_on_both_sides(stack, peers):
    source = Source(stack, range(5), secret=b"another one, of some other cluster")
    assert fetch(peers, source.of(), range(5)) == 0
    assert not source.blocks.wanted
    assert_nothing_left(peers, source)


def test_a_flipped_bit_ends_the_stream(stack, peers, monkeypatch):
    source = Source(stack, range(20))
    write = source.transfer.write

    def flip(window, offset, data, seconds):
        damaged = data.copy()
        if offset <= 7 * BLOCK < offset + len(data):
            damaged[7 * BLOCK - offset + 99] ^= 4
        return write(window, offset, damaged, seconds)

    monkeypatch.setattr(source.transfer, "write", flip)
    assert fetch(peers, source.of(), range(20)) == 7
    assert_nothing_left(peers, source)


def test_a_late_write_changes_nothing(stack, peers):
    source = Source(stack, range(20))
    stolen = []
    write = source.transfer.write

    def note(window, offset, data, seconds):
        stolen.append(window)
        return write(window, offset, data, seconds)

    source.transfer.write = note
    assert fetch(peers, source.of(), range(20)) == 20
    before = peers.memory[: 20 * BLOCK].copy()
    ticket = write(stolen[0], 0, np.zeros(BLOCK, np.uint8), 5.0)
    assert source.transfer.wait(ticket, 6.0), "it is refused"
    source.transfer.release(ticket)
    assert (peers.memory[: 20 * BLOCK] == before).all()
    assert_nothing_left(peers, source)


def test_more_streams_than_send_at_once_wait_and_those_that_are_due_first_go_first(
    stack, peers, monkeypatch
):
    monkeypatch.setattr(peer_blocks, "WINDOW_BYTES", 4 * BLOCK)  # there is room for all of them
    source = Source(stack)
    source.blocks.live.add("job")
    came: list[int] = []

    def read(number: int, time_left: float) -> None:
        into = np.empty(BLOCK, np.uint8)
        with contextlib.closing(asked(peers, source.of("job"), [number], time_left)) as stream:
            if stream.read(key(number), into):
                came.append(number)

    threads = []
    for number in range(MAX_SENDING):
        threads.append(threading.Thread(target=read, args=(number, math.inf)))
    for thread in threads:
        thread.start()
    eventually(lambda: source.service.places.taken == MAX_SENDING)
    for place, time_left in enumerate((math.inf, 90.0, 10.0)):
        threads.append(threading.Thread(target=read, args=(100 + place, time_left)))
        threads[-1].start()
        eventually(lambda count=place + 1: source.service.places.waiting == count)
    sent = [0, 102, 101, 100]
    for place, number in enumerate(sent):  # one place gets free after the other
        assert source.blocks.asked[MAX_SENDING:] == list(map(key, sent[1 : place + 1]))
        source.blocks.add([number])
        count = min(MAX_SENDING + place + 1, len(threads))
        eventually(lambda count=count: len(source.blocks.asked) == count)
    source.blocks.add(range(MAX_SENDING))
    for thread in threads:
        thread.join(60)
    assert len(came) == MAX_SENDING + 3
    assert_nothing_left(peers, source)


def test_a_stream_that_is_closed_while_it_waits_takes_no_place(stack, peers, monkeypatch):
    monkeypatch.setattr(block_service, "ALIVE_SECONDS", 0.1)
    source = Source(stack, range(5))
    places = [source.service.places.ask(0.0) for _ in range(MAX_SENDING)]
    stream = asked(peers, source.of(), [0])
    threading.Timer(0.3, stream.close).start()
    assert not stream.read(key(0), np.empty(BLOCK, np.uint8))
    eventually(lambda: not source.service.streams)
    for place in places:
        place.leave()
    assert fetch(peers, source.of(), range(5)) == 5
    assert_nothing_left(peers, source)


def test_memory_goes_to_the_stream_that_was_opened_first(stack, monkeypatch):
    """Processes of one replica open streams in the same order, and each needs what all bring."""
    monkeypatch.setattr(peer_blocks, "STAGING_BYTES", BLOCK)
    monkeypatch.setattr(peer_blocks, "WINDOW_BYTES", BLOCK)
    peers = PeerReplicas(SECRET)
    stack.callback(peers.close)
    source = Source(stack, range(2))
    first, second = (asked(peers, source.of(), [number]) for number in range(2))
    came = []
    into = np.empty((2, BLOCK), np.uint8)
    reading = threading.Thread(target=lambda: came.append(second.read(key(1), into[1])))
    reading.start()
    assert first.read(key(0), into[0]) and not came
    first.close()
    reading.join(SOON)
    assert came == [True] and (into[1] == content(key(1))).all()
    second.close()
    assert_nothing_left(peers, source)


def test_closing_ends_a_read_that_waits(stack, peers):
    source = Source(stack)
    source.blocks.live.add("job")
    stream = asked(peers, source.of("job"), [0])
    closing = threading.Timer(0.5, stream.close)
    closing.start()
    began = time.monotonic()
    assert not stream.read(key(0), np.empty(BLOCK, np.uint8))
    assert time.monotonic() - began < SOON < block_service.STREAM_SECONDS
    closing.join()
    assert_nothing_left(peers, source)


PROCESS = """
import contextlib, sys, time
from tests.server.test_peer_blocks import Source
with contextlib.ExitStack() as stack:
    source = Source(stack, range(40))
    source.blocks.live.add("job")
    print(source.address, flush=True)
    time.sleep(100)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_source_that_is_killed_or_stopped_ends_the_stream(stack, peers, number):
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    source = KvSource(process.stdout.readline().strip(), 50, "job")
    into = np.empty(BLOCK, np.uint8)
    with contextlib.closing(asked(peers, source, range(41))) as stream:
        assert all(stream.read(key(block), into) for block in range(40))
        began = time.monotonic()
        process.send_signal(number)
        assert not stream.read(key(40), into)
    assert time.monotonic() - began < SOON < block_service.STREAM_SECONDS
    assert_nothing_left(peers)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_asker_that_is_killed_or_stopped_leaves_nothing_at_the_source(stack, peers, number):
    source = Source(stack, range(40))
    source.blocks.live.add("job")
    code = (
        "from tests.server.test_peer_blocks import *\n"
        f"fetch(PeerReplicas(SECRET), KvSource({source.address!r}, 50, 'job'), range(41))"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    stack.callback(process.wait)
    stack.callback(process.kill)
    eventually(lambda: len(source.blocks.wanted) == 41)
    time.sleep(0.5)  # until it waits for the last block
    process.send_signal(number)
    eventually(lambda: not source.service.streams and not source.blocks.wanted)
    assert not [one for one in threading.enumerate() if one.name == "kv-source"]
    assert fetch(peers, source.of(), range(40)) == 40


@pytest.mark.parametrize("faults", [60, pytest.param(1000, marks=pytest.mark.matrix)])
def test_random_faults_one_after_the_other(stack, peers, faults, monkeypatch):
    """Flipped bits, blocks that never come, streams closed early, writes that fail: what is read is
    right, and nothing is left."""
    source = Source(stack, range(30))
    dice = random.Random(1)
    write = source.transfer.write
    fault = ["none"]

    def sometimes(window, offset, data, seconds):
        if fault[0] == "flip":
            data = data.copy()
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        elif fault[0] == "late":
            peers.transfer.end(window)
        return write(window, offset, data, seconds)

    monkeypatch.setattr(source.transfer, "write", sometimes)
    monkeypatch.setattr("jaxserve.server.block_service.ALIVE_SECONDS", 0.01)
    into = np.empty(BLOCK, np.uint8)
    for _ in range(faults):
        fault[0] = dice.choice(["none", "flip", "late", "missing", "close"])
        numbers = dice.sample(range(30), 12)
        if fault[0] == "missing":
            numbers[5] = 77
        if fault[0] == "close":
            with contextlib.closing(asked(peers, source.of(), numbers)) as stream:
                assert stream.read(key(numbers[0]), into)
        else:
            came = fetch(peers, source.of(), numbers)
            least = {"none": 12, "missing": 5}.get(fault[0], 0)
            most = {"flip": 11, "late": 0, "missing": 5}.get(fault[0], 12)
            assert least <= came <= most, (fault, came)
        assert_nothing_left(peers, source)
