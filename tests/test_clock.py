from __future__ import annotations

import pytest

from jaxserve.clock import VirtualClock, WallClock


def test_wall_time_goes_forward():
    clock = WallClock()
    assert clock.now() <= clock.now()


def test_virtual_time_moves_when_told_and_never_back():
    clock = VirtualClock(2.0)
    clock.advance(5.5)
    assert clock.now() == 5.5
    with pytest.raises(ValueError, match="forward"):
        clock.advance(5.0)
