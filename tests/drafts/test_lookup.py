"""The lookup proposes what followed the last tokens at the latest of the longest matches."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.drafts import lookup
from jaxserve.drafts.lookup import GRADES, Lookup

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def proposal(prompt, output=(), count: int = 4):
    found = Lookup(np.array(prompt, np.int32), list(output)).propose(count)
    return found.tokens.tolist(), found.grade


def best(known: list[int]) -> tuple[int, int]:
    """Tokens that match, `GRADES` at most, and the latest place with as many; by trying all."""
    matches = []
    for place in range(len(known) - 1):
        length = 0
        while length <= place and known[place - length] == known[-1 - length]:
            length += 1
        matches.append((min(length, GRADES), place))
    return max(matches, default=(0, 0))


def test_what_followed_the_last_tokens_is_proposed():
    assert proposal([7, 1, 2, 3, 4, 5, 6, 9], [1, 2], 3) == ([3, 4, 5], 2)


def test_a_longer_match_is_better_than_a_later_one():
    assert proposal([1, 2, 3, 4, 0, 9, 3, 8, 1, 2], [3], 1) == ([4], 3)
    assert proposal([1, 2, 5, 9, 1, 2, 6, 8], [1, 2], 1) == ([6], 2)


def test_a_token_that_never_came_before_has_no_proposal():
    assert proposal([1, 2, 3])[0] == []
    assert proposal([1])[0] == []


def test_what_repeats_itself_goes_round():
    assert proposal([5, 8, 9, 8, 9], count=5) == ([8, 9, 8, 9, 8], 2)
    assert proposal([4, 4], count=3) == ([4, 4, 4], 1)


def test_matches_count_to_the_highest_grade():
    assert proposal(list(range(30)) + list(range(29)), count=2) == ([29, 0], GRADES)


def test_only_the_last_tokens_are_searched(monkeypatch):
    monkeypatch.setattr(lookup, "WINDOW", 6)
    assert proposal([1, 2, 3, 4, 5, 6, 7, 1])[0] == []
    assert proposal([9, 9, 1, 2, 3, 1], count=1)[0] == [2]


@given(TOKENS, TOKENS, st.integers(1, 9))
def test_any_proposal_is_that_of_a_slow_search(prompt, output, count):
    """Also where output comes between proposals, as in an engine."""
    came: list[int] = []
    search = Lookup(np.array(prompt, np.int32), came)
    for token in output:
        came.append(token)
        found = search.propose(count)
        known = prompt + came
        grade, place = best(known)
        if not grade:
            assert not len(found.tokens)
            continue
        follows = known[place + 1 :]
        assert found.tokens.tolist() == [follows[n % len(follows)] for n in range(count)]
        assert found.grade == grade
