"""What came from other replicas is counted by its source."""

from __future__ import annotations

from jaxserve.store import tally as module
from jaxserve.store.tally import PeerFetches


def test_blocks_that_came_and_seconds_of_all_are_counted_by_source():
    fetches = PeerFetches()
    for source, came, seconds in (("a:1", True, 0.5), ("b:2", True, 1.0), ("a:1", False, 2.0)):
        fetches.add(source, came, seconds)
    assert [(one.source, one.blocks, one.missed, one.seconds) for one in fetches.all()] == [
        ("a:1", 1, 1, 2.5),
        ("b:2", 1, 0, 1.0),
    ]


def test_sources_beyond_the_limit_take_no_memory(monkeypatch):
    monkeypatch.setattr(module, "MAX_SOURCES", 2)
    fetches = PeerFetches()
    for source in ("a:1", "b:2", "c:3", "a:1"):
        fetches.add(source, True, 0.0)
    assert [(one.source, one.blocks) for one in fetches.all()] == [("a:1", 2), ("b:2", 1)]
