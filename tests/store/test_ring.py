"""Which record is written next: the oldest, but for second chances within a bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.store.ring import Entry, Ring


class Written:
    """A ring whose blocks are all written at once."""

    def __init__(self, records: int):
        self.records = records
        self.ring = Ring(0)
        self.count = 0

    def grow(self) -> int:
        return min(2, self.records - self.ring.records)

    def put(self, name: str, expires: float = 0.0, keep: bool = False, now: float = 1.0) -> int:
        record = self.ring.take(now, self.grow)
        assert record is not None
        self.count += 1
        older = self.ring.settle(Entry(name.encode(), record, self.count, expires, keep))
        if older is not None:
            self.ring.release(older.record)
        return record

    def read(self, name: str) -> None:
        self.ring.find(name.encode(), 1.0).read = True

    @property
    def names(self) -> set[str]:
        return {key.decode() for key in self.ring.keys(1.0)}


def test_records_are_written_in_their_order_and_the_oldest_overwritten():
    written = Written(5)
    assert [written.put(name) for name in "abcdefg"] == [0, 1, 2, 3, 4, 0, 1]
    assert written.names == set("cdefg")
    assert written.ring.evicted == 2


def test_a_block_that_was_read_stays_one_round_longer():
    written = Written(6)
    for name in "abcdef":
        written.put(name)
    written.read("b")
    for name in "uvwxy":
        written.put(name)
    assert written.names == set("buvwxy")
    for name in "12345":
        written.put(name)
    assert "b" not in written.names


def test_blocks_to_be_kept_stay_while_others_go():
    written = Written(8)
    for name in "abcdefgh":
        written.put(name, keep=name in "bdg")
    for number in range(100):
        written.put(f"other {number}")
    assert set("bdg") < written.names


def test_many_reads_of_others_do_not_take_the_chances_of_blocks_to_be_kept():
    written = Written(16)
    for name in "kept":
        written.put(name, keep=True)
    for number in range(200):
        written.put(f"other {number}")
        for name in written.names:
            written.read(name)
    assert set("kept") < written.names


@given(st.integers(1, 40))
def test_new_blocks_find_room_where_all_are_kept(records):
    written = Written(records)
    for number in range(4 * records):
        written.put(f"{number}", keep=True)
        assert f"{number}" in written.names
    assert written.ring.evicted >= records


def test_an_expired_block_has_no_second_chance():
    written = Written(4)
    for name in "abcd":
        written.put(name, expires=10.0, keep=True)
    written.put("e", now=10.0)
    assert "a" not in written.names


def test_a_record_that_is_written_or_erased_is_nobody_elses():
    ring = Ring(2)
    taken = [ring.take(1.0, lambda: 0) for _ in range(3)]
    assert taken == [0, 1, None]
    ring.release(1)
    assert ring.take(1.0, lambda: 0) == 1
    ring.settle(Entry(b"a", 0, 1, 0.0, False))
    entry = ring.find(b"a", 1.0)
    assert ring.drop(entry) and not ring.drop(entry)
    assert ring.take(1.0, lambda: 0) is None
    ring.release(0)
    assert ring.take(1.0, lambda: 0) == 0


def test_the_ring_is_as_long_as_there_is_room():
    ring = Ring(0)
    assert ring.take(1.0, lambda: 0) is None
    room = iter([2, 0, 3])
    taken = []
    for _ in range(6):
        record = ring.take(1.0, lambda: next(room, 0))
        ring.release(record)
        taken.append(record)
    assert taken == [0, 1, 0, 1, 2, 3]


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_of_two_records_of_one_block_the_later_counts_after_a_start(order):
    ring = Ring(4)
    for sequence in order:
        ring.restore(Entry(b"a", sequence, sequence, 0.0, False))
    assert ring.find(b"a", 1.0).record == 2
    assert ring.resume() == 2
    assert ring.take(1.0, lambda: 0) == 3


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 20), st.sampled_from(["put", "keep", "read", "drop"]))),
)
def test_no_more_blocks_than_records_and_the_last_put_is_there(records, actions):
    written = Written(records)
    for name, action in actions:
        if action in ("put", "keep"):
            written.put(str(name), keep=action == "keep")
            assert str(name) in written.names
        elif str(name) in written.names:
            if action == "read":
                written.read(str(name))
            else:
                entry = written.ring.find(str(name).encode(), 1.0)
                written.ring.drop(entry)
                written.ring.release(entry.record)
        assert len(written.names) == len(written.ring) <= records
        used = [written.ring.find(name.encode(), 1.0).record for name in written.names]
        assert len(set(used)) == len(used)


def test_locked_blocks_stay_though_they_expire_until_they_are_unlocked():
    written = Written(8)
    for name in "abcdefgh":
        written.put(name, expires=2.0)
    written.ring.locks.add(b"b")
    for number in range(100):
        written.put(f"other {number}", now=3.0)
    assert "b" in written.names and written.ring.find(b"b", 3.0) is not None
    written.ring.locks.discard(b"b")
    assert written.ring.find(b"b", 3.0) is None


def test_a_ring_of_locked_blocks_still_takes_others():
    written = Written(4)
    for name in "abcd":
        written.ring.locks.add(name.encode())
        written.put(name)
    written.put("other")
    assert "other" in written.names
