"""Listeners of a cache know what the tiers below its devices hold."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.cache import tier_events
from jaxserve.cache.block_events import BlockEvents, Medium, StoredBlocks
from jaxserve.cache.hashes import FIRST_PART, group_key
from jaxserve.cache.tier_events import TIERS, TierEvents
from tests.examples import examples

NAMES = [FIRST_PART + number.to_bytes(16, "little") for number in range(6)]


class Picture:
    """The blocks of each medium as a listener knows them; no event comes twice."""

    def __init__(self) -> None:
        self.on: dict[Medium, set[bytes]] = {medium: set() for medium in Medium}
        self.heard = 0

    def stored(self, blocks: StoredBlocks) -> None:
        assert not self.on[blocks.medium] & set(blocks.keys), "stored twice"
        self.on[blocks.medium].update(blocks.keys)
        self.heard += 1

    def removed(self, keys: Sequence[bytes], medium: Medium) -> None:
        assert set(keys) <= self.on[medium], "removed what was not there"
        self.on[medium].difference_update(keys)
        self.heard += 1

    def cleared(self, medium: Medium) -> None:
        self.on[medium].clear()
        self.heard += 1


class Tiers:
    """Two sets of blocks, and a listener."""

    def __init__(self, listens: bool = True):
        self.on: dict[Medium, set[bytes]] = {tier: set() for tier in TIERS}
        self.told = TierEvents(lambda tier: self.on[tier])
        self.events = BlockEvents(self.told.present)
        self.pictures: list[Picture] = []
        if listens:
            self.listen()

    def listen(self) -> None:
        self.pictures.append(Picture())
        self.events.subscribe(self.pictures[-1])

    def change(self, tier: Medium, key: bytes, there: bool, noted: bool = True) -> None:
        (self.on[tier].add if there else self.on[tier].discard)(key)
        if noted:
            self.told.changed(tier, key, there)

    def tell(self) -> None:
        self.told.tell(self.events)

    def check(self) -> None:
        for picture in self.pictures:
            assert all(picture.on[tier] == self.on[tier] for tier in TIERS)


ACTIONS = st.tuples(
    st.sampled_from(["come", "go", "coming", "lost", "tell", "listen", "leave"]),
    st.sampled_from(TIERS),
    st.sampled_from(NAMES),
)


@settings(max_examples=examples(200))
@given(st.lists(ACTIONS, max_size=60), st.integers(1, 6))
def test_whatever_happens_all_listeners_know_what_is_there_once_it_was_told(actions, limit):
    before = tier_events.MAX_WAITING
    tier_events.MAX_WAITING = limit
    try:
        tiers = Tiers(listens=False)
        for what, tier, key in actions:
            match what:
                case "come" | "go":
                    tiers.change(tier, key, what == "come")
                case "coming":  # comes later, or never
                    tiers.told.coming(key, tiers.events)
                    tiers.told.changed(Medium.HOST, key, key in tiers.on[Medium.HOST])
                case "lost":
                    tiers.change(tier, key, key not in tiers.on[tier], noted=False)
                    tiers.told.recheck()
                case "tell":
                    tiers.tell()
                    tiers.check()
                case "listen":
                    tiers.listen()
                case "leave" if tiers.pictures:
                    tiers.events.unsubscribe(tiers.pictures.pop(0))
        tiers.tell()
        tiers.check()
    finally:
        tier_events.MAX_WAITING = before


def test_what_moves_to_another_tier_is_there_before_it_is_gone():
    tiers = Tiers()
    tiers.change(Medium.HOST, NAMES[0], True)
    tiers.tell()
    heard = []
    tiers.pictures[0].stored = lambda blocks: heard.append(("stored", blocks.medium))
    tiers.pictures[0].removed = lambda keys, medium: heard.append(("removed", medium))
    tiers.change(Medium.HOST, NAMES[0], False)
    tiers.change(Medium.DISK, NAMES[0], True)
    tiers.tell()
    assert heard == [("stored", Medium.DISK), ("removed", Medium.HOST)]


def test_blocks_that_change_together_are_told_of_together():
    tiers = Tiers()
    for key in NAMES:
        tiers.change(Medium.DISK, key, True)
    tiers.tell()
    tiers.tell()
    assert tiers.pictures[0].heard == 1


def test_where_nobody_listens_nothing_is_kept():
    tiers = Tiers(listens=False)
    tiers.change(Medium.HOST, NAMES[0], True)
    tiers.tell()
    assert not tiers.told._waiting
    tiers.listen()
    tiers.check()
    tiers.events.unsubscribe(tiers.pictures.pop())
    tiers.tell()
    tiers.change(Medium.HOST, NAMES[1], True)
    assert not tiers.told._waiting


def test_listeners_hear_of_blocks_alone_and_not_of_pages_beside_them():
    tiers = Tiers()
    beside = [group_key(key, 1) for key in NAMES]
    for key in [*beside, NAMES[0], *beside]:
        tiers.change(Medium.DISK, key, True)
    tiers.tell()
    tiers.listen()
    assert [picture.on[Medium.DISK] for picture in tiers.pictures] == [{NAMES[0]}] * 2
    for key in beside:
        tiers.change(Medium.DISK, key, False)
    tiers.tell()
    assert [picture.heard for picture in tiers.pictures] == [1, 1]
