"""Transfers over TCP and TLS: what fences windows, who is refused, and connections that fail."""

import contextlib
import dataclasses
import os
import signal
import socket
import threading
import time
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.group import handshake
from jaxserve.group.connection import ChannelError
from jaxserve.transfer import TransferError, frames, protocol, receiver, sender
from jaxserve.transfer.frames import Answer, Request
from jaxserve.transfer.link import SendingLink
from jaxserve.transfer.protocol import split_address
from jaxserve.transfer.strangers import Strangers
from jaxserve.transfer.tcp import TcpTransfer
from tests.examples import examples
from tests.transfer.peer import SECRET, make, noise
from tests.transfer.proxies import Proxy, cut_after, flip, nothing, slow
from tests.transfer.test_transfer import LONG, over
from tests.waiting import SOON, eventually

SAME_FIXTURES = [HealthCheck.function_scoped_fixture]
HANDSHAKE_BYTES = 64  # that a sender says before its first request
NO_WINDOW = frames.REFUSALS[Answer.NO_WINDOW]
LEASE_OVER = frames.REFUSALS[Answer.LEASE_OVER]
OUTSIDE = frames.REFUSALS[Answer.OUTSIDE]


@pytest.fixture(params=["tcp", "tls"])
def kind(request):
    return request.param


@pytest.fixture
def between():
    """Makes proxies."""
    made = []

    def make_one(window, harm):
        made.append(Proxy(window, harm))
        return made[-1]

    yield make_one
    for proxy in made:
        proxy.close()


# --- windows are fenced


def test_an_ended_window_takes_nothing_more(transfers):
    lender, writer = transfers(), transfers(1)
    window = lender.lend(0, 3 << 20, 60)
    lender.end(window)
    assert over(writer, writer.write(window, 0, writer.memory[: 3 << 20], 10)) == NO_WINDOW
    assert not lender.memory.any()
    lender.end(window)  # again, which changes nothing
    window = lender.lend(0, 100, 60)
    assert over(writer, writer.write(window, 0, writer.memory[:100], 60)) == ""
    lender.end(window)


def test_a_window_ends_by_itself_when_its_lease_is_over(transfers):
    lender, writer = transfers(size=1 << 20), transfers(2, size=1 << 20)
    window = lender.lend(0, 100, 0.05)
    time.sleep(0.06)
    assert over(writer, writer.write(window, 0, writer.memory[:100], 10)) == LEASE_OVER
    assert not lender.memory.any()
    again = lender.lend(0, 100, 60)  # nobody has ended the first: its memory is free all the same
    assert over(writer, writer.write(window, 0, writer.memory[:100], 10)) == NO_WINDOW
    assert lender.counts().windows == 1
    lender.end(again)


def test_a_lease_that_is_over_in_mid_transfer_stops_it(transfers, between):
    lender, writer = transfers(), transfers(3)
    window = lender.lend(0, LONG, 0.5)
    proxy = between(window, slow(5e6))
    assert over(writer, writer.write(proxy.window, 0, writer.memory[:LONG], 20)) == LEASE_OVER
    lender.end(window)
    assert np.count_nonzero(lender.memory) < LONG * 0.99


def test_nothing_is_written_after_the_end_by_a_sender_that_was_stopped(transfers, peers):
    lender, peer = transfers(), peers(4)
    window = lender.lend(0, LONG, 60)
    assert peer.ask("write", window=window.to_json(), size=LONG, seconds=200) == "begins"
    eventually(lambda: lender.memory[0] or lender.memory[1 << 20], SOON)
    peer.signal(signal.SIGSTOP)
    began = time.monotonic()
    lender.end(window)
    assert time.monotonic() - began < 5, "it is not waited for"
    lender.memory[:] = 0
    again = lender.lend(0, LONG, 60)
    peer.signal(signal.SIGCONT)
    assert peer.answer() in (NO_WINDOW, LEASE_OVER, "")  # "": all was here before the end
    assert not lender.memory.any()
    lender.end(again)


