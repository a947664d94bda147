"""Rates are learnt by source and plane; what is newer and larger counts more."""

from __future__ import annotations

import pytest

from jaxserve.transfer import rates as module
from jaxserve.transfer.rates import Rates

LARGE = 8 << 20


def test_a_rate_is_bytes_over_seconds_of_its_source_and_plane():
    rates = Rates()
    rates.learn("a:1", "tcp", 3000, 1.0)
    rates.learn("a:1", "tcp", 1000, 1.0)
    rates.learn("a:1", "fast", 1000, 0.001)
    assert rates.of("a:1", "tcp") == pytest.approx(2000, rel=1e-3)
    assert rates.of("a:1", "fast") == pytest.approx(1e6)
    assert rates.of("b:1", "tcp") == 0.0


def test_small_groups_change_little_of_what_large_ones_taught():
    rates = Rates()
    for _ in range(10):
        rates.learn("a:1", "tcp", LARGE, LARGE / 1e9)
    for _ in range(20):
        rates.learn("a:1", "tcp", 1000, 1e-3)  # a thousandth of the rate
    assert 0.6e9 < rates.of("a:1", "tcp") < 1e9


def test_a_link_that_has_become_slow_is_known_after_some_bytes():
    rates = Rates()
    for _ in range(100):
        rates.learn("a:1", "tcp", LARGE, LARGE / 1e9)
    for _ in range(32):  # 256 MiB
        rates.learn("a:1", "tcp", LARGE, LARGE / 1e8)
    assert rates.of("a:1", "tcp") == pytest.approx(1e8, rel=0.1)


def test_sources_beyond_the_limit_take_no_memory(monkeypatch):
    monkeypatch.setattr(module, "MAX_KEYS", 1)
    rates = Rates()
    rates.learn("a:1", "tcp", 1000, 1.0)
    rates.learn("b:1", "tcp", 1000, 1.0)
    assert rates.of("a:1", "tcp") and not rates.of("b:1", "tcp")
