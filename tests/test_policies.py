"""The order of prefill: policies on requests worked by hand, and the line in which they wait."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.policies import LAST, PATIENCE, POLICIES, PromptView, relative_slack
from jaxserve.scheduling.prefill_line import FADING, PrefillLine
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
@given(given_=SECONDS, used=st.floats(0, 1), part=st.floats(0, 0.999), factor=st.floats(0.01, 100))
def test_a_long_request_and_a_short_one_of_the_same_shape_press_alike(given_, used, part, factor):
    """Relative slack has no unit: all times of a request in time made longer by a factor give the
    same key."""
    work = part * (1 - used)
    small, large = (
        slack(used * size, np.zeros(1), np.array([size]), np.array([work * size]))[0]
        for size in (given_, given_ * factor)
    )
    assert small == pytest.approx(large, rel=1e-6, abs=1e-6) or used + work > 1 - 1e-6


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


def in_line(passed: list[float], late: list[bool], longest: float = 10.0) -> PromptView:
    """Prompts of 2 s of prefill each, of a second to the first token, or of a thousand, since each
    of which so much was prefilled."""
    count = len(passed)
    due = 1 + np.where(late, 0.0, 1000.0)
    return PromptView(
        5.0,
        np.zeros(count),
        due,
        np.full(count, 2.0),
        passed=np.array(passed),
        longest=np.full(count, longest),
    )


def first_to_last(key: np.ndarray) -> list[int]:
    return list(smallest_first(key))


def test_late_prompts_go_by_age_behind_those_in_time():
    view = in_line([3.0, 7.0, 1.0, 5.0], [True, True, False, True])
    assert first_to_last(POLICIES["slack"].rank(view)) == [2, 1, 3, 0]


def test_a_late_prompt_goes_first_when_its_patience_is_needed_for_those_before_it():
    """With a line of 10 s it is to be prefilled before PATIENCE times that, after an older one of
    2 s; the younger one can still be put off."""
    longest = 10.0
    last_call = PATIENCE * longest - 4.0
    for passed, order in ((last_call - 0.1, [3, 0, 1, 2]), (last_call + 0.1, [0, 1, 3, 2])):
        view = in_line([passed + 1, passed, 0.0, 0.0], [True, True, True, False], longest)
        assert first_to_last(POLICIES["slack"].rank(view)) == order


def test_a_late_prompt_is_forecast_before_those_in_time_that_it_cannot_wait_for():
    longest = 10.0
    for passed, last in ((1.0, True), (PATIENCE * longest - 3.0, False)):
        view = in_line([passed, 0.0], [True, False], longest)
        key = POLICIES["slack"].forecast(view)
        assert (key[0] > key[1]) == (key[0] >= LAST / 2) == last


def test_what_others_wait_in_debt_hurries_nobody_of_an_earlier_turn():
    """The second one has used up its patience; where its turn is the same, the first one goes
    before it, and with it."""
    view = in_line([11.0, 10.5, 0.0], [True, True, False])
    view = view._replace(longest=np.array([100.0, 10.0, 100.0]))
    assert first_to_last(POLICIES["slack"].order(view)) == [0, 1, 2]
    view = view._replace(turn=np.array([0, 1, 0]))
    assert first_to_last(POLICIES["slack"].order(view)) == [2, 0, 1]


class OneServer:
    """Prefills a quantum at a time by the policy's rank; its clock counts seconds of prefill."""

    def __init__(self, quantum: float):
        self.quantum = quantum
        self.now = 0.0
        self.line = PrefillLine()
        # of each that waits: when it came, when it is due, and seconds left
        self.prompts: list[list[float]] = []
        self.longest: dict[float, float] = {}  # line while it waits, by when it came

    def come(self, budget: float, work: float) -> float:
        """Returns the line that it finds, with its own work."""
        self.prompts.append([self.now, self.now + budget, work])
        found = sum(left for _, _, left in self.prompts)
        self.line.found(0, found)
        self.longest[self.now] = 0.0
        for came, _, _ in self.prompts:
            self.longest[came] = max(self.longest[came], float(self.line.longest(NO_TENANT)[0]))
        return found

    def run(self, until: float) -> list[tuple[float, float]]:
        """Runs to a clock second; returns when each came that has ended, and when it ended."""
        ended = []
        while self.prompts and self.now < until:
            arrival, due, work = np.array(self.prompts).T
            view = PromptView(
                self.now,
                arrival,
                due,
                work,
                passed=self.now - arrival,
                longest=self.line.longest(np.zeros(len(work), int)),
            )
            place = next(smallest_first(POLICIES["slack"].rank(view)))
            chosen = self.prompts[place]
            seconds = min(self.quantum, chosen[2])
            chosen[2] -= seconds
            self.now += seconds
            self.line.done += seconds
            if chosen[2] <= 1e-9:
                ended.append((self.prompts.pop(place)[0], self.now))
        self.now = max(self.now, until)
        return ended


NO_TENANT = np.zeros(1, int)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 2**32), st.floats(0.5, 3.0), st.floats(0.1, 1.0))
def test_no_prompt_waits_much_longer_than_the_unluckiest_would_by_age(seed, load, stretch):
    """Whatever comes, at up to three times of what can be prefilled: each is done before PATIENCE
    times the longest line was prefilled, or its own line and what its budget let go before it."""
    draw = np.random.default_rng(seed)
    server = OneServer(quantum=0.1)
    bounds = {}
    ended = []
    for _ in range(80):
        ended += server.run(server.now + 0.01 + draw.exponential(1 / load))
        work = draw.lognormal(-0.5, 1.0)
        budget = max(1.0, work) + stretch * work
        bounds[server.now] = server.come(budget, work) + budget
    ended += server.run(np.inf)
    assert len(ended) == 80
    for came, end in ended:
        bound = max(PATIENCE * server.longest[came], bounds[came])
        assert end - came <= bound + 3 * server.quantum


def test_beside_those_in_time_the_late_ones_are_served_too():
    """A stream of prompts that could all be in time, and take all there is."""
    server = OneServer(quantum=0.1)
    for _ in range(10):
        server.come(1.0, 1.0)  # all but one are late
    ended = []
    for _ in range(400):
        server.now += 1e-6  # a name for each
        server.come(2.0, 0.1)
        ended += server.run(server.now + 0.1)
    first = [came for came, _ in ended if came == 0.0]
    assert len(first) == 10


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=2, max_size=12))
def test_of_late_ones_the_older_goes_first(prompts):
    passed, late = (list(column) for column in zip(*prompts))
    view = in_line(passed, late)
    order = first_to_last(POLICIES["slack"].rank(view))
    ages = [passed[place] for place in order if late[place]]
    assert ages == sorted(ages, reverse=True)


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
        came=number / 8,
    )


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(0, 150), max_size=300))
def test_the_line_keeps_the_order_of_age_with_what_a_policy_looks_at(numbers):
    """A number that is not there joins, one that is leaves."""
    line = WaitingQueue()
    for tenant in range(4):
        line.line.joined(tenant)
        line.line.found(tenant, 10.0 + tenant)
    line.line.done = 100.0
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
    assert view.passed.tolist() == [100 - number / 8 for number in everyone]
    assert view.longest.tolist() == [10 + number % 4 - 100 * FADING for number in everyone]
    names = [view.class_names[int(index)] for index in view.class_index]
    assert names == [(None, "chat")[number % 2] for number in everyone]


def test_a_line_grows_beyond_its_first_room():
    line = WaitingQueue()
    for number in reversed(range(1000)):
        line.add(sequence(number))
    assert line.work.tolist() == [7.0 * number for number in range(1000)]