def test_windows_that_end_while_many_write_are_never_written_again(transfers):
    """The memory is another's at once, which finds its own bytes there."""
    lender, writer = transfers(), transfers(5)
    size = 3 << 20
    for number in range(15):
        window = lender.lend(0, size, 60)
        ticket = writer.write(window, 0, writer.memory[:size], 20)
        time.sleep(0.0005 * number)
        lender.end(window)
        lender.memory[:size] = number
        assert over(writer, ticket) in ("", NO_WINDOW, LEASE_OVER)
        assert (lender.memory[:size] == number).all()


@pytest.mark.parametrize(
    "change, refusal",
    [
        ({"token": "ab" * 16}, NO_WINDOW),
        ({"epoch": 2}, NO_WINDOW),
        ({"size": 3000}, OUTSIDE),
    ],
)
def test_a_window_that_was_not_lent_so_is_refused(transfers, change, refusal):
    lender, writer = transfers(size=1 << 20), transfers(6, size=1 << 20)
    window = lender.lend(0, 1000, 60)
    forged = dataclasses.replace(window, **change)
    offset = 500 if "size" in change else 0
    assert over(writer, writer.write(forged, offset, writer.memory[:600], 10)) == refusal
    assert not lender.memory.any()
    assert over(writer, writer.write(window, 0, writer.memory[:1000], 60)) == ""
    lender.end(window)


def test_an_offset_beyond_64_bits_of_window_is_no_way_around_the_limit(transfers, kind):
    lender = transfers(size=1 << 20)
    window = lender.lend(0, 1000, 60)
    link = SendingLink(window.peer, SECRET, kind == "tls")
    answers = []
    until = time.monotonic() + SOON
    for offset in (2**64 - 1, 2**63, 1000, 995):
        request = Request(bytes.fromhex(window.token), window.epoch, offset, 10)
        link.carry([(request, memoryview(b"0123456789"))], answers, until)
    assert answers == [Answer.OUTSIDE] * 4
    with pytest.raises(ChannelError):  # more than a slice
        request = Request(bytes.fromhex(window.token), window.epoch, 0, frames.SLICE_BYTES + 1)
        link.carry([(request, memoryview(bytes(10)))], answers, until)
    link.close()
    assert not lender.memory.any()
    lender.end(window)


def test_a_replayed_frame_is_refused(transfers, between, kind):
    """Somebody repeats what they saw, byte by byte, after the window is another's."""
    lender, writer = transfers(size=1 << 20), transfers(7, size=1 << 20)
    window = lender.lend(0, 1000, 60)
    seen = []

    def record(data, position, number):
        seen.append((number, data))
        return data

    proxy = between(window, record)
    ticket = writer.write(proxy.window, 0, writer.memory[:1000], 10)
    assert over(writer, ticket) == ""
    said = b"".join(data for number, data in seen if number == 0)
    lender.end(window)
    lender.memory[:] = 0
    again = lender.lend(0, 1000, 60)
    with socket.create_connection(split_address(lender.address)) as stranger:
        stranger.sendall(said)  # on a connection of its own
        stranger.settimeout(SOON)
        with contextlib.suppress(ConnectionError):
            while stranger.recv(1000):
                pass
    proxy.ends[1].sendall(said[HANDSHAKE_BYTES:] if kind == "tcp" else said[-1000:])  # on the same
    eventually(lambda: lender.counts().refused == 1, SOON)
    assert over(writer, writer.write(proxy.window, 0, writer.memory[:1000], 10)) == NO_WINDOW
    assert not lender.memory.any()
    lender.end(again)


# --- who is refused


