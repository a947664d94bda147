"""Blocks of which several processes have the parts come to replicas of one process and of several,
over real sockets: whole and checked; whatever fails, nothing waits for ever and nothing is left."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
import trustme

from jaxserve.api.request import KvSource
from jaxserve.group.handshake import Certificate
from jaxserve.server import block_service, peer_blocks
from jaxserve.server.auth.tls import Authorities, Tls
from jaxserve.server.block_service import BlockService
from jaxserve.server.peer_blocks import PeerReplicas
from jaxserve.server.replica_service import ReplicaService
from jaxserve.settings.schema import ServerConfig
from jaxserve.store.block_part import BlockPart, PartBytes, PartPlace
from jaxserve.transfer import Places, TcpPlane, TcpTransfer
from tests.server.test_peer_blocks import BLOCK, LAYOUT, SECRET, Blocks, content, key
from tests.waiting import SOON, eventually


def part(first_layer: int, end_layer: int, first_head: int, end_head: int) -> BlockPart:
    return BlockPart(range(first_layer, end_layer), range(first_head, end_head))


STAGES = [part(0, 3, 0, 2), part(3, 5, 0, 2)]
RANKS = [part(0, 5, 0, 1), part(0, 5, 1, 2)]
BOTH = [part(*layers, *heads) for layers in ((0, 3), (3, 5)) for heads in ((0, 1), (1, 2))]
LANES = [LAYOUT.part, LAYOUT.part]  # each of two processes has the blocks of all lanes
COPIES = [*RANKS, *RANKS]


def cut(key: bytes, part: BlockPart) -> np.ndarray:
    """The part of a block."""
    row = np.empty(LAYOUT.of(part).bytes, np.uint8)
    LAYOUT.take(content(key), part, row)
    return row


class Part(Blocks):
    """The parts of blocks at one worker."""

    def __init__(self, part: BlockPart, have: Sequence[int]):
        super().__init__(have)
        self.layout = LAYOUT.of(part)

    def want(self, keys: Sequence[bytes]) -> None:
        pass

    unwant = want

    def coming(self, request_id: str) -> bool:
        return True

    def read(self, key: bytes, into: np.ndarray, seconds: float) -> bool:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.have, seconds):
                return False
        np.copyto(into, cut(key, self.layout.part))
        return True


class Leader(Blocks):
    """The blocks as a leader knows them: a `PartedExporter`."""

    def __init__(self, places: list[PartPlace]):
        super().__init__()
        self.places = places

    def settle(self, keys: Sequence[bytes]) -> None:
        pass


class Group:
    """The ports of a leader and of its workers, with these parts."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        parts: Sequence[BlockPart],
        have: Sequence[int] = (),
        tls: tuple[Tls, Certificate] | None = None,
    ):
        self.workers = [Part(each, have) for each in parts]
        self.transfers = []
        self.services = []
        self.servers = []
        credentials = lambda: None if tls is None else tls[0].credentials(clients=False)
        places = []
        for worker in self.workers:
            transfer = TcpTransfer(np.empty(1, np.uint8), SECRET, tls=tls and tls[1])
            service = BlockService([TcpPlane(transfer)])
            service.open(worker)
            server = ReplicaService(SECRET, blocks=service)
            port = server.start("127.0.0.1:0", credentials())
            places.append(PartPlace(worker.layout.part, f"127.0.0.1:{port}"))
            stack.callback(transfer.close)
            stack.callback(server.stop)
            self.transfers.append(transfer)
            self.services.append(service)
            self.servers.append(server)
        self.leader = Leader(places)
        service = BlockService([])
        service.open(self.leader)
        self.services.append(service)
        server = ReplicaService(SECRET, blocks=service)
        self.port = server.start("127.0.0.1:0", credentials())
        stack.callback(server.stop)

    def of(self, request_id: str = "", host: str = "127.0.0.1") -> KvSource:
        return KvSource(f"{host}:{self.port}", 1000, request_id)

    def add(self, numbers: Sequence[int]) -> None:
        for worker in self.workers:
            worker.add(numbers)


