"""What came from other replicas is counted by its source and plane."""

from __future__ import annotations

from jaxserve.store import tally as module
from jaxserve.store.peers import Route
from jaxserve.store.tally import PeerFetches

TCP = Route("tcp", 1e9)


def test_blocks_that_came_and_seconds_of_all_are_counted_by_source():
    fetches = PeerFetches()
    for source, came, seconds in (("a:1", True, 0.5), ("b:2", True, 1.0), ("a:1", False, 2.0)):
        fetches.add(source, TCP, came, seconds)
    assert [(one.source, one.blocks, one.missed, one.seconds) for one in fetches.all()] == [
        ("b:2", 1, 0, 1.0),
        ("a:1", 1, 1, 2.5),
    ]


def test_planes_of_a_source_are_counted_apart_and_the_last_one_is_at_the_end():
    fetches = PeerFetches()
    for route in (TCP, Route("fast", 5e9), TCP._replace(bytes_per_s=2e9)):
        fetches.add("a:1", route, True, 0.5)
    assert [(one.plane, one.blocks, one.bytes_per_s) for one in fetches.all()] == [
        ("fast", 1, 5e9),
        ("tcp", 2, 2e9),
    ]


def test_sources_beyond_the_limit_take_no_memory(monkeypatch):
    monkeypatch.setattr(module, "MAX_SOURCES", 2)
    fetches = PeerFetches()
    for source in ("a:1", "b:2", "c:3", "a:1"):
        fetches.add(source, TCP, True, 0.0)
    assert [(one.source, one.blocks) for one in fetches.all()] == [("b:2", 1), ("a:1", 2)]
