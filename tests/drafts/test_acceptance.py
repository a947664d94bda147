"""Rates come to be what they are, for all sequences and for one, by grade."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.drafts.acceptance import Acceptance, Judged, rising


def test_chances_fall_with_each_token_and_rise_with_the_grade():
    rates = Acceptance(rising(4))
    for grade in range(1, 5):
        chain = rates.chain(grade, 6)
        assert (np.diff(chain) < 0).all() and 0 < chain[-1] < chain[0] < 1
    assert (rates.chain(3, 4) > rates.chain(1, 4)).all()


def test_rates_are_learnt():
    """Each token is right with a chance of 0.7, and is judged only behind right ones."""
    random = np.random.default_rng(0)
    rates = Acceptance(rising(2))
    for _ in range(3000):
        flips = random.random(3) < 0.7
        right = int(np.argmin(flips)) if not flips.all() else 3
        rates.learn(1, right, min(right + 1, 3), 0.01)
    assert rates.chain(1, 2) == pytest.approx([0.7, 0.49], abs=0.08)


def test_a_sequence_learns_for_itself_and_begins_with_what_is_known():
    everyone = Acceptance(rising(1))
    begun = everyone.chain(1, 1)[0]
    poor = Judged(everyone)
    for number in range(20):
        poor.expect(np.array([1, 2]), 1, number)
        poor.judge([0] * (number + 1))
    assert poor.chain(1, 1)[0] < everyone.chain(1, 1)[0] < begun
    assert Judged(everyone).chain(1, 1) == everyone.chain(1, 1)


def test_low_rates_are_tried_again_by_hopeful_sequences():
    rates = Acceptance(np.full(2, 0.8))
    rates.learn(1, 0, 1, 0.9)
    assert Judged(rates).chain(1, 1)[0] == rates.chain(1, 1)[0] < 0.1
    assert 0.4 < Judged(rates, hopeful=True).chain(1, 1)[0] < 0.5


@pytest.mark.parametrize(
    "came, rates",
    [
        ([], "same"),  # nothing is known yet
        ([1], "up"),
        ([1, 2, 3, 9], "up"),
        ([9, 2, 3], "down"),
    ],
)
def test_tokens_are_judged_as_far_as_they_have_come(came, rates):
    judged = Judged(Acceptance(rising(1)))
    before = judged.chain(1, 1)[0]
    judged.expect(np.array([1, 2, 3]), 1, 2)
    judged.judge([7, 7, *came])
    after = judged.chain(1, 1)[0]
    assert {"same": after == before, "up": after > before, "down": after < before}[rates]
    judged.judge([7, 7, 1, 2, 3])  # once
    assert judged.chain(1, 1)[0] == after
