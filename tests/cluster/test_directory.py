"""The directory finds how much of a prompt each replica has, as a plain list of its blocks would
say, and forgets what it is told is gone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.cache.block_events import Medium
from jaxserve.cluster.directory import Directory

MEMBERS = 5
BLOCKS = 40


class Keys:
    """A chain of keys that counts how many were asked for."""

    def __init__(self, name: str):
        self.name = name
        self.asked: set[int] = set()

    def __getitem__(self, block: int) -> bytes:
        self.asked.add(block)
        return f"{self.name}{block}".encode()

    def first(self, count: int) -> list[bytes]:
        return [self[block] for block in range(count)]


@given(st.lists(st.integers(0, BLOCKS), min_size=MEMBERS, max_size=MEMBERS), st.integers(0, BLOCKS))
def test_depths_are_those_of_each_member(depths, asked):
    directory = Directory()
    chain = Keys("a")
    for member, depth in enumerate(depths):
        directory.stored(member, chain.first(depth), Medium.HOST if member % 2 else Medium.DEVICE)
    found = directory.prefix_blocks(chain, asked, MEMBERS)
    assert found == [min(depth, asked) for depth in depths]


def test_few_keys_of_a_long_chain_are_asked_for():
    directory = Directory()
    chain = Keys("a")
    directory.stored(0, chain.first(100))
    chain.asked.clear()
    assert directory.prefix_blocks(chain, 100_000, 1) == [100]
    assert max(chain.asked) < 200 and len(chain.asked) < 20


change = st.tuples(
    st.sampled_from(["stored", "removed", "cleared"]),
    st.integers(0, MEMBERS - 1),
    st.sampled_from([Medium.DEVICE, Medium.HOST]),
    st.sets(st.integers(0, 9)),
)


@given(st.lists(change, max_size=30))
def test_holders_are_those_that_were_told(changes):
    directory = Directory()
    held: dict[tuple[int, Medium], set[bytes]] = {}
    for kind, member, medium, numbers in changes:
        keys = {bytes([number]) for number in numbers}
        mine = held.setdefault((member, medium), set())
        if kind == "cleared":
            directory.cleared(member)
            for place in held:
                if place[0] == member:
                    held[place] = set()
            continue
        getattr(directory, kind)(member, keys, medium)
        held[member, medium] = mine | keys if kind == "stored" else mine - keys
    for number in range(10):
        key = bytes([number])
        members = {member for (member, _), keys in held.items() if key in keys}
        assert directory.holders(key) == sum(1 << member for member in members)
    for member in range(MEMBERS):
        count = sum(len(keys) for (holder, _), keys in held.items() if holder == member)
        assert directory.count(member) == count
    if not any(held.values()):
        assert len(directory) == 0


def test_a_member_that_left_holds_nothing_and_its_number_can_be_used_again():
    directory = Directory()
    chain = Keys("a")
    directory.stored(0, chain.first(8))
    directory.stored(1, chain.first(4))
    directory.cleared(0)
    assert directory.prefix_blocks(chain, 8, 2) == [0, 4]
    directory.stored(0, chain.first(2))
    assert directory.prefix_blocks(chain, 8, 2) == [2, 4]
