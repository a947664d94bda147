"""What every implementation of transfers promises, with peers that are killed and stopped."""

import contextlib
import signal
import threading
import time

import numpy as np
import pytest

from jaxserve.transfer import Ticket, TransferError, Window
from tests.transfer.conftest import SIZE
from tests.transfer.peer import noise
from tests.waiting import SOON, eventually

LONG = 16 << 20  # bytes: more than the kernel's buffers


@pytest.fixture(params=["tcp", "tls"])
def kind(request):
    return request.param


def over(transfer, ticket, seconds=SOON):
    """The end of a ticket, which is forgotten."""
    status = transfer.wait(ticket, seconds)
    assert status is not None, "it did not end"
    transfer.release(ticket)
    return status


@pytest.mark.parametrize("size", [1, 4095, 1 << 20, (1 << 20) + 1, 5_000_001])
def test_what_is_written_is_in_the_window_and_nothing_else_changes(transfers, size):
    receiver, sender = transfers(), transfers(7)
    window = receiver.lend(1000, size + 100, 60)
    ticket = sender.write(window, 33, sender.memory[5 : 5 + size], 30)
    assert ticket.size == size
    assert over(sender, ticket) == ""
    start = 1000 + 33
    assert np.array_equal(receiver.memory[start : start + size], sender.memory[5 : 5 + size])
    assert not receiver.memory[:start].any() and not receiver.memory[start + size :].any()
    receiver.end(window)


def test_many_pieces_go_under_one_ticket_in_any_order(transfers):
    receiver, sender = transfers(), transfers(8)
    window = receiver.lend(0, 4 << 20, 60)
    offsets = np.random.default_rng(0).permutation(60) * 65536
    pieces = [(int(at), sender.memory[at : at + 65536 - 7]) for at in offsets]
    assert over(sender, sender.write_many(window, pieces, 30)) == ""
    for at, data in pieces:
        assert np.array_equal(receiver.memory[at : at + data.size], data)
        assert not receiver.memory[at + data.size : at + 65536].any()
    receiver.end(window)


def test_a_window_travels_as_plain_data(transfers):
    receiver = transfers()
    window = receiver.lend(0, 100, 60)
    assert Window.from_json(window.to_json()) == window
    assert window.peer == receiver.address
    receiver.end(window)


def test_each_window_has_an_epoch_of_its_own(transfers):
    receiver = transfers()
    windows = []
    for _ in range(3):
        windows.append(receiver.lend(0, 100, 60))
        receiver.end(windows[-1])
    assert [window.epoch for window in windows] == sorted({window.epoch for window in windows})


@pytest.mark.parametrize(
    "base, size, seconds, field",
    [
        (-1, 10, 1.0, "base"),
        (0, 0, 1.0, "base"),
        (SIZE - 9, 10, 1.0, "base"),
        (0, 10, 0.0, "seconds"),
        (0, 10, float("nan"), "seconds"),
    ],
)
def test_a_lease_that_makes_no_sense_is_refused(transfers, base, size, seconds, field):
    with pytest.raises(TransferError, match=f"^{field}: "):
        transfers().lend(base, size, seconds)


def test_no_byte_is_lent_twice(transfers):
    receiver = transfers()
    window = receiver.lend(100, 100, 60)
    for base in (1, 100, 199):
        with pytest.raises(TransferError, match=r"^base: .* overlap"):
            receiver.lend(base, 100, 60)
    beside = receiver.lend(200, 100, 60)
    receiver.end(window)
    receiver.end(receiver.lend(100, 100, 60))
    receiver.end(beside)


def test_a_write_that_makes_no_sense_is_refused_at_once(transfers):
    receiver, sender = transfers(), transfers(9)
    window = receiver.lend(0, 100, 60)
    data = sender.memory[:50]
    for offset in (-1, 51, 1 << 50):
        with pytest.raises(TransferError, match=r"^offset: "):
            sender.write(window, offset, data, 10)
    with pytest.raises(TransferError, match=r"^offset: "):
        sender.write(window, 0, data[:0], 10)
    with pytest.raises(TransferError, match=r"^data: "):
        sender.write(window, 0, sender.memory[:100:2], 10)
    with pytest.raises(TransferError, match=r"^seconds: "):
        sender.write(window, 0, data, -1)
    with pytest.raises(TransferError, match=r"^pieces: "):
        sender.write_many(window, [], 10)
    with pytest.raises(TransferError, match=r"^token: "):
        sender.write(Window(window.peer, "no token", 100, 1), 0, data, 10)
    receiver.end(window)
    assert sender.counts().tickets == 0 and not receiver.memory.any()


@pytest.mark.parametrize(
    "change",
    [
        {"peer": "nowhere"},
        {"peer": "host:99999"},
        {"peer": "h" * 300 + ":1"},
        {"size": -1},
        {"size": True},
        {"epoch": 1.5},
        {"token": 7},
        {"more": 1},
    ],
)
def test_what_is_no_window_is_refused(change):
    window = Window("127.0.0.1:1", "00" * 16, 10, 1).to_json()
    with pytest.raises(TransferError):
        Window.from_json({**window, **change})
    with pytest.raises(TransferError):
        Window.from_json("no window")