def test_a_peer_without_the_secret_is_refused_before_it_names_a_window(
    transfers, kind, certificate
):
    lender = transfers(size=1 << 20)
    window = lender.lend(0, 100, 60)
    tls = handshake.Certificate.load(*certificate) if kind == "tls" else None
    stranger = TcpTransfer(noise(100, 8), b"another secret", tls=tls)
    status = over(stranger, stranger.write(window, 0, stranger.memory, 10))
    assert status == "the receiver of transfers's secret is another one"
    stranger.close()
    eventually(lambda: lender.counts().refused >= 1, SOON)
    assert not lender.memory.any()
    lender.end(window)


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n\r\n" * 9, b"\xff" * 5000, b"\x16\x03\x01\x02\x00\x01" * 400],
    ids=["http", "ones", "like tls"],
)
def test_garbage_on_the_port_harms_nobody(transfers, said):
    lender, writer = transfers(), transfers(9)
    window = lender.lend(0, LONG, 60)
    ticket = writer.write(window, 0, writer.memory[:LONG], 30)
    for _ in range(5):
        with socket.create_connection(split_address(lender.address)) as stranger:
            stranger.settimeout(SOON)
            with contextlib.suppress(OSError):
                stranger.sendall(said)
                while stranger.recv(1000):
                    pass
    assert over(writer, ticket) == ""
    assert np.array_equal(lender.memory[:LONG], writer.memory[:LONG])
    eventually(lambda: lender.counts().refused == 5, SOON)
    lender.end(window)


def test_strangers_that_say_nothing_are_bounded_and_leave_and_keep_no_peer_out(
    transfers, monkeypatch
):
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 1.5)
    monkeypatch.setattr(receiver, "MAX_HANDSHAKES", 4)
    lender = transfers(size=1 << 20)
    silent = [socket.create_connection(split_address(lender.address)) for _ in range(12)]
    eventually(lambda: lender.counts().refused >= 8, SOON)
    writer = transfers(10, size=1 << 20)
    window = lender.lend(0, 100, 60)
    assert over(writer, writer.write(window, 0, writer.memory[:100], SOON)) == ""
    lender.end(window)
    for stranger in silent:
        stranger.settimeout(SOON)
        with contextlib.suppress(ConnectionError):
            while stranger.recv(1000):
                pass
        stranger.close()
    assert lender.counts().refused == 12


def test_of_an_address_with_many_strangers_the_oldest_leaves():
    strangers = Strangers(3)
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(end) for _ in range(5) for end in socket.socketpair()]
        for end, address in zip(ends[::2], ("single", "flood", "flood", "flood", "flood")):
            stack.callback(strangers.remove, strangers.add(end, address))
        for other in ends[1::2]:
            other.setblocking(False)
        assert [_is_open(other) for other in ends[1::2]] == [True, False, False, True, True]


def _is_open(end: socket.socket) -> bool:
    try:
        return bool(end.recv(1))
    except BlockingIOError:
        return True


def test_one_with_tls_and_one_without_do_not_meet(transfers, kind, certificate):
    lender = transfers(size=1 << 20)
    window = lender.lend(0, 100, 60)
    other = make("tls" if kind == "tcp" else "tcp", noise(100, 11), certificate)
    began = time.monotonic()
    assert over(other, other.write(window, 0, other.memory, 2))
    assert time.monotonic() - began < SOON
    other.close()
    assert not lender.memory.any()
    lender.end(window)


# --- connections that fail


@settings(max_examples=examples(40), deadline=None, suppress_health_check=SAME_FIXTURES)
@given(count=st.integers(0, 3 << 20), connections=st.integers(1, 2))
def test_slices_of_a_connection_that_is_cut_go_by_another(transfers, between, count, connections):
    lender, writer = transfers(size=3 << 20), transfers(12, size=3 << 20)
    window = lender.lend(77, 2 << 20, 60)
    proxy = between(window, cut_after(count, connections))
    assert over(writer, writer.write(proxy.window, 0, writer.memory[: 2 << 20], 60)) == ""
    assert np.array_equal(lender.memory[77 : 77 + (2 << 20)], writer.memory[: 2 << 20])
    lender.end(window)
    proxy.close()
    writer.close()
    lender.close()


