"""The controller of roles follows the load, in bounded steps, and leaves a steady load alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.cluster.roles import RatioController, RatioLimits, imbalance, trimmed_mean


def test_outliers_do_not_count():
    assert trimmed_mean([1.0] * 8 + [100.0, 0.0]) == 1.0
    assert trimmed_mean([]) == 0.0
    assert imbalance([0.0], [1.0]) == 2.0


def settle(prefill_work, decode_work, replicas, prefill, limits, rounds=60):
    """The numbers of replicas that prefill, round by round, under steady work on both sides."""
    controller = RatioController(limits)
    seen = [prefill]
    for number in range(rounds):
        decode = replicas - prefill
        loads = [prefill_work / prefill] * prefill, [decode_work / decode] * decode
        change = controller.change(*loads, now=number * limits.cooldown)
        assert abs(change) <= limits.step
        prefill -= change
        assert limits.least <= prefill <= replicas - limits.least
        seen.append(prefill)
    return seen


work = st.floats(0, 50)


@given(work, work, st.integers(2, 32), st.data())
def test_a_steady_load_is_followed_one_way_and_then_left_alone(prefill_work, decode_work, n, data):
    limits = RatioLimits(step=data.draw(st.integers(1, 4)), least=1)
    seen = settle(prefill_work, decode_work, n, data.draw(st.integers(1, n - 1)), limits)
    changes = [after - before for before, after in zip(seen, seen[1:]) if after != before]
    assert all(change > 0 for change in changes) or all(change < 0 for change in changes)
    assert seen[-1] == seen[-20], "it does not come to rest"


def test_the_busier_side_gets_replicas():
    limits = RatioLimits(cooldown=10)
    assert settle(2.0, 20.0, 16, 8, limits)[-1] <= 4
    assert settle(20.0, 2.0, 16, 8, limits)[-1] >= 12
    assert settle(8.0, 8.0, 16, 8, limits)[-1] == 8


def test_nothing_changes_twice_within_the_cooldown():
    controller = RatioController(RatioLimits(cooldown=10))
    assert controller.change([0.1] * 4, [4.0] * 4, now=0.0) == 1
    assert controller.change([0.1] * 3, [4.0] * 5, now=9.0) == 0
    assert controller.change([0.1] * 3, [4.0] * 5, now=10.0) == 1


@pytest.mark.parametrize("limits", [{"band": 1.0}, {"margin": 1.0}, {"step": 0}, {"least": 0}])
def test_limits_that_make_no_sense_are_refused(limits):
    with pytest.raises(ValueError, match=next(iter(limits))):
        RatioLimits(**limits)