@pytest.fixture
def peers(stack) -> PeerReplicas:
    peers = PeerReplicas(SECRET)
    stack.callback(peers.close)
    return peers


def fetch(
    peers: PeerReplicas, source: KvSource, numbers: Sequence[int], wanted: BlockPart = LAYOUT.part
) -> int:
    """Returns how many of the blocks came; all of them are right."""
    layout: PartBytes = LAYOUT.of(wanted)
    into = np.empty(layout.bytes, np.uint8)
    keys = list(map(key, numbers))
    with contextlib.closing(peers.open(source, keys, math.inf, layout)) as stream:
        for place, one in enumerate(keys):
            if not stream.read(one, into):
                assert not stream.read(one, into), "nothing comes behind what is missing"
                return place
            assert (into == cut(one, wanted)).all()
    return len(numbers)


def assert_nothing_left(peers: PeerReplicas, *groups: Group) -> None:
    assert not len(peers) and not peers.buffers.used and not peers.transfer.counts().windows
    for group in groups:
        eventually(lambda g=group: not g.leader.wanted)
        eventually(lambda g=group: not any(service.streams for service in g.services))
        assert not any(service.places.taken for service in group.services)
        assert not any(transfer.counts().tickets for transfer in group.transfers)


CUTS = {"stages": STAGES, "ranks": RANKS, "both": BOTH, "lanes": LANES, "copies": COPIES}


@pytest.mark.parametrize("there", CUTS)
@pytest.mark.parametrize("here", ["whole", "stages", "ranks", "both"])
def test_blocks_come_whole_whatever_the_cuts_of_both_sides(stack, peers, monkeypatch, there, here):
    monkeypatch.setattr(peer_blocks, "WINDOW_BYTES", 3 * BLOCK + 1)
    group = Group(stack, CUTS[there], range(20))
    for wanted in [LAYOUT.part] if here == "whole" else CUTS[here]:
        assert fetch(peers, group.of(), range(20), wanted) == 20
    assert_nothing_left(peers, group)


@pytest.mark.parametrize("here", ["stages", "ranks", "both"])
def test_a_part_of_whole_blocks_comes_alone(stack, peers, here):
    source = Group(stack, [LAYOUT.part], range(20))
    whole = KvSource(source.leader.places[0].address, 1000)
    for wanted in CUTS[here]:
        source.transfers[0].counts()
        assert fetch(peers, whole, range(10), wanted) == 10
    sent = source.transfers[0].counts().sent_bytes
    assert 10 * BLOCK <= sent < 11 * BLOCK, "each byte once"


def test_processes_with_equal_parts_take_turns(stack, peers):
    group = Group(stack, LANES, range(4))
    for _ in range(4):
        assert fetch(peers, group.of(), range(4)) == 4
    first, second = (transfer.counts().sent_bytes for transfer in group.transfers)
    assert first == second == 8 * BLOCK


def test_blocks_that_are_made_later_come_when_they_are_made(stack, peers):
    group = Group(stack, STAGES, range(3))
    group.leader.live.add("job")

    def compute() -> None:
        for number in range(3, 9):
            time.sleep(0.1)
            group.workers[number % 2].add([number])
            time.sleep(0.1)
            group.workers[1 - number % 2].add([number])
        group.leader.live.clear()

    computing = threading.Thread(target=compute)
    computing.start()
    assert fetch(peers, group.of("job"), range(12)) == 9
    computing.join()
    assert_nothing_left(peers, group)


def test_the_leader_has_blocks_made_as_long_as_they_are_wanted(stack, peers):
    group = Group(stack, STAGES, range(2))
    group.leader.live.add("job")
    into = np.empty(BLOCK, np.uint8)
    stream = peers.open(group.of("job"), [key(0), key(1)], math.inf, LAYOUT)
    assert stream.read(key(0), into)
    eventually(lambda: group.leader.wanted == [key(0), key(1)])
    stream.close()
    assert_nothing_left(peers, group)