def test_where_every_connection_is_cut_the_ticket_fails_soon(transfers, between):
    lender, writer = transfers(), transfers(13)
    window = lender.lend(0, LONG, 60)
    proxy = between(window, cut_after(1 << 19, 1000))
    began = time.monotonic()
    status = over(writer, writer.write(proxy.window, 0, writer.memory[:LONG], 60))
    assert status and time.monotonic() - began < SOON
    assert proxy.connections < 60
    assert not lender.memory[LONG:].any()
    lender.end(window)


def test_a_connection_that_died_in_the_pool_costs_no_ticket(transfers, between):
    lender, writer = transfers(size=1 << 20), transfers(14, size=1 << 20)
    window = lender.lend(0, 4000, 60)
    proxy = between(window, nothing)
    for number in range(4):
        data = writer.memory[number * 1000 : (number + 1) * 1000]
        assert over(writer, writer.write(proxy.window, number * 1000, data, 60)) == ""
        proxy.cut()
    assert np.array_equal(lender.memory[:4000], writer.memory[:4000])
    lender.end(window)


@settings(max_examples=examples(40), deadline=None, suppress_health_check=SAME_FIXTURES)
@given(at=st.integers(HANDSHAKE_BYTES, 300_000), bit=st.integers(0, 7))
def test_a_flipped_bit_fails_the_connection_or_is_found_by_the_callers_checksum(
    transfers, between, kind, at, bit
):
    """Contents are the caller's to check; frames are not to be led astray by any bit."""
    lender, writer = transfers(size=1 << 19), transfers(15, size=1 << 19)
    window = lender.lend(1000, 200_000, 60)
    sent = writer.memory[:200_000]
    proxy = between(window, flip(at, bit, 1))
    status = over(writer, writer.write(proxy.window, 0, sent, 2))
    arrived = lender.memory[1000:201_000]
    if status == "":
        differ = np.flatnonzero(arrived != sent)
        right = zlib.crc32(arrived) == zlib.crc32(sent)
        assert right if kind == "tls" else right == (differ.size == 0)
        assert differ.size <= 1, "one bit cannot move or repeat others"
    assert not lender.memory[:1000].any() and not lender.memory[201_000:].any()
    lender.end(window)
    proxy.close()
    writer.close()
    lender.close()


@pytest.mark.parametrize(
    "at", [0, 20, 25, 33, 40], ids=["token", "epoch", "offset", "size", "code"]
)
def test_a_changed_request_fails_its_connection_and_goes_by_another(transfers, between, at):
    """It is neither believed nor answered: what it names is not the sender's word."""
    lender, writer = transfers(size=1 << 20), transfers(30, size=1 << 20)
    window = lender.lend(0, 1 << 20, 60)
    proxy = between(window, flip(HANDSHAKE_BYTES + at, 1, 1))
    data = writer.memory[:70_000]
    assert over(writer, writer.write(proxy.window, 100, data, 60)) == ""
    assert np.array_equal(lender.memory[100:70_100], data)
    assert not lender.memory[:100].any() and not lender.memory[70_100:].any()
    assert proxy.connections == 2 and writer.counts().retries == 1
    lender.end(window)


def test_a_slow_receiver_gets_all_within_the_deadline_and_nothing_counts_after_it(
    transfers, between
):
    lender, writer = transfers(), transfers(16)
    window = lender.lend(0, LONG, 60)
    quick = over(
        writer, writer.write(between(window, slow(40e6)).window, 0, writer.memory[: 4 << 20], 30)
    )
    assert quick == "" and np.array_equal(lender.memory[: 4 << 20], writer.memory[: 4 << 20])
    began = time.monotonic()
    late = over(
        writer, writer.write(between(window, slow(2e5)).window, 0, writer.memory[:LONG], 0.5)
    )
    assert late == "seconds: it was not over after 0.5 s"
    assert time.monotonic() - began < 40, "all of it takes twice as long"
    lender.end(window)


