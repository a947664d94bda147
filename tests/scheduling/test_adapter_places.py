"""The places for adapters: least recently used ones are given away, none that is in use, and no
adapter waits for ever."""

from __future__ import annotations

import pytest

from jaxserve.scheduling.adapter_places import AdapterPlaces
from jaxserve.settings.schema import SchedulerConfig
from tests.scheduling.fakes import ADAPTERS, Replica


def places(count: int) -> AdapterPlaces:
    found = AdapterPlaces(count, 8)
    found.numbers |= {name: number for number, name in enumerate("abcd", 1)}
    return found


def take(table: AdapterPlaces, slot: int, name: str) -> list[list[int]]:
    assert table.may(name)
    table.take(slot, name)
    table.check()
    return table.take_loads().tolist()


def test_the_place_used_least_recently_is_given_away():
    table = places(2)
    assert take(table, 0, "a") == [[0, 1]]
    assert take(table, 1, "b") == [[1, 2]]
    table.release(0)
    table.release(1)
    assert take(table, 0, "a") == []
    table.release(0)
    assert take(table, 0, "c") == [[1, 3]]
    assert sorted(table.resident) == ["a", "c"]
    assert table.loaded == 3


def test_an_adapter_in_use_keeps_its_place():
    table = places(1)
    take(table, 0, "a")
    take(table, 1, "a")
    assert not table.may("b")
    table.release(0)
    table.begin()
    assert not table.may("b")
    table.release(1)
    table.begin()
    assert take(table, 2, "b") == [[0, 2]]
    with pytest.raises(AssertionError, match="sequences run with adapter b"):
        table.forget("b")


def test_those_behind_one_that_finds_no_place_do_not_join_the_place_that_it_will_have():
    table = places(2)
    for slot, name in enumerate("aab"):
        take(table, slot, name)
    table.begin()
    assert table.may("b")  # before it in the order
    assert not table.may("c")
    assert not table.may("b") and table.may("a") and table.may("")
    table.begin()
    assert table.may("b")


def test_the_adapter_used_least_recently_leaves_host_memory():
    table = places(4)
    table.most_held = 4
    for slot, name in enumerate("ab"):
        take(table, slot, name)
    table.begin()
    assert table.hold("e", 5) == [3]  # that of c, which was never used
    assert table.hold("f", 6) == [4]
    assert table.hold("g", 7) == [1]
    assert list(table.resident) == ["a", "b"]
    table.begin()
    assert table.may("a") and not table.may("c")
    assert table.take_missing() == "c"
    assert not table.take_missing()
    table.begin()
    assert not table.may("c")
    assert table.hold("c", 8) == [2]
    assert not table.take_missing()  # it was read meanwhile
    table.begin()
    assert table.may("c") and not table.take_missing()


def test_an_adapter_that_comes_to_a_place_next_stays_in_host_memory():
    table = places(1)
    table.most_held = 4
    table.take(0, "a")
    assert [table.hold(name, 9)[0] for name in "xyz"] == [2, 3, 4]
    assert table.hold("a2", 9) == [9]
    assert table.take_loads().tolist() == [[0, 1]]


def test_one_adapter_is_read_at_a_time_and_in_place_of_none_that_is_waited_with():
    """Else two sequences would have their adapters read in turn, and neither would run."""
    table = places(2)
    table.most_held = 4
    for name in "cd":
        table.hold(name + "2", 9)
    assert [name for name, number in table.numbers.items() if number is None] == ["a", "b"]
    table.most_held = 2
    table.begin()
    assert table.may("c2") and not table.may("b") and not table.may("a")
    assert table.take_missing() == "b"  # the first in the order
    table.begin()
    assert table.may("c2") and table.may("d2") and table.may("c") and table.may("d")
    assert not table.may("a") and not table.take_missing()  # there is no room for it


def test_no_adapter_waits_for_ever_behind_a_stream_for_others():
    """Also where the others' place never runs empty by itself."""
    replica = Replica(SchedulerConfig(max_seqs=2, chunk_tokens=8, max_loras=1, max_queue=100))
    first, other = ADAPTERS[:2]
    add = lambda adapter, tokens: replica.add([3, 4, 5], adapter=adapter, max_tokens=tokens)
    add(first, 5)
    waits = add(other, 2)
    for _ in range(30):
        add(first, 4)
        replica.start()
        while replica.flight:
            replica.finish()
    assert any(type(event).__name__ == "Finished" for event in replica.heard[waits])
