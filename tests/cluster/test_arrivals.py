"""Requests that would miss their objectives are refused on arrival, before anybody computes."""

from __future__ import annotations

import pytest

from jaxserve.api.errors import RequestError
from jaxserve.api.request import Slo
from jaxserve.cluster.decode_rate import DecodeRate
from jaxserve.settings.schema import ConfigError
from tests.cluster.fakes import assert_right, make
from tests.waiting import eventually


def refusal(cluster, **fields) -> RequestError:
    with pytest.raises(RequestError) as refused:
        cluster.submit(**fields)
    return refused.value


def slow_decodes(member, seconds: float, running: int) -> None:
    """A member that takes so long per token with any load, and decodes so many sequences."""
    member.decode_rate.learn(1, seconds)
    for number in range(running):
        member.work.expect_decode(f"busy {number}", 10, 0.0)
        member.work.begin_decode(f"busy {number}", 0.0)


@pytest.mark.parametrize("policy", ["early", "predicted"])
def test_a_late_first_token_is_refused_with_the_time_to_wait(cluster, policy):
    prefill, decode = make("prefill", True), make("decode", True)
    both = cluster(prefill, decode, overload=policy)
    both.members[0].work.begin_prefill("busy", 8.0, both.conductor.now())
    error = refusal(both, slo=Slo(ttft=3.0))
    assert (error.status, error.reason) == ("RESOURCE_EXHAUSTED", "ttft")
    assert 4 < error.retry_after < 6
    assert not prefill.seen and not decode.seen and not both.conductor.requests
    both.submit("patient", slo=Slo(ttft=30.0))
    assert prefill.jobs
    eventually(lambda: decode.own)


def test_slow_tokens_are_refused_by_the_load_of_now(cluster):
    decode = make("decode", True)
    one = cluster(decode, overload="early")
    slow_decodes(one.members[0], 0.2, running=3)
    error = refusal(one, slo=Slo(tpot=0.05))
    assert (error.status, error.reason) == ("RESOURCE_EXHAUSTED", "tpot") and error.retry_after
    assert not decode.seen
    one.submit("patient", slo=Slo(tpot=0.5))
    assert decode.own


def test_sequences_that_will_have_ended_count_only_for_the_load_of_now(cluster):
    decode = make("decode", True)
    one = cluster(decode, overload="predicted")
    (member,) = one.members
    for sequences in (1, 10) * 10:
        member.decode_rate.learn(sequences, 0.01 * sequences)
    slow_decodes(member, 0.1, running=10)  # begun at the clock's zero: they end in the meantime
    one.submit(slo=Slo(tpot=0.05))
    assert decode.own


def test_whoever_was_admitted_is_not_refused_when_a_member_dies(cluster):
    prefill, dying, other = make("prefill"), make("decode", True), make("decode")
    three = cluster(prefill, dying, other, overload="early")
    other.available = False
    heard = three.submit(slo=Slo(ttft=3.0, tpot=0.05))
    other.available = True
    slow_decodes(three.members[2], 1.0, running=1)
    dying.die()
    three.conductor.check()
    eventually(lambda: heard.ends)
    assert_right(heard)


def test_nobody_is_refused_without_a_policy(cluster):
    decode = make("decode", True)
    one = cluster(decode)
    slow_decodes(one.members[0], 10.0, running=3)
    one.submit(slo=Slo(ttft=0.001, tpot=0.001))
    assert decode.own


def test_a_policy_that_decides_too_late_is_no_choice(cluster):
    with pytest.raises(ConfigError, match="none, early, predicted"):
        cluster(make(), overload="baseline")


# --- the prediction of seconds per token


def test_a_line_is_learnt_from_what_requests_took():
    rate = DecodeRate()
    assert rate.seconds(5) == 0
    for sequences in (1, 4, 8, 2, 16, 6, 12, 3) * 5:
        rate.learn(sequences, 0.010 + 0.002 * sequences)
    for sequences in (1, 8, 20):
        assert rate.seconds(sequences) == pytest.approx(0.010 + 0.002 * sequences, rel=0.02)


def test_one_load_tells_no_slope_and_more_load_is_never_faster():
    rate = DecodeRate()
    for _ in range(20):
        rate.learn(4, 0.02)
    assert rate.seconds(100) == pytest.approx(0.02)
    for sequences in (1, 20) * 20:
        rate.learn(sequences, 0.5 / sequences)
    assert rate.seconds(40) >= rate.seconds(1)
