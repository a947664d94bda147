"""A block that several processes keep in parts is there where all of them have theirs."""

from __future__ import annotations

import threading
from dataclasses import asdict

import pytest

from jaxserve.cache.block_events import BlockEvents, Medium
from jaxserve.cache.tiers import Fetched, TierCounts
from jaxserve.store.block_part import BlockPart, PartBytes
from jaxserve.store.host_index import LOCKED_SHARE
from jaxserve.store.parts import PartIndex
from tests.cache.test_tier_events import Picture
from tests.store.fakes import key_of
from tests.waiting import SOON

ONE, TWO = key_of(1), key_of(2)
LAYOUT = PartBytes(BlockPart(range(2), range(1)), 100)


class Group:
    """An index of two processes, and what they were asked."""

    def __init__(self) -> None:
        self.asked: list[tuple] = []
        self.index = PartIndex(2, LAYOUT, 8, True, lambda *asked: self.asked.append(asked))
        self.events = BlockEvents(self.index.events.present)
        self.picture = Picture()
        self.events.subscribe(self.picture)

    def say(self, number: int, *changes, settled=(), fetched=(), **counts) -> None:
        """Has a process report. changes: tier, whether blocks came, their keys."""
        self.index.report(
            number,
            {
                "changes": [
                    (tier, came, [key.hex() for key in keys]) for tier, came, keys in changes
                ],
                "settled": [key.hex() for key in settled],
                "counts": asdict(TierCounts(**counts)),
                "fetched": [asdict(each) for each in fetched],
                "bandwidths": (100.0 * (number + 1), 10.0),
                "block_bytes": 100,
            },
        )

    def known(self, medium: Medium) -> set[bytes]:
        """Blocks that listeners believe to be on a medium."""
        self.index.events.tell(self.events)
        return set(self.picture.on[medium])


def test_a_block_is_there_once_every_process_has_stored_its_part():
    group = Group()
    assert not group.index.holds(ONE)
    group.index.expect([ONE])
    assert group.index.holds(ONE) and not group.index.settled  # it is on its way everywhere
    group.say(0, ("host", True, [ONE]), settled=[ONE])
    assert group.index.holds(ONE) and not group.known(Medium.HOST)
    group.say(1, ("host", True, [ONE]), settled=[ONE])
    assert group.index.holds(ONE) and group.index.settled
    assert group.known(Medium.HOST) == {ONE}


def test_who_waits_for_a_block_gets_it_once_every_process_has_its_part():
    group = Group()
    group.say(0, ("host", True, [ONE]))
    assert not group.index.wait(ONE, 0.0)
    later = threading.Timer(0.2, lambda: group.say(1, ("host", True, [ONE])))
    later.start()
    assert group.index.wait(ONE, SOON)
    later.join()


def test_a_block_that_one_process_could_not_store_is_there_for_none():
    group = Group()
    group.index.expect([ONE, TWO])
    group.say(0, ("host", True, [ONE, TWO]), settled=[ONE, TWO])
    group.say(1, ("host", True, [TWO]), settled=[ONE, TWO])
    assert not group.index.holds(ONE) and group.index.holds(TWO)
    assert group.known(Medium.HOST) == {TWO}


@pytest.mark.parametrize("loser", [0, 1])
def test_a_block_that_one_process_has_lost_is_lost(loser):
    group = Group()
    for number in range(2):
        group.say(number, ("host", True, [ONE]))
    assert group.known(Medium.HOST) == {ONE}
    group.say(loser, ("host", False, [ONE]))
    assert not group.index.holds(ONE) and not group.known(Medium.HOST)


def test_a_block_is_on_the_slowest_tier_of_its_parts():
    group = Group()
    for number in range(2):
        group.say(number, ("host", True, [ONE]))
    group.say(1, ("disk", True, [ONE]), ("host", False, [ONE]))
    assert group.index.holds(ONE)
    assert group.known(Medium.DISK) == {ONE} and not group.known(Medium.HOST)
    assert group.index.seconds([ONE]) == pytest.approx(100 / 10)
    group.index.prefetch([ONE, TWO])
    assert group.asked == [("prefetch", [ONE], 0)]


def test_after_the_processes_were_lost_nothing_is_there():
    group = Group()
    for number in range(2):
        group.say(number, ("disk", True, [ONE]))
    group.index.expect([TWO])
    group.index.reset()
    assert not group.index.holds(ONE) and not group.index.holds(TWO) and group.index.settled
    assert not group.known(Medium.DISK)


def test_blocks_of_other_replicas_count_where_all_parts_came():
    group = Group()
    group.say(0, fetched=[Fetched("a", "tcp", 5, 0, 1.0, 4e6)], peer_reads=5)
    group.say(
        1,
        fetched=[Fetched("a", "tcp", 3, 2, 0.5, 3e6), Fetched("b", "tcp", 1)],
        wrong=2,
        peer_reads=4,
    )
    assert group.index.fetched() == [Fetched("a", "tcp", 3, 2, 1.0, 6e6), Fetched("b", "tcp", 1)]
    counts = group.index.counts()
    assert (counts.peer_reads, counts.wrong) == (5, 2)


def test_what_is_to_stay_longer_is_asked_of_processes():
    group = Group()
    group.index.keep([ONE], 0)
    group.index.keep([ONE], 60)
    group.index.lock(TWO)
    group.index.unlock(TWO)
    assert group.index.most_locked == 8 // LOCKED_SHARE
    assert group.asked == [("keep", [ONE], 60), ("lock", [TWO], 0), ("unlock", [TWO], 0)]
