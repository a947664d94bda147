"""The least size of a segment, with the paper's constants and with those of other models."""

from __future__ import annotations

import dataclasses

import pytest

from jaxserve.lanes.rates import ExchangeRates, LaneLinks, Link
from jaxserve.lanes.segments import least_segment
from jaxserve.lanes.work import Heads

LLAMA2_7B = Heads(32, 32, 128)
# alpha is not printed in the paper: with 2.0 TB/s it is what 4.66 us per layer leave
A100 = ExchangeRates(312e12, 2.0e12, 0.0, *[Link(2.306e-6, 400e9)] * 3)


def test_a_segment_of_the_paper_has_568_tokens_and_takes_4_66_us_a_layer():
    assert least_segment(LLAMA2_7B, A100) == 568
    assert 568 * LLAMA2_7B.kv_bytes / A100.read_bytes_per_s == pytest.approx(4.66e-6, rel=0.002)


def test_kv_that_heads_share_is_read_sooner_so_segments_are_longer():
    """A quarter of the KV heads gives four times the tokens."""
    assert least_segment(Heads(32, 8, 128), A100) == pytest.approx(4 * 568, abs=4)


def test_a_slow_link_takes_longer_segments():
    node = A100.with_links(LaneLinks.alike(Link(17e-6, 50e9)))
    assert least_segment(LLAMA2_7B, node) == pytest.approx(4190, rel=0.01)


def test_where_computing_takes_longer_than_reading_it_decides():
    slow = dataclasses.replace(A100, flops_per_s=1e12)
    assert least_segment(LLAMA2_7B, slow) == pytest.approx(568 / 2, abs=2)


def test_free_attention_and_free_messages_make_no_size():
    inf = float("inf")
    free = ExchangeRates(inf, inf, 0.0, *[Link(0.0, inf)] * 3)
    assert least_segment(LLAMA2_7B, free) == 1
