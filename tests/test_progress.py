import logging

import pytest

from jaxserve import progress


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def lines(caplog, clock, total, seconds):
    """Returns the lines logged while steps end that take `seconds` each."""
    caplog.set_level(logging.INFO, "jaxserve")
    with progress.progress_bar("compiling programs", total, show=False) as step:
        for each in seconds:
            clock[0] += each
            step("a program")
    return [record.message for record in caplog.records]


def test_without_a_terminal_the_log_tells_now_and_then_how_far_it_is(caplog, clock):
    assert lines(caplog, clock, 6, [5, 1, 1, 5, 1, 1]) == [
        "compiling programs: 0 of 6",
        "compiling programs: 4 of 6, about 6 s left",
        "compiling programs: all 6 in 14 s",
    ]


def test_where_nobody_knows_how_many_there_are_the_log_only_counts(caplog, clock):
    assert lines(caplog, clock, None, [4, 4, 4]) == ["compiling programs: 3"]
