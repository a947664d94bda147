"""The improvement rate follows the arrival rate: by hand."""

from __future__ import annotations

import pytest

from jaxserve.lanes.improvement import ImprovementRate
from jaxserve.settings.schema import ConfigError

TABLE = {0.5: 0.1, 1.0: 0.3, 5.0: 0.7}


def test_it_is_looked_up_at_intervals():
    """One request per second, then four: the first look-up after the change still sees mostly the
    old rate."""
    rate = ImprovementRate(TABLE, window=20.0, every=10.0)
    found = {second: rate.arrived(float(second)) for second in range(40)}
    assert found[0] == found[9] == 0.1, "the lowest load's until there is something to count"
    assert {found[second] for second in range(10, 40)} == {0.3}
    fast = {second: rate.arrived(second) for second in (40 + n / 4 for n in range(100))}
    assert fast[40.0] == 0.3 and fast[49.75] == 0.3, "one per second when it was looked up at 40 s"
    assert fast[50.0] == 0.3 and fast[60.0] == 0.7, "2.5 per second over the last 20 s, then 4"


def test_a_start_at_a_late_clock_second_is_a_start():
    rate = ImprovementRate(TABLE, window=20.0, every=10.0)
    assert [rate.arrived(1e6 + n) for n in range(12)] == [0.1] * 10 + [0.3] * 2
    assert ImprovementRate(TABLE, load=4.0).arrived(1e6) == 0.7


@pytest.mark.parametrize(
    "arguments, said",
    [
        (({},), "table"),
        (({1.0: 1.0},), "table"),
        (({-1.0: 0.1},), "table"),
        ((TABLE, 0.0, 0.0), "window"),
        ((TABLE, 0.0, 1.0, -1.0), "every"),
    ],
)
def test_what_is_wrong_is_named(arguments, said):
    with pytest.raises(ConfigError, match=said):
        ImprovementRate(*arguments)
