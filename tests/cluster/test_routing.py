"""Algorithm 1 and its baselines choose as they say, on clusters small enough to work out by hand
and on random ones by comparing with every possible choice."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.cluster.routing import (
    ROUTING,
    DecodeView,
    PrefillView,
    RoutingQuery,
    choose_decode,
    freeness,
)


@dataclass
class LinearCosts:
    """A second for each token that is computed, `sent` seconds for each that is sent."""

    sent: float = 0.1

    def prefill(self, member: int, cached: int, total: int) -> float:
        return float(total - cached)

    def transfer(self, source: int, target: int, tokens: int) -> float:
        return self.sent * tokens


def route(name, *views, total=100, sent=0.1, **rest):
    views = [PrefillView(number, *view) for number, view in enumerate(views)]
    return ROUTING[name](RoutingQuery(views, total, LinearCosts(sent), **rest))


def test_the_prefix_is_fetched_where_the_holder_is_busy():
    choice = route("cache_aware", (80, 50.0, 1), (0, 0.0, 0))
    assert choice.member == 1 and choice.prefix == 80
    assert choice.ttft == pytest.approx(8 + 20)
    assert choice.fetch == (0, 0, 80) and choice.fetch.tokens == 80


def test_without_fetching_it_is_waited_for_or_computed():
    assert route("local_cache_aware", (80, 50.0, 1), (0, 0.0, 0)).ttft == 70
    assert route("local_cache_aware", (80, 90.0, 1), (0, 0.0, 0)).member == 1


def test_the_holder_keeps_what_it_can_do_soonest():
    choice = route("cache_aware", (80, 5.0, 1), (0, 0.0, 0))
    assert choice.member == 0 and choice.fetch is None


def test_a_prefix_little_longer_than_the_own_one_is_not_fetched():
    views = (80, 50.0, 1), (70, 0.0, 0)
    assert route("cache_aware", *views, threshold=1.2).fetch is None
    assert route("cache_aware", *views, threshold=1.1).fetch == (0, 70, 80)


def test_nothing_is_fetched_that_is_computed_sooner():
    assert route("cache_aware", (80, 50.0, 1), (0, 0.0, 0), sent=2.0).fetch is None


def test_the_fewest_requests_win_where_load_is_balanced():
    assert route("load_balanced", (90, 0.0, 2), (0, 9.0, 1), (0, 5.0, 1)).member == 2


@pytest.mark.parametrize(("draw", "member"), [(0.0, 0), (0.4, 1), (0.99, 2)])
def test_chance_takes_any(draw, member):
    assert route("random", *[(0, 0.0, 0)] * 3, draw=draw).member == member


view = st.tuples(st.integers(0, 99), st.floats(0, 200), st.integers(0, 5))


@given(st.lists(view, min_size=1, max_size=8), st.floats(0, 2))
def test_least_ttft_of_all_choices_and_never_later_for_being_able_to_fetch(views, sent):
    least = min(queue + 100 - prefix for prefix, queue, _ in views)
    assert route("local_cache_aware", *views, sent=sent).ttft == pytest.approx(least)
    choice = route("cache_aware", *views, sent=sent)
    assert choice.ttft <= least + 1e-9
    best = max(prefix for prefix, *_ in views)
    assert choice.prefix <= best
    if choice.fetch:
        assert views[choice.fetch.source][0] == best == choice.fetch.stop


def test_decoding_goes_to_the_freest_that_is_quick_enough():
    views = [
        DecodeView(0, free=1000, promised=0, active=10, tbt=0.05),  # freeness 100
        DecodeView(1, free=1000, promised=600, active=2, tbt=0.05),  # 200
        DecodeView(2, free=9000, promised=0, active=1, tbt=0.5),  # too slow
        DecodeView(3, free=50, promised=0, active=0, tbt=0.01),  # no room
    ]
    assert freeness(views[1]) == 200
    assert choose_decode(views, 100, tpot=0.1).member == 1
    assert choose_decode(views, 500, tpot=0.1).member == 0
    assert choose_decode(views, 100, tpot=0.001).member in (0, 1)
    assert choose_decode(views, 100_000, tpot=0.1) is None