def test_a_deadline_holds_for_a_peer_that_is_stopped_and_frees_the_source(transfers, peers):
    peer, writer = peers(), transfers(17)
    window = peer.lend(0, LONG)
    sent = writer.memory[:LONG].copy()
    peer.signal(signal.SIGSTOP)
    began = time.monotonic()
    tickets = [
        writer.write(window, at, writer.memory[at : at + LONG // 4], 0.4)
        for at in range(0, LONG, LONG // 4)
    ]
    ends = [over(writer, ticket) for ticket in tickets]
    assert set(ends) == {"seconds: it was not over after 0.4 s"}
    assert time.monotonic() - began < SOON
    writer.memory[:LONG] = 0  # the caller's again: what comes late is what was sent, or nothing
    peer.signal(signal.SIGCONT)
    part = 1 << 16
    for at in range(0, LONG, part):
        data = sent[at : at + part]
        assert peer.holds(at, data[:1]) or peer.holds(at, np.zeros(1, np.uint8))
    peer.ask("end", window=window.to_json())
    window = peer.lend(0, 1000)
    assert over(writer, writer.write(window, 0, sent[:1000], 60)) == ""


def test_a_peer_that_is_stopped_holds_up_nobody_else(transfers, peers):
    stopped, well, writer = peers(), transfers(), transfers(18)
    window = stopped.lend(0, LONG)
    stopped.signal(signal.SIGSTOP)
    stuck = [writer.write(window, 0, writer.memory[:LONG], 200) for _ in range(5)]
    other = well.lend(0, LONG, 60)
    began = time.monotonic()
    assert over(writer, writer.write(other, 0, writer.memory[:LONG], SOON)) == ""
    assert time.monotonic() - began < SOON
    assert [writer.status(ticket) for ticket in stuck] == [None] * 5
    well.end(other)
    stopped.signal(signal.SIGKILL)
    for ticket in stuck:
        assert over(writer, ticket, 30)


# --- bounds


def test_connections_are_pooled_and_never_more_than_allowed(transfers):
    lenders = [transfers(size=1 << 20) for _ in range(5)]
    writer = transfers(19, size=1 << 20, max_connections=2)
    windows = [lender.lend(0, 1 << 20, 60) for lender in lenders]
    most = 0
    for _ in range(3):
        tickets = [writer.write(window, 0, writer.memory, 30) for window in windows]
        while None in [writer.status(ticket) for ticket in tickets]:
            most = max(most, writer.counts().connections)
        assert [over(writer, ticket) for ticket in tickets] == [""] * 5
    assert most == 2
    assert all(np.array_equal(lender.memory, writer.memory) for lender in lenders)
    for lender, window in zip(lenders, windows):
        lender.end(window)


def test_a_receiver_closes_idle_connections_for_new_ones(transfers):
    lender = transfers(size=1 << 20, max_connections=2)
    writers = [transfers(20 + number, size=1 << 20) for number in range(4)]
    window = lender.lend(0, 1000, 60)
    for number in range(3):
        for writer in writers:
            data = writer.memory[number * 1000 : (number + 1) * 1000]
            assert over(writer, writer.write(window, 0, data, 60)) == ""
            assert np.array_equal(lender.memory[:1000], data)
            assert lender.counts().connections <= 2
    lender.end(window)


def test_an_idle_connection_ends_after_a_while(transfers, monkeypatch):
    monkeypatch.setattr(sender, "IDLE_SECONDS", 0.1)
    lender, writer = transfers(size=1 << 20), transfers(24, size=1 << 20)
    window = lender.lend(0, 100, 60)
    assert over(writer, writer.write(window, 0, writer.memory[:100], 60)) == ""
    eventually(lambda: not writer.counts().connections and not lender.counts().connections, SOON)
    assert over(writer, writer.write(window, 0, writer.memory[:100], 60)) == ""
    lender.end(window)


def test_windows_and_tickets_are_bounded(transfers, monkeypatch):
    monkeypatch.setattr("jaxserve.transfer.windows.MAX_WINDOWS", 3)
    monkeypatch.setattr(sender, "MAX_TICKETS", 2)
    lender, writer = transfers(size=1 << 20), transfers(25, size=1 << 20)
    windows = [lender.lend(at, 1, 60) for at in range(3)]
    with pytest.raises(TransferError, match=r"^windows: 3 are lent"):
        lender.lend(5, 1, 60)
    tickets = [writer.write(windows[0], 0, writer.memory[:1], 10) for _ in range(2)]
    with pytest.raises(TransferError, match=r"^tickets: 2 are not released"):
        writer.write(windows[0], 0, writer.memory[:1], 10)
    for ticket in tickets:
        assert over(writer, ticket) == ""
    for window in windows:
        lender.end(window)


def test_counts_say_what_was_moved(transfers):
    lender, writer = transfers(), transfers(26)
    window = lender.lend(0, 3 << 20, 60)
    assert over(writer, writer.write(window, 0, writer.memory[: 3 << 20], 60)) == ""
    assert writer.counts().sent_bytes == lender.counts().received_bytes == 3 << 20
    assert lender.counts().windows == 1 and writer.counts().retries == 0
    lender.end(window)
    assert lender.counts() == dataclasses.replace(lender.counts(), windows=0, tickets=0)


def test_closing_while_strangers_and_senders_are_there_takes_no_time(transfers):
    lender, writer = transfers(), transfers(27)
    window = lender.lend(0, LONG, 60)
    strangers = [socket.create_connection(split_address(lender.address)) for _ in range(3)]
    ticket = writer.write(window, 0, writer.memory[:LONG], 200)
    began = time.monotonic()
    lender.close()
    assert time.monotonic() - began < SOON
    memory = lender.memory.copy()
    assert over(writer, ticket) is not None
    assert np.array_equal(lender.memory, memory), "nothing is written after the end"
    for stranger in strangers:
        stranger.close()


def test_an_address_is_a_host_and_a_port():
    for text, address in (
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("[::1]:7000", ("::1", 7000)),
        ("some-host.example:65535", ("some-host.example", 65535)),
    ):
        assert split_address(text) == address
        assert protocol.join_address(*address) == text
    for text in ("", "host", "host:", ":80", "host:0", "host:65536", "a b:80", "::1:80"):
        with pytest.raises(TransferError, match=r"^peer: "):
            split_address(text)


def test_what_cannot_be_staging_memory_is_refused():
    for memory in (np.zeros(8, np.int8), np.zeros((2, 4), np.uint8), np.zeros(8, np.uint8)[::2]):
        with pytest.raises(TransferError, match=r"^memory: "):
            TcpTransfer(memory, SECRET)
    with pytest.raises(TransferError, match=r"^secret: "):
        TcpTransfer(np.zeros(8, np.uint8), b"")


def test_writes_and_ends_by_many_threads_end_all(transfers):
    """A storm of small ones, some to windows that end meanwhile: each has a right answer."""
    lender, writer = transfers(), transfers(28)
    faults = []

    def run(seed):
        random = np.random.default_rng(seed)
        base = seed * 100_000
        for _ in range(12):
            size = int(random.integers(1, 100_000))
            window = lender.lend(base, size, 60)
            start = int(random.integers(0, 1 << 20))
            data = writer.memory[start : start + size]
            ticket = writer.write(window, 0, data, 20)
            early = random.random() < 0.3
            if early:
                lender.end(window)
            status = over(writer, ticket)
            if status == "" and not np.array_equal(lender.memory[base : base + size], data):
                faults.append((seed, size))
            if status and not early:
                faults.append(status)
            lender.end(window)

    running = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
    assert not faults and writer.counts().tickets == 0


def test_more_files_cannot_be_opened_for_a_while(transfers):
    """A receiver without a free file takes connections again once it has some."""
    resource = pytest.importorskip("resource")
    lender, writer = transfers(size=1 << 20), transfers(29, size=1 << 20)
    window = lender.lend(0, 100, 60)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        with contextlib.suppress(OSError):
            while True:
                files.append(os.open(os.devnull, os.O_RDONLY))
        status = over(writer, writer.write(window, 0, writer.memory[:100], 1))
        assert status and not lender.memory.any()
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert over(writer, writer.write(window, 0, writer.memory[:100], 60)) == ""
    lender.end(window)


# --- peers with several addresses


def by_two(receiver, harms):
    """Two proxies before a receiver, on 127.0.0.1 and 127.0.0.2, and a window by both."""
    window = receiver.lend(0, LONG, 60)
    hosts = ("127.0.0.1", "127.0.0.2")
    proxies = [Proxy(window, harm, host) for harm, host in zip(harms, hosts)]
    both = dataclasses.replace(window, peer=",".join(proxy.address for proxy in proxies))
    return proxies, window, both


@pytest.fixture
def proxied(transfers):
    """Sends noise by two addresses of a receiver, with some harm on each. Returns the bytes that
    went by each, the sender and the seconds that it took."""
    with contextlib.ExitStack() as stack:

        def send(*harms):
            receiver, writer = transfers(), transfers(21)
            passed = [0, 0]

            def counted(side, harm):
                def count(data, position, number):
                    passed[side] += len(data)
                    return harm(data, position, number)

                return count

            counting = [counted(side, harm) for side, harm in enumerate(harms)]
            proxies, window, both = by_two(receiver, counting)
            for proxy in proxies:
                stack.callback(proxy.close)
            began = time.monotonic()
            ticket = writer.write(both, 0, writer.memory[:LONG], 30)
            assert over(writer, ticket) == ""
            seconds = time.monotonic() - began
            assert np.array_equal(receiver.memory[:LONG], writer.memory[:LONG])
            receiver.end(window)
            return passed, writer, seconds

        yield send


def test_bytes_go_by_both_addresses_of_a_receiver_side_by_side(proxied):
    rate = slow(4e6)  # so that neither is done before the other has begun
    passed, writer, _ = proxied(rate, rate)
    assert min(passed) > LONG // 8, passed
    assert writer.counts().retries == 0


@pytest.mark.parametrize("cut", [0, 1])
def test_bytes_go_by_the_other_address_where_one_is_cut_on_the_way(proxied, cut):
    harms = [slow(2e7), slow(2e7)]
    harms[cut] = cut_after(1 << 20, 100)
    passed, writer, _ = proxied(*harms)
    assert passed[1 - cut] > LONG // 2 and writer.counts().retries


def test_an_address_that_fails_in_silence_holds_a_write_up_for_a_bounded_time(proxied):
    released = threading.Event()

    def stall(data, position, number):
        if position > 1 << 19:
            released.wait(20.0)
        return data

    _, writer, seconds = proxied(stall, nothing)
    released.set()
    assert seconds < 20.0 and writer.counts().retries


def test_an_address_where_nothing_listens_is_left_out(transfers):
    receiver, writer = transfers(), transfers(22)
    window = receiver.lend(0, LONG, 60)
    port = receiver.address.rpartition(":")[2]
    both = dataclasses.replace(window, peer=f"127.0.0.2:{port},{receiver.address}")
    for _ in range(2):
        assert over(writer, writer.write(both, 0, writer.memory[:LONG], 30)) == ""
    assert np.array_equal(receiver.memory[:LONG], writer.memory[:LONG])
    receiver.end(window)
