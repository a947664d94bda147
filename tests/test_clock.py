from __future__ import annotations

import ast
from pathlib import Path

import pytest

from jaxserve.clock import VirtualClock, WallClock

ROOT = Path(__file__).parents[1]


def test_wall_time_goes_forward():
    clock = WallClock()
    assert clock.now() <= clock.now()


def test_virtual_time_moves_when_told_and_never_back():
    clock = VirtualClock(2.0)
    clock.advance(5.5)
    assert clock.now() == 5.5
    with pytest.raises(ValueError, match="forward"):
        clock.advance(5.0)


def test_nothing_that_serves_asks_for_the_date():
    """A step of the system's date must not end requests or hold them up: durations come from
    monotonic clocks."""
    for room in ("engine", "scheduling", "cache", "lab/simulate"):
        for path in (ROOT / "jaxserve" / room).glob("*.py"):
            names = {
                ast.unparse(node)
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Attribute)
            }
            assert not names & {
                "time.time",
                "time.time_ns",
                "datetime.now",
                "datetime.datetime.now",
            }, path
