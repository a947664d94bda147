"""A node's blocks are never given to two transactions, whatever two conductors do at once, and all
come back in the end."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxserve.api.errors import RequestError
from jaxserve.cluster.allocation import BlockLedger, Transaction

SECONDS = 10.0


def chain(name: int, blocks: int) -> list[bytes]:
    """Keys of a prompt; prompts of one name begin alike."""
    return [f"{name}:{block}".encode() for block in range(blocks)]


def refused(call) -> RequestError:
    with pytest.raises(RequestError) as found:
        call()
    return found.value


def test_committed_blocks_are_reused_and_new_ones_are_not_found_before():
    ledger = BlockLedger(8)
    first = ledger.allocate(chain(1, 4), 0.0, SECONDS)
    assert not any(handle.reused for handle in first.handles) and ledger.keys() == []
    assert ledger.commit(first.number, 1.0) == 4
    second = ledger.allocate(chain(1, 6), 2.0, SECONDS)
    assert [handle.reused for handle in second.handles] == [True] * 4 + [False] * 2
    assert [h.block for h in second.handles[:4]] == [h.block for h in first.handles]
    assert ledger.commit(second.number, 3.0) == 2
    assert sorted(ledger.keys()) == chain(1, 6)


def test_no_room_changes_nothing_and_says_when_to_try_again():
    ledger = BlockLedger(4)
    ledger.allocate(chain(1, 3), 0.0, SECONDS)
    error = refused(lambda: ledger.allocate(chain(2, 2), 4.0, SECONDS))
    assert error.status == "RESOURCE_EXHAUSTED" and error.retry_after == 6.0
    assert ledger.available == 1 and ledger.open == 1
    ledger.check()


def test_what_is_read_is_not_evicted_even_for_its_own_reader():
    ledger = BlockLedger(4)
    ledger.commit(ledger.allocate(chain(1, 4), 0.0, SECONDS).number, 0.0)
    assert refused(lambda: ledger.allocate(chain(1, 5), 1.0, SECONDS)).reason == "blocks"
    reader = ledger.allocate(chain(1, 2), 1.0, SECONDS)
    other = ledger.allocate(chain(2, 2), 1.0, SECONDS)
    assert not {h.block for h in reader.handles} & {h.block for h in other.handles}
    assert ledger.cached(chain(1, 4)) == 2, "the deepest blocks were evicted"
    assert all(map(ledger.valid, reader.handles))


def test_a_late_commit_is_refused_and_its_handles_are_void_once_given_away():
    ledger = BlockLedger(2)
    late = ledger.allocate(chain(1, 2), 0.0, SECONDS)
    assert ledger.expire(SECONDS) == [late.number]
    ledger.allocate(chain(2, 2), SECONDS, SECONDS)
    assert refused(lambda: ledger.commit(late.number, SECONDS)).status == "NOT_FOUND"
    assert not any(map(ledger.valid, late.handles))


def test_two_that_fill_the_same_keys_have_blocks_of_their_own_and_one_stays():
    ledger = BlockLedger(4)
    first, second = (ledger.allocate(chain(1, 2), 0.0, SECONDS) for _ in range(2))
    assert ledger.commit(second.number, 1.0) == 2
    assert ledger.commit(first.number, 1.0) == 0
    assert ledger.available == 4 and len(ledger.keys()) == 2
    ledger.check()


@pytest.mark.parametrize(
    ("keys", "seconds", "field"),
    [([], 1.0, "keys"), ([b"a", b"a"], 1.0, "keys"), ([b"a"], 0.0, "seconds")],
)
def test_what_makes_no_sense_is_refused(keys, seconds, field):
    error = refused(lambda: BlockLedger(4).allocate(keys, 0.0, seconds))
    assert (error.status, error.field) == ("INVALID_ARGUMENT", field)


class TwoConductors(RuleBasedStateMachine):
    """Two conductors allocate, commit, roll back, forget and restart, while time goes on."""

    @initialize(blocks=st.integers(1, 12))
    def begin(self, blocks):
        self.ledger = BlockLedger(blocks)
        self.now = 0.0
        self.open: list[dict[int, Transaction]] = [{}, {}]  # as each conductor believes
        self.contents: dict[int, bytes] = {}  # what was written to each block last

    @rule(who=st.integers(0, 1), name=st.integers(0, 2), blocks=st.integers(1, 8))
    def allocate(self, who, name, blocks):
        try:
            made = self.ledger.allocate(chain(name, blocks), self.now, SECONDS)
        except RequestError as error:
            assert error.status == "RESOURCE_EXHAUSTED"
            return
        for key, handle in zip(made.keys, made.handles):
            if handle.reused:
                assert self.contents[handle.block] == key, "a reused block holds another's KV"
            else:
                self.contents[handle.block] = b"being filled"
        self.open[who][made.number] = made

    @rule(who=st.integers(0, 1), data=st.data())
    def commit(self, who, data):
        if self.open[who]:
            number = data.draw(st.sampled_from(sorted(self.open[who])))
            made = self.open[who].pop(number)
            filled = [
                (key, handle.block)
                for key, handle in zip(made.keys, made.handles)
                if not handle.reused and self.ledger.valid(handle)
            ]
            try:
                self.ledger.commit(number, self.now)
            except RequestError as error:
                assert error.status == "NOT_FOUND" and made.deadline <= self.now
                return
            self.contents.update((block, key) for key, block in filled)

    @rule(who=st.integers(0, 1), data=st.data())
    def rollback(self, who, data):
        if self.open[who]:
            made = self.open[who].pop(data.draw(st.sampled_from(sorted(self.open[who]))))
            if made.deadline > self.now:
                self.ledger.rollback(made.number)

    @rule(who=st.integers(0, 1))
    def restart(self, who):
        """A conductor dies and forgets what it had open."""
        self.open[who] = {}

    @rule(seconds=st.floats(0.0, 6.0))
    def wait(self, seconds):
        self.now += seconds
        self.ledger.expire(self.now)

    @invariant()
    def no_block_is_filled_twice_or_read_while_it_is_filled(self):
        if not hasattr(self, "ledger"):
            return
        self.ledger.check()
        current = [made for mine in self.open for made in mine.values() if made.deadline > self.now]
        handles = [handle for made in current for handle in made.handles]
        filled = [handle.block for handle in handles if not handle.reused]
        assert len(set(filled)) == len(filled)
        assert not set(filled) & {handle.block for handle in handles if handle.reused}
        assert all(map(self.ledger.valid, handles))

    def teardown(self):
        if hasattr(self, "ledger"):
            self.ledger.expire(self.now + SECONDS + 1)
            assert self.ledger.open == 0
            assert self.ledger.available == self.ledger.blocks


TestTwoConductors = TwoConductors.TestCase
TestTwoConductors.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
