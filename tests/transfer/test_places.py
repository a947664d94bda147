"""Places for transfers: a bounded number at one time, the one that is due first before others."""

from __future__ import annotations

import random

from jaxserve.transfer import Places


def given(places: list) -> list[int]:
    return [number for number, place in enumerate(places) if place.given.is_set()]


def test_places_go_to_those_that_are_due_first():
    places = Places(2)
    asked = [places.ask(due) for due in (5.0, 9.0, 3.0, float("inf"), 1.0)]
    assert given(asked) == [0, 1] and (places.taken, places.waiting) == (2, 3)
    for leaving, follows in ((0, 4), (1, 2), (4, 3)):
        asked[leaving].leave()
        assert asked[follows].given.is_set()
    assert (places.taken, places.waiting) == (2, 0)


def test_of_equal_ones_the_first_to_ask_is_first():
    places = Places(1)
    asked = [places.ask(7.0) for _ in range(3)]
    asked[0].leave()
    assert given(asked) == [0, 1]


def test_who_leaves_while_waiting_is_passed_over():
    places = Places(1)
    first, second, third = (places.ask(due) for due in (1.0, 2.0, 3.0))
    second.leave()
    first.leave()
    first.leave()  # a second time, which changes nothing
    assert third.given.is_set() and not second.given.is_set()
    third.leave()
    assert (places.taken, places.waiting) == (0, 0)


def test_a_thousand_come_and_go_and_nothing_is_left():
    dice = random.Random(3)
    places = Places(16)
    open_ones = [places.ask(dice.random()) for _ in range(1000)]
    while open_ones:
        assert places.taken == min(16, len(open_ones))
        open_ones.pop(dice.randrange(len(open_ones))).leave()
    assert (places.taken, places.waiting) == (0, 0)
