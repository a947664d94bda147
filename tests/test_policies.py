"""The order of prefill: policies on requests worked by hand, and the line in which they wait."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.policies import LAST, PATIENCE, POLICIES, PromptView, relative_slack
from jaxserve.scheduling.waiting_queue import WaitingQueue, smallest_first
from jaxserve.settings.options import options_of
from jaxserve.settings.schema import SchedulerConfig
from tests.examples import examples

# At second 10. `early` came first; `tight` is due first; `large` has least seconds left, `pressed`
# the least share of what it was given.
NAMES = ("early", "tight", "large", "pressed")
ARRIVAL, DUE, WORK = np.array(
    [[0.0, 90.0, 8.0], [9.0, 12.0, 0.5], [8.0, 18.0, 7.0], [2.0, 32.0, 20.0]]
).T
SECONDS = st.floats(0.001, 1000)


def order(policy: str, now: float = 10.0) -> list[str]:
    view = PromptView(now, ARRIVAL, DUE, WORK)
    return [NAMES[index] for index in smallest_first(POLICIES[policy].rank(view))]


def slack(now: float, arrival: np.ndarray, due: np.ndarray, work: np.ndarray) -> np.ndarray:
    return POLICIES["slack"].rank(PromptView(now, arrival, due, work))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fcfs", ["early", "pressed", "large", "tight"]),
        ("edf", ["tight", "large", "pressed", "early"]),
        ("llf", ["large", "tight", "pressed", "early"]),
        ("relative-slack", ["pressed", "large", "tight", "early"]),
        ("slack", ["pressed", "large", "tight", "early"]),
    ],
)
def test_each_policy_puts_another_first(policy, expected):
    assert order(policy) == expected


def test_slack_in_seconds_and_as_a_share_by_hand():
    view = PromptView(10, ARRIVAL, DUE, WORK)
    assert POLICIES["llf"].rank(view).tolist() == [72, 1.5, 1, 2]
    assert relative_slack(10, ARRIVAL, DUE, WORK).tolist() == pytest.approx(
        [72 / 90, 1.5 / 3, 1 / 10, 2 / 30]
    )


def test_all_policies_have_a_choice_in_the_settings():
    assert set(options_of(SchedulerConfig)["policy"].choices) == set(POLICIES)


@settings(deadline=None)
@given(given_=SECONDS, used=st.floats(0, 1), work=st.floats(0, 1), factor=st.floats(0.01, 100))
def test_a_long_request_and_a_short_one_of_the_same_shape_press_alike(given_, used, work, factor):
    """Relative slack has no unit: all times of a request made longer by a factor give the same
    key."""
    small, large = (
        slack(used * size, np.zeros(1), np.array([size]), np.array([work * size]))[0]
        for size in (given_, given_ * factor)
    )
    assert small == pytest.approx(large, rel=1e-6, abs=1e-6) or abs(used + work - 1) < 1e-6


def test_late_prompts_make_way_under_slack_and_go_first_under_relative_slack():
    view = PromptView(
        10.0, np.array([0.0, 9.0, 0.0]), np.array([11.0, 12.0, 30.0]), np.array([2.0, 1.0, 1.0])
    )
    assert POLICIES["relative-slack"].rank(view).tolist() == [-1 / 11, 1 / 3, 19 / 30]
    for name, order in (("slack", [1, 2, 0]), ("relative-slack", [0, 1, 2])):
        policy = POLICIES[name]
        assert np.argsort(policy.rank(view)).tolist() == order
        assert np.argsort(policy.forecast(view)).tolist() == order
    assert (POLICIES["slack"].forecast(view) >= LAST / 2).tolist() == [True, False, False]


def test_a_view_may_lack_what_its_caller_does_not_know():
    view = PromptView(10.0, np.zeros(3), np.full(3, 20.0), np.array([1.0, 2.0, 3.0]))
    assert view.at(np.array([2, 0])).work.tolist() == [3.0, 1.0]


def late(need: float) -> np.ndarray:
    """Keys of a request that needs `need` times its 10 seconds, and of one that has just come and
    can be in time."""
    return slack(5.0, np.array([0.0, 5.0]), np.array([10.0, 6.0]), np.array([10 * need - 5, 0.9]))


@settings(deadline=None)
@given(st.floats(1.001, PATIENCE - 0.001))
def test_one_that_is_too_late_is_behind_those_that_can_be_in_time(need):
    too_late, fresh = late(need)
    assert too_late > fresh


@settings(deadline=None)
@given(st.floats(PATIENCE + 0.001, 1000))
def test_one_that_has_waited_beyond_patience_goes_first(need):
    too_late, fresh = late(need)
    assert too_late < 0 <= fresh


def test_beyond_patience_the_one_that_has_waited_most_goes_first():
    keys = slack(
        100.0, np.array([0.0, 50.0, 0.0]), np.array([1.0, 51.0, 200.0]), np.array([1.0, 1.0, 1.0])
    )
    assert list(smallest_first(keys)) == [0, 1, 2]


@settings(deadline=None)
@given(arrival=st.floats(0, 100), given_=SECONDS, work=SECONDS)
def test_whoever_waits_goes_first_in_the_end(arrival, given_, work):
    """Whatever the work and the deadline, there is a moment from which on the key is below that of
    any request in time."""
    after = arrival + PATIENCE * given_ * np.linspace(1.001, 3, 5)
    assert all(
        slack(now, np.array([arrival]), np.array([arrival + given_]), np.array([work]))[0] < 0
        for now in after
    )


# --- the line


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from([-1.0, 0.0, 0.5, 0.5, 2.0, float("inf")]) | st.floats(-3, 3), max_size=200
    ),
    st.integers(1, 40),
)
def test_the_ranking_is_a_stable_sort(keys, few):
    assert (
        list(smallest_first(np.array(keys), few))
        == np.argsort(np.array(keys), kind="stable").tolist()
    )


def test_asking_for_the_first_few_sorts_only_these(monkeypatch):
    sorted_ = []
    key = np.random.default_rng(0).permutation(10_000).astype(float)
    argsort = np.argsort
    monkeypatch.setattr(
        np, "argsort", lambda values, **how: sorted_.append(len(values)) or argsort(values, **how)
    )
    found = smallest_first(key, 16)
    assert [key[next(found)] for _ in range(17)] == list(range(17)) and sorted_ == [17]
    assert [key[index] for index in found] == list(range(17, 10_000))


def sequence(number: int) -> SimpleNamespace:
    return SimpleNamespace(
        number=number,
        request=SimpleNamespace(
            arrival=number / 2,
            priority=number % 3,
            slo=SimpleNamespace(class_name=(None, "chat")[number % 2]),
        ),
        ttft_deadline=number * 3.0,
        prefill_len=number + 1,
        prefill_seconds_left=number * 7.0,
        tenant=number % 4,
    )


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(0, 150), max_size=300))
def test_the_line_keeps_the_order_of_age_with_what_a_policy_looks_at(numbers):
    """A number that is not there joins, one that is leaves."""
    line = WaitingQueue()
    there = {}
    for number in numbers:
        if number in there:
            line.remove(there.pop(number))
        else:
            there[number] = sequence(number)
            line.add(there[number])
    waiting = sorted(there)
    assert (
        [found.number for found in line]
        == [line[place].number for place in range(len(line))]
        == waiting
    )
    view = line.view_among(5.0, [sequence(1000)], [sequence(1001)])
    everyone = [1000, *waiting, 1001]
    assert view.now == 5.0
    assert view.arrival.tolist() == [number / 2 for number in everyone]
    assert view.deadline.tolist() == [number * 3.0 for number in everyone]
    assert view.work.tolist() == [number * 7.0 for number in everyone]
    assert view.tokens.tolist() == [number + 1.0 for number in everyone]
    assert view.priority.tolist() == [number % 3 for number in everyone]
    assert view.tenant.tolist() == [number % 4 for number in everyone]
    names = [view.class_names[int(index)] for index in view.class_index]
    assert names == [(None, "chat")[number % 2] for number in everyone]


def test_a_line_grows_beyond_its_first_room():
    line = WaitingQueue()
    for number in reversed(range(1000)):
        line.add(sequence(number))
    assert line.work.tolist() == [7.0 * number for number in range(1000)]
