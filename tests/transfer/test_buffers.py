"""Receive buffers: nobody is overtaken or forgotten, nothing is lost, and no wait has no end."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxserve.transfer import ReceiveBuffers, TransferError
from tests.examples import examples

LEASE = 10.0  # seconds
CONSUME = 2.0  # from the last part to the release
TICK = 1.0  # between two looks of each transfer and of the receiver
PATIENCE = 3.0


def line(count=4, lease=LEASE, patience=PATIENCE):
    return ReceiveBuffers(count, lease, patience)


def test_a_transfer_gets_all_its_buffers_or_none():
    buffers = line(4)
    first = buffers.ask("a", 3, 1, LEASE, 0.0)
    assert first is not None and len(set(first.buffers)) == 3 and first.until == LEASE
    assert buffers.ask("b", 2, 1, LEASE, 1.0) is None
    assert buffers.free == 1 and buffers.waiting == 1
    assert [grant.transfer for grant in buffers.release("a", 2.0)] == ["b"]
    granted = buffers.ask("b", 2, 1, LEASE, 2.5)
    assert granted is not None and granted.until == 2.0 + LEASE, "the lease begins with the grant"
    buffers.check()


def test_a_small_one_does_not_overtake_a_large_one():
    buffers = line(4)
    buffers.ask("a", 2, 1, LEASE, 0.0)
    assert buffers.ask("large", 4, 1, LEASE, 0.1) is None
    assert buffers.ask("small", 1, 1, LEASE, 0.2) is None, "there are two free, but not for it"
    assert [grant.transfer for grant in buffers.release("a", 1.0)] == ["large"]
    assert [grant.transfer for grant in buffers.release("large", 2.0)] == ["small"]


def test_one_that_stops_asking_has_left_the_line():
    buffers = line(1)
    buffers.ask("a", 1, 1, LEASE, 0.0)
    buffers.ask("gone", 1, 1, LEASE, 0.0)
    buffers.ask("b", 1, 1, LEASE, 1.0)
    buffers.ask("b", 1, 1, LEASE, PATIENCE)
    assert [grant.transfer for grant in buffers.release("a", PATIENCE + 0.1)] == ["b"]


def test_a_half_filled_transfer_loses_its_buffers_when_its_lease_is_over():
    buffers = line(2)
    buffers.ask("half", 2, 3, 5.0, 0.0)
    assert not buffers.arrived("half", 0, 1.0) and not buffers.arrived("half", 1, 1.0)
    assert buffers.expired(4.9) == []
    (late,) = buffers.expired(5.0)
    assert late.transfer == "half"
    with pytest.raises(TransferError, match=r"^transfer: the lease of 'half' is over"):
        buffers.arrived("half", 2, 5.0)
    assert buffers.ask("next", 1, 1, LEASE, 5.0) is None, "its windows are not ended yet"
    assert [grant.transfer for grant in buffers.release("half", 5.1)] == ["next"]


def test_a_transfer_that_is_whole_keeps_its_buffers_until_it_was_taken():
    buffers = line(2)
    buffers.ask("a", 2, 2, 5.0, 0.0)
    assert not buffers.arrived("a", 1, 1.0)
    assert not buffers.arrived("a", 1, 1.5), "the same part again is no other"
    assert buffers.arrived("a", 0, 2.0)
    assert buffers.expired(100.0) == []
    buffers.release("a", 100.0)
    assert buffers.free == 2


def test_one_that_waits_can_withdraw():
    buffers = line(1)
    buffers.ask("a", 1, 1, LEASE, 0.0)
    buffers.ask("b", 1, 1, LEASE, 0.0)
    assert buffers.release("b", 0.5) == [] and buffers.waiting == 0
    assert buffers.release("nobody", 0.5) == []


@pytest.mark.parametrize(
    "asked, field",
    [
        ((0, 1, 1.0), "buffers"),
        ((5, 1, 1.0), "buffers"),
        ((1, 0, 1.0), "parts"),
        ((1, 1, 0.0), "seconds"),
        ((1, 1, LEASE + 1), "seconds"),
    ],
)
def test_what_can_never_be_granted_is_refused(asked, field):
    with pytest.raises(TransferError, match=f"^{field}: "):
        line(4).ask("a", *asked, 0.0)


def test_the_line_is_bounded(monkeypatch):
    monkeypatch.setattr("jaxserve.transfer.buffers.MAX_WAITING", 2)
    buffers = line(1)
    for name in "abc":
        buffers.ask(name, 1, 1, LEASE, 0.0)
    with pytest.raises(TransferError, match=r"^transfers: 2 wait"):
        buffers.ask("d", 1, 1, LEASE, 0.0)
    assert buffers.ask("b", 1, 1, LEASE, 0.0) is None, "those in it can ask again"
    with pytest.raises(TransferError, match=r"^transfer: 'b' has no buffers"):
        buffers.arrived("b", 0, 0.0)


@pytest.mark.parametrize("count", [16, 8], ids=["all buffers", "half of them"])
def test_all_finish_with_all_and_with_half_the_buffers(count):
    """Sixty transfers of 1 to 8 buffers, one each half second, that need 1 s for each buffer."""
    buffers = line(count, LEASE)
    needs = {f"t{number:02}": 1 + number * 5 % 8 for number in range(60)}
    begins = {name: 0.5 * number for number, name in enumerate(needs)}
    granted: dict[str, float] = {}
    ended: dict[str, float] = {}
    now = 0.0
    while len(ended) < len(needs):
        for name, need in needs.items():
            if name in ended or begins[name] > now:
                continue
            if name not in granted and buffers.ask(name, need, need, LEASE, now):
                granted[name] = now
            if name in granted and now >= granted[name] + need:
                assert all(buffers.arrived(name, part, now) for part in range(need)) == (need == 1)
                buffers.release(name, now)
                ended[name] = now
        assert not buffers.expired(now)
        buffers.check()
        now += 0.25
        assert now < 1000
    assert list(granted) == sorted(granted), "in the order of first asking"
    work = sum(need * need for need in needs.values())  # buffer seconds
    # with the first in line waiting for 8, at most 7 buffers are idle
    assert max(ended.values()) <= 30 + (work / (count - 7) if count > 8 else 60 * (8 + 1))


class Line(RuleBasedStateMachine):
    """Transfers come, fill their buffers or stop half-way, and die while they wait. Each that lives
    asks each TICK; the receiver looks for leases that are over as often."""

    @initialize(count=st.integers(1, 6))
    def begin(self, count):
        self.buffers = ReceiveBuffers(count, LEASE, PATIENCE)
        self.now = 0.0
        self.number = 0
        self.waiting = {}  # name -> (buffers, parts, when it asked first, how many were before it)
        self.dead = set()
        self.order = []  # of first asking
        self.granted = []  # of those that live
        self.filling = {}  # name -> parts to come
        self.whole = {}  # name -> when it was

    @rule(need=st.integers(1, 6), parts=st.integers(1, 3))
    def come(self, need, parts):
        name = f"t{self.number}"
        self.number += 1
        need = min(need, self.buffers.count)
        before = self.buffers.waiting
        self.waiting[name] = (need, parts, self.now, before)
        self.order.append(name)
        self.ask(name)

    def ask(self, name):
        need, parts, since, before = self.waiting[name]
        grant = self.buffers.ask(name, need, parts, LEASE, self.now)
        if grant is not None:
            assert len(set(grant.buffers)) == need
            del self.waiting[name]
            self.filling[name] = parts
            self.granted.append(name)
            bound = (before + 1) * (LEASE + CONSUME + 2 * TICK)
            assert self.now - since <= bound, f"{name} waited {self.now - since} s"

    @rule(data=st.data())
    def die(self, data):
        if self.waiting:
            name = data.draw(st.sampled_from(sorted(self.waiting)))
            del self.waiting[name]
            self.order.remove(name)

    @rule(data=st.data())
    def part_arrives(self, data):
        if self.filling:
            name = data.draw(st.sampled_from(sorted(self.filling)))
            self.filling[name] -= 1
            if self.buffers.arrived(name, self.filling[name], self.now):
                assert not self.filling.pop(name)
                self.whole[name] = self.now

    @rule(ticks=st.integers(1, 5))
    def time_passes(self, ticks):
        for _ in range(ticks):
            self.now += TICK
            for name, since in list(self.whole.items()):
                if self.now - since >= CONSUME:
                    del self.whole[name]
                    self.buffers.release(name, self.now)
            for grant in self.buffers.expired(self.now):
                assert grant.transfer not in self.whole
                self.filling.pop(grant.transfer, None)
                self.buffers.release(grant.transfer, self.now)
            for name in list(self.waiting):
                self.ask(name)

    @invariant()
    def nothing_is_lost_and_nobody_overtaken(self):
        if hasattr(self, "buffers"):
            self.buffers.check()
            places = [self.order.index(name) for name in self.granted if name in self.order]
            assert places == sorted(places)

    def teardown(self):
        """All that live are granted at last, and all buffers come back."""
        if hasattr(self, "buffers"):
            for _ in range(1000):
                if not (self.waiting or self.filling or self.whole):
                    break
                self.time_passes(1)
            assert not self.waiting
            self.time_passes(int(LEASE + PATIENCE) + 1)
            self.nothing_is_lost_and_nobody_overtaken()
            assert self.buffers.free == self.buffers.count and not self.buffers.waiting


Line.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)
TestLine = Line.TestCase
