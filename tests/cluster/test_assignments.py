"""The work that was routed to a member: its queue, and what will decode."""

from __future__ import annotations

import pytest

from jaxserve.cluster.assignments import Assignments


def test_a_queue_is_what_was_routed_less_what_was_done():
    member = Assignments()
    assert member.queue(5.0) == 0
    member.begin_prefill("a", 4.0, 10.0)
    member.begin_prefill("b", 2.0, 11.0)
    assert member.queue(11.0) == pytest.approx(5.0)
    assert member.queue(99.0) == pytest.approx(2.0), "no head takes longer than predicted"
    member.end_prefill("a", 14.0)
    assert member.queue(15.0) == pytest.approx(1.0)
    member.end_prefill("unknown", 15.0)
    member.end_prefill("b", 16.0)
    assert member.queue(16.0) == 0 and member.prefills == 0


def test_each_prompt_of_a_queue_has_a_predicted_end():
    member = Assignments()
    assert member.prefill_ends(5.0) == {}
    member.begin_prefill("a", 4.0, 10.0)
    member.begin_prefill("b", 2.0, 11.0)
    assert member.prefill_ends(11.0) == pytest.approx({"a": 3.0, "b": 5.0})
    assert member.prefill_ends(99.0) == pytest.approx({"a": 0.0, "b": 2.0})


def test_promised_tokens_are_those_under_way():
    member = Assignments()
    member.expect_decode("a", 100, 1.0)
    member.expect_decode("b", 50, 1.0)
    member.begin_decode("a", 2.0)
    assert (member.promised, member.decodes) == (50, 1)
    member.end_decode("a")
    member.end_decode("b")
    assert (member.promised, member.decodes) == (0, 0)
