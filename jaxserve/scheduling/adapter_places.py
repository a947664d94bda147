"""The places for adapters on the devices: which adapter is in each, and which may come next.

A sequence with an adapter gets a slot only while its adapter is in a place, or a place is free of
running sequences; the one that was used least recently is given away. So nothing that runs ever
waits for an adapter. Where all places are in use, the first sequence in the order of the policy
that finds none has the place with the fewest running sequences emptied for its adapter: those
behind it in the order do not join that place, so no stream of requests for some adapters keeps
another out.

Adapters come to the devices from host memory, which has room for some of those that are known. A
sequence whose adapter is not there waits until it was read: one is read at a time, that of the
first such sequence in the order. Another leaves host memory for it, the one that was used least
recently, but none that a sequence before that one waits with: so those do not take it in turns to
have their adapters read.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequenced

import numpy as np

from jaxserve.api.batch import NO_COPIES
from jaxserve.settings.schema.adapters import MAX_HELD

NONE = -1  # place of rows without an adapter


class AdapterPlaces:
    """The adapters in each of some places, by their identity (see `Request`).

    by_slot [slots] int32: the place of the adapter of each slot's sequence, or NONE. numbers: of
    the adapters that are known, as commands to the devices name them, that used least recently
    first; None: of one that is not in host memory. most_held: adapters that host memory has room
    for. loaded: how many were brought to the devices so far.
    """

    def __init__(self, places: int, slots: int):
        self.by_slot = np.full(slots, NONE, np.int32)
        self.numbers: dict[str, int | None] = {}
        self.most_held = MAX_HELD
        self.loaded = 0
        self._in_place: list[str] = [""] * places
        self._place_of: dict[str, int] = {}
        self._running = [0] * places  # sequences with a slot
        self._used = [0] * places  # when each was last given to a sequence
        self._uses = 0
        self._loads: list[tuple[int, str]] = []
        self._emptied: int | None = None  # in this step, for an adapter that found no place
        # of the sequences that were asked of in this step: their adapters in host memory, and
        # whether one lacks its own
        self._needed: set[str] = set()
        self._lacked = False
        self._missing = ""  # the adapter that is to be read for it

    @property
    def resident(self) -> Sequenced[str]:
        """The identities of the adapters on the devices."""
        return list(self._place_of)

    def begin(self) -> None:
        """Begins a step."""
        self._emptied = None
        self._needed.clear()
        self._lacked = False
        self._missing = ""

    def may(self, identity: str) -> bool:
        """Returns whether a sequence with an adapter may get a slot in this step; with "", of one
        without."""
        if not identity:
            return True
        place = self._place_of.get(identity)
        if place is not None:
            return place != self._emptied
        if self._emptied is not None:  # all places are in use
            return False
        if self.numbers[identity] is None:
            self._lack(identity)
            return False
        self._needed.add(identity)
        if self._free() is not None:
            return True
        self._emptied = int(np.argmin(self._running))
        return False

    def _free(self) -> int | None:
        """Finds the place without running sequences that was used least recently, if any."""
        free = [place for place, running in enumerate(self._running) if not running]
        return min(free, key=lambda place: self._used[place], default=None)

    def _lack(self, identity: str) -> None:
        """Has the adapter of the first sequence that lacks it read, if host memory has room."""
        if self._lacked:
            return
        self._lacked = True
        if self._held() < self.most_held or self._spare() is not None:
            self._missing = identity

    def take_missing(self) -> str:
        """Returns the adapter that is to be read into host memory for a sequence, once; "" for
        none."""
        missing, self._missing = self._missing, ""
        return missing if self.numbers.get(missing) is None else ""

    def _held(self) -> int:
        """Counts the adapters in host memory."""
        return sum(number is not None for number in self.numbers.values())

    def _spare(self) -> str | None:
        """Finds the adapter that leaves host memory next, if any may."""
        kept = self._needed.union(identity for _, identity in self._loads)
        for identity, number in self.numbers.items():
            if number is not None and identity not in kept:
                return identity
        return None

    def hold(self, identity: str, number: int) -> list[int]:
        """Notes that an adapter is in host memory; returns the numbers of those that leave it for
        that, which may be this one."""
        self.numbers.pop(identity, None)
        self.numbers[identity] = number
        left = []
        while self._held() > self.most_held and (spare := self._spare()) is not None:
            left.append(self._number(spare))
            self.numbers[spare] = None
        return left

    def take(self, slot: int, identity: str) -> None:
        """Notes that a sequence, which `may`, has got a slot."""
        if not identity:
            return
        self.numbers[identity] = self.numbers.pop(identity)  # the last one: used most recently
        place = self._place_of.get(identity)
        if place is None:
            place = self._free()
            assert place is not None, f"all places are in use: {self._in_place}"
            self._place_of.pop(self._in_place[place], None)
            self._in_place[place] = identity
            self._place_of[identity] = place
            self._loads.append((place, identity))
            self.loaded += 1
        self._uses += 1
        self._used[place] = self._uses
        self._running[place] += 1
        self.by_slot[slot] = place

    def release(self, slot: int) -> None:
        """Notes that a slot is given back."""
        place = int(self.by_slot[slot])
        if place != NONE:
            self._running[place] -= 1
            self.by_slot[slot] = NONE

    def take_loads(self) -> np.ndarray:
        """Returns what the next step brings to the devices [m, 2]: places, and the numbers of the
        adapters; nothing of it comes again."""
        if not self._loads:
            return NO_COPIES
        loads = [
            (place, self._number(identity))
            for place, identity in self._loads
            if self._in_place[place] == identity  # not forgotten, or given away again, meanwhile
        ]
        self._loads.clear()
        return np.array(loads, np.int32).reshape(-1, 2)

    def _number(self, identity: str) -> int:
        """Returns the number of an adapter in host memory."""
        number = self.numbers[identity]
        assert number is not None, f"adapter {identity} is not in host memory"
        return number

    def forget(self, identity: str) -> None:
        """Forgets an adapter that no sequence has."""
        del self.numbers[identity]
        place = self._place_of.pop(identity, None)
        if place is not None:
            assert not self._running[place], f"sequences run with adapter {identity}"
            self._in_place[place] = ""
            self._used[place] = 0

    def reset(self) -> None:
        """Notes that nothing is on the devices any more; no sequence has a slot."""
        self._in_place = [""] * len(self._in_place)
        self._place_of.clear()
        self._loads.clear()

    def check(self) -> None:
        """Checks the invariants. Errors: AssertionError with what differs."""
        counted = np.bincount(self.by_slot[self.by_slot != NONE], minlength=len(self._running))
        assert counted.tolist() == self._running, f"running {self._running}, counted {counted}"
        resident = [identity for identity in self._in_place if identity]
        places = {identity: place for place, identity in enumerate(self._in_place) if identity}
        assert places == self._place_of, f"{self._in_place}, found {self._place_of}"
        assert len(set(resident)) == len(resident), f"an adapter is in two places: {resident}"
        assert set(resident) <= self.numbers.keys(), f"{resident} are not all known"
        used = [self._in_place[place] for place in np.flatnonzero(counted).tolist()]
        assert all(used), f"sequences run in an empty place: {self._in_place}, {counted}"
