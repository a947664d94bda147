"""Which plane two replicas choose for KV, and by which other way blocks come where one fails."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest

from jaxserve.api.request import KvSource
from jaxserve.server import block_service, part_stream, peer_blocks
from jaxserve.server.peer_blocks import PeerReplicas
from jaxserve.transfer import Plane, TransferError
from jaxserve.transfer.mooncake import MooncakePlane
from jaxserve.transfer.nixl import NixlPlane
from tests.server.test_peer_blocks import (
    BLOCK,
    SECRET,
    Source,
    asked,
    assert_nothing_left,
    content,
    fetch,
    key,
)
from tests.transfer.planes import EXPOSED, NAME, InProcessPlane, engines
from tests.transfer.proxies import Proxy, nothing
from tests.waiting import SOON, eventually

Faster = Callable[[np.ndarray, str], Plane]
SEND = 8 << 20  # bytes of staging memory of a source in these tests
SLOW = 1.0  # seconds of a slow plane for what takes milliseconds by tcp


def reader(stack: contextlib.ExitStack, faster: Faster | None) -> PeerReplicas:
    peers = PeerReplicas(SECRET, faster=faster)
    stack.callback(peers.close)
    return peers


def source(stack: contextlib.ExitStack, faster: Faster | None, **options) -> Source:
    """A source whose faster plane is the first of its planes."""
    plane = None if faster is None else faster(np.empty(1 << 20, np.uint8), "127.0.0.1")
    if plane is not None:
        stack.callback(plane.close)
    return Source(stack, range(100), planes=[plane] if plane is not None else [], **options)


def came_by(peers: PeerReplicas, source: KvSource, count: int) -> str:
    """Fetches blocks, which must be right; returns the plane by which the last one came."""
    into = np.empty(BLOCK, np.uint8)
    with contextlib.closing(asked(peers, source, range(count))) as stream:
        for number in range(count):
            assert stream.read(key(number), into), f"block {number} did not come"
            assert (into == content(key(number))).all()
        return stream.route.plane


def small_groups(monkeypatch) -> None:
    """Four blocks to a window, two to a group."""
    monkeypatch.setattr(peer_blocks, "WINDOW_BYTES", 4 * BLOCK)
    monkeypatch.setattr(block_service, "GROUP_BYTES", 2 * BLOCK)


@pytest.mark.parametrize(
    "readers, sources, chosen",
    [
        (InProcessPlane, InProcessPlane, NAME),
        (None, InProcessPlane, "tcp"),
        (InProcessPlane, None, "tcp"),
        (InProcessPlane, functools.partial(InProcessPlane, name="another"), "tcp"),
    ],
)
def test_both_sides_take_the_plane_that_both_have(stack, readers, sources, chosen):
    peers, offers = reader(stack, readers), source(stack, sources)
    assert came_by(peers, offers.of(), 60) == chosen
    assert_nothing_left(peers, offers)


def test_blocks_that_the_reader_brings_come_in_order_through_little_memory(stack, monkeypatch):
    small_groups(monkeypatch)
    peers, offers = reader(stack, InProcessPlane), source(stack, InProcessPlane)
    offers.blocks.live.add("job")
    assert fetch(peers, offers.of("job"), range(100)) == 100
    assert fetch(peers, offers.of(), [*range(90, 100), 777, 5]) == 10, "what is missing ends it"
    assert came_by(peers, offers.of(), 100) == NAME
    assert_nothing_left(peers, offers)
    eventually(lambda: not offers.planes[0].pool.used)


def test_rates_are_learnt_by_source_and_plane(stack):
    def slow(number, data):
        time.sleep(SLOW)
        return data

    peers = reader(stack, functools.partial(InProcessPlane, harm=slow))
    by_both, by_tcp = source(stack, InProcessPlane), source(stack, None)
    for offers in (by_both, by_tcp):
        assert fetch(peers, offers.of(), range(100)) == 100
    slow_rate = peers.rates.of(by_both.address, NAME)
    assert 0 < slow_rate <= 100 * BLOCK / SLOW
    assert peers.rates.of(by_tcp.address, "tcp") > slow_rate
    assert not peers.rates.of(by_both.address, "tcp")


@pytest.mark.parametrize("fault", ["error", "wrong bytes"])
def test_where_a_plane_fails_the_rest_comes_over_tcp_and_tcp_is_taken_next(
    stack, monkeypatch, fault
):
    small_groups(monkeypatch)

    def harm(number, data):
        if number < 5:
            return data
        data[3] ^= 1
        return "it broke" if fault == "error" else data

    peers = reader(stack, functools.partial(InProcessPlane, harm=harm))
    offers = source(stack, InProcessPlane)
    assert came_by(peers, offers.of(), 40) == "tcp"
    brought = peers.planes[0].reads
    assert 5 < brought < 20
    assert came_by(peers, offers.of(), 40) == "tcp"
    assert peers.planes[0].reads == brought, "it is not tried again at once"
    assert_nothing_left(peers, offers)


def test_a_read_that_never_ends_is_given_up(stack, monkeypatch):
    monkeypatch.setattr(part_stream, "BRING_SECONDS", 0.5)

    def hang(number, data):
        time.sleep(5.0)
        return data

    peers = reader(stack, functools.partial(InProcessPlane, harm=hang))
    offers = source(stack, InProcessPlane)
    began = time.monotonic()
    assert came_by(peers, offers.of(), 20) == "tcp"
    assert time.monotonic() - began < SOON
    assert_nothing_left(peers, offers)


def test_another_secret_gets_no_place_of_a_block(stack):
    offers = source(stack, InProcessPlane, secret=b"another one, of some other cluster")
    before = len(EXPOSED)
    peers = reader(stack, InProcessPlane)
    assert fetch(peers, offers.of(), range(5)) == 0
    assert len(EXPOSED) == before and not offers.blocks.wanted
    assert_nothing_left(peers, offers)


# --- several addresses


def test_a_source_is_reached_by_its_next_address_where_one_is_cut(stack):
    """It listens on 127.0.0.1 only: its first address, on 127.0.0.2, is cut."""
    peers, offers = reader(stack, None), Source(stack, range(100))
    host, port = offers.address.split(":")
    both = KvSource(f"127.0.0.2:{port},{offers.address}", 100)
    assert came_by(peers, both, 60) == "tcp"
    assert f"127.0.0.2:{port}" in peers.failed and offers.address not in peers.failed
    assert peers.rates.of(f"127.0.0.2:{port}", "tcp"), "learnt by its first address"
    assert_nothing_left(peers, offers)


def test_where_all_addresses_are_cut_nothing_comes_soon(stack):
    peers = reader(stack, None)
    began = time.monotonic()
    assert fetch(peers, KvSource("127.0.0.2:1,127.0.0.1:1", 5), range(5)) == 0
    assert time.monotonic() - began < SOON
    assert_nothing_left(peers)


def test_a_stream_goes_on_by_another_address_where_its_own_is_cut_on_the_way(stack):
    """The second half is computed once the address of the first half is cut."""
    peers, offers = reader(stack, None), Source(stack, range(20))
    offers.blocks.live.add("job")
    proxy = Proxy.to(offers.address, nothing, host="127.0.0.2")
    stack.callback(proxy.close)
    keys = list(map(key, range(40)))
    into = np.empty(BLOCK, np.uint8)
    both = KvSource(f"{proxy.address},{offers.address}", 100, "job")
    with contextlib.closing(asked(peers, both, range(40))) as stream:
        assert all(stream.read(one, into) for one in keys[:20])
        assert proxy.connections
        proxy.close()
        offers.blocks.add(range(20, 40))
        for number in range(20, 40):
            assert stream.read(keys[number], into)
            assert (into == content(keys[number])).all()
    assert proxy.address in peers.failed
    assert_nothing_left(peers, offers)


# --- engines that users may have

with_engines = pytest.mark.parametrize("faster, name", engines(SEND))


@pytest.mark.parametrize(
    "module, kind, package",
    [
        ("mooncake.engine", MooncakePlane, "pip install mooncake-transfer-engine"),
        ("nixl._api", NixlPlane, "pip install nixl"),
    ],
)
def test_without_its_package_the_error_of_a_plane_names_it(monkeypatch, module, kind, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TransferError, match=package):
        kind(np.empty(1, np.uint8))


@with_engines
def test_blocks_come_by_an_engine(stack, monkeypatch, faster, name):
    small_groups(monkeypatch)
    peers, offers = reader(stack, faster), source(stack, faster)
    assert came_by(peers, offers.of(), 100) == name
    assert peers.rates.of(offers.address, name)
    assert came_by(reader(stack, None), offers.of(), 100) == "tcp"
    assert_nothing_left(peers, offers)
    eventually(lambda: not offers.planes[0].pool.used)


@with_engines
def test_an_engine_brings_nothing_for_another_secret(stack, faster, name):
    offers = source(stack, faster, secret=b"another one, of some other cluster")
    peers = reader(stack, faster)
    assert fetch(peers, offers.of(), range(5)) == 0
    assert not offers.planes[0].pool.used and not peers.memory.any()
    assert_nothing_left(peers, offers)


PROCESS = """
import contextlib, sys, time
from tests.server.test_planes import *
block_service.GROUP_BYTES = 2 * BLOCK
faster = next(one.values[0] for one in engines(SEND) if one.values[1] == sys.argv[1])
with contextlib.ExitStack() as stack:
    offers = source(stack, faster)
    offers.blocks.live.add("job")
    print("@@" + offers.address, flush=True)
    time.sleep(200)
"""


@with_engines
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engines_source_that_is_killed_or_stopped_ends_the_stream(
    stack, monkeypatch, number, faster, name
):
    small_groups(monkeypatch)
    command = [sys.executable, "-c", PROCESS, name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    stack.callback(process.wait)
    stack.callback(process.kill)
    address = next(line[2:].strip() for line in process.stdout if line.startswith("@@"))
    peers = reader(stack, faster)
    into = np.empty(BLOCK, np.uint8)
    keys = list(map(key, range(100)))
    with contextlib.closing(asked(peers, KvSource(address, 100, "job"), range(100))) as stream:
        for last_read in range(7):
            assert stream.read(keys[last_read], into)
            assert (into == content(keys[last_read])).all()
        assert stream.route.plane == name
        process.send_signal(number)
        began = time.monotonic()
        while stream.read(keys[last_read + 1], into):
            last_read += 1
            assert (into == content(keys[last_read])).all()
        assert last_read < 99, "it ended in the middle"
    assert time.monotonic() - began < SOON
    assert_nothing_left(peers)