def test_a_block_that_one_process_lacks_ends_the_stream_soon(stack, peers):
    group = Group(stack, BOTH, range(10))
    group.workers[2].have.discard(key(6))
    began = time.monotonic()
    assert fetch(peers, group.of(), range(10)) == 6
    assert time.monotonic() - began < SOON
    assert_nothing_left(peers, group)


def test_a_flipped_bit_of_one_part_ends_the_stream(stack, peers, monkeypatch):
    group = Group(stack, STAGES, range(10))
    transfer, size = group.transfers[1], LAYOUT.of(STAGES[1]).bytes
    write = transfer.write

    def flip(window, offset, data, seconds):
        damaged = data.copy()
        if offset <= 7 * size < offset + len(data):
            damaged[7 * size - offset + 9] ^= 4
        return write(window, offset, damaged, seconds)

    monkeypatch.setattr(transfer, "write", flip)
    assert fetch(peers, group.of(), range(10)) == 7
    assert_nothing_left(peers, group)


@pytest.mark.parametrize("lost", ["worker", "leader's word"])
def test_a_process_that_is_lost_ends_the_stream_soon(stack, peers, lost):
    group = Group(stack, STAGES, range(4))
    group.leader.live.add("job")
    losing = threading.Timer(0.5, group.servers[1].stop)
    if lost != "worker":
        losing = threading.Timer(0.5, lambda: group.leader.live.clear())
    losing.start()
    began = time.monotonic()
    assert fetch(peers, group.of("job"), range(10)) == 4
    assert time.monotonic() - began < SOON
    losing.join()
    assert_nothing_left(peers, group)


def test_a_group_that_restarts_gives_none(stack, peers):
    group = Group(stack, STAGES, range(4))
    places = group.leader.places
    group.leader.places = []
    assert fetch(peers, group.of(), range(4)) == 0
    group.leader.places = places[:1]
    assert fetch(peers, group.of(), range(4)) == 0, "no process has the last layers"
    group.leader.places = [places[0], PartPlace(STAGES[1], places[0].address)]
    assert fetch(peers, group.of(), range(4)) == 0, "another process listens there now"
    group.leader.places = places
    assert fetch(peers, group.of(), range(4)) == 4
    assert_nothing_left(peers, group)


def test_streams_of_two_askers_do_not_wait_for_each_other(stack, monkeypatch):
    """Each process sends to one stream at a time, in the order in which they ask, which differs:
    none that has the one process's place may wait for the other's."""
    monkeypatch.setattr(peer_blocks, "WINDOW_BYTES", 2 * BLOCK)
    group = Group(stack, STAGES, range(40))
    for service in group.services:
        service.places = Places(1)
    sides = [PeerReplicas(SECRET), PeerReplicas(SECRET)]
    for side in sides:
        stack.callback(side.close)
    came: list[int] = []
    threads = [
        threading.Thread(target=lambda s=side: came.append(fetch(s, group.of(), range(40))))
        for side in sides * 4
    ]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert came == [40] * 8
    assert time.monotonic() - began < block_service.STREAM_SECONDS / 4
    for side in sides:
        assert_nothing_left(side, group)


def test_workers_have_the_certificate_of_their_leader(stack, tmp_path):
    authority = trustme.CA()
    made = authority.issue_cert("localhost")
    files = {
        "ca.pem": authority.cert_pem.bytes(),
        "cert.pem": made.cert_chain_pems[0].bytes(),
        "key.pem": made.private_key_pem.bytes(),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        (tmp_path / name).chmod(0o600)
    cert, private = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    tls = Tls(ServerConfig(tls_cert=cert, tls_key=private))
    certificate = Certificate.given(cert, private)
    authorities = Authorities("cluster_ca", tmp_path / "ca.pem")
    near = PeerReplicas(SECRET, tls=certificate, authorities=authorities)
    stack.callback(near.close)
    group = Group(stack, STAGES, range(5), (tls, certificate))
    assert fetch(near, group.of(host="localhost"), range(5)) == 5
    assert fetch(near, group.of(host="127.0.0.1"), range(5)) == 0, "a name that it is not for"
    assert_nothing_left(near, group)