def test_a_ticket_ends_once_and_is_forgotten_when_released(transfers):
    receiver, sender = transfers(), transfers(10)
    window = receiver.lend(0, 100, 60)
    ticket = sender.write(window, 0, sender.memory[:100], 30)
    assert sender.wait(ticket, SOON) == "" and sender.status(ticket) == ""
    assert sender.counts().tickets == 1
    sender.release(ticket)
    assert sender.counts().tickets == 0
    for forgotten in (ticket, Ticket(12345, 1)):
        with pytest.raises(TransferError, match=r"^ticket: "):
            sender.status(forgotten)
    receiver.end(window)


def test_many_threads_write_to_many_windows_in_both_directions(transfers):
    sides = [transfers(11), transfers(12)]
    sent = [side.memory.copy() for side in sides]
    part = 300_000
    windows = [[side.lend(at * part, part, 60) for at in range(8)] for side in sides]
    ends = []

    def write(me, other, at):
        data = sent[me][(at + 20) * part : (at + 21) * part]
        source = sides[me].memory[(at + 20) * part : (at + 21) * part]
        ticket = sides[me].write(windows[other][at], 0, source, 30)
        status = over(sides[me], ticket)
        arrived = sides[other].memory[at * part : (at + 1) * part]
        ends.append((status, np.array_equal(arrived, data)))

    running = [
        threading.Thread(target=write, args=(me, 1 - me, at)) for me in (0, 1) for at in range(8)
    ]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(SOON)
    assert ends == [("", True)] * 16
    for side, lent in zip(sides, windows):
        for window in lent:
            side.end(window)


def test_nobody_at_the_address_is_an_error_within_the_time(transfers):
    receiver, sender = transfers(), transfers(13)
    window = receiver.lend(0, 100, 60)
    nobody = Window("127.0.0.1:1", window.token, 100, 1)
    began = time.monotonic()
    assert over(sender, sender.write(nobody, 0, sender.memory[:100], 5))
    assert time.monotonic() - began < 5 + SOON
    receiver.end(window)


def test_a_receiver_that_is_killed_in_mid_transfer_ends_the_ticket_with_an_error(transfers, peers):
    peer, sender = peers(), transfers(14)
    window = peer.lend(0, LONG)
    peer.signal(signal.SIGSTOP)  # so that it is certain to be in the middle
    ticket = sender.write(window, 0, sender.memory[:LONG], 30)
    time.sleep(0.1)
    assert sender.status(ticket) is None
    with pytest.raises(TransferError, match=r"^ticket: is under way"):
        sender.release(ticket)
    peer.signal(signal.SIGKILL)
    began = time.monotonic()
    assert over(sender, ticket, 60)
    assert time.monotonic() - began < SOON
    other = peers()
    ticket = sender.write(other.lend(0, LONG), 0, sender.memory[:LONG], 30)
    assert over(sender, ticket) == "" and other.holds(0, sender.memory[:LONG])


def test_a_receiver_that_was_stopped_for_a_while_gets_all_bytes(transfers, peers):
    peer, sender = peers(), transfers(15)
    window = peer.lend(0, LONG)
    peer.signal(signal.SIGSTOP)
    ticket = sender.write(window, 0, sender.memory[:LONG], 30)
    time.sleep(0.3)
    peer.signal(signal.SIGCONT)
    assert over(sender, ticket, 40) == "" and peer.holds(0, sender.memory[:LONG])


def test_a_sender_that_is_killed_in_mid_transfer_leaves_the_receiver_well(transfers, peers):
    receiver, peer = transfers(), peers(16)
    window = receiver.lend(0, LONG, 60)
    assert peer.ask("write", window=window.to_json(), size=LONG, seconds=30) == "begins"
    with contextlib.suppress(AssertionError):  # it may be over by then
        eventually(lambda: receiver.memory[:LONG].any())
    peer.signal(signal.SIGKILL)
    peer.process.wait(SOON)
    receiver.end(window)
    again = peers(17)
    window = receiver.lend(0, LONG, 60)
    assert again.ask("write", window=window.to_json(), size=LONG, seconds=30) == "begins"
    assert again.answer() == ""
    assert np.array_equal(receiver.memory[:LONG], noise(SIZE, 17)[:LONG])
    receiver.end(window)


def test_closing_ends_what_is_under_way(transfers, peers):
    peer, sender = peers(), transfers(18)
    window = peer.lend(0, LONG)
    peer.signal(signal.SIGSTOP)
    ticket = sender.write(window, 0, sender.memory[:LONG], 60)
    time.sleep(0.1)
    began = time.monotonic()
    sender.close()
    assert time.monotonic() - began < SOON
    assert over(sender, ticket)
    with pytest.raises(TransferError, match=r"^transfer: it was closed"):
        sender.write(window, 0, sender.memory[:1], 1)
    with pytest.raises(TransferError, match=r"^transfer: it was closed"):
        sender.lend(0, 1, 1)
