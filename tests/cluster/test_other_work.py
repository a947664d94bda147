"""What a conductor makes of the requests that others have at its replicas."""

from __future__ import annotations

import dataclasses

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxserve.api.errors import RequestError
from jaxserve.api.request import Slo
from jaxserve.cluster.other_work import NO_OTHER_WORK, other_work
from jaxserve.scheduling import Load
from tests.cluster.fakes import LONG, SHORT, RoleCluster, RoleReplica, assert_right, make
from tests.waiting import eventually

EMPTY = Load(0, 0, 0, 0.0, 10, 10, 0)
COUNTS = st.integers(0, 10_000)


@hypothesis.given(COUNTS, COUNTS, COUNTS, COUNTS)
def test_the_part_of_others_is_at_most_all(requests, running, waiting, tokens):
    load = dataclasses.replace(
        EMPTY, running=running, waiting=waiting, queued_prefill_tokens=tokens
    )
    work = other_work(requests, load)
    assert work.requests == requests
    assert 0 <= work.decodes <= min(requests, running)
    assert 0 <= work.queued_tokens <= tokens * (1 + 1e-9)
    if requests and requests >= running + waiting:  # all are theirs
        assert (work.decodes, work.queued_tokens) == (running, pytest.approx(tokens))


def test_where_others_have_nothing_a_load_is_ones_own():
    assert other_work(0, dataclasses.replace(EMPTY, running=5)) == NO_OTHER_WORK


def test_before_a_load_is_told_the_requests_of_others_count_as_decoding():
    assert other_work(3, None)[:2] == (3, 3)


def beside(cluster, *fakes: RoleReplica) -> tuple[RoleCluster, RoleCluster]:
    """Two conductors over the same fakes, each of which is told what the other has there."""
    both = cluster(*fakes), cluster(*fakes, owns_members=False)
    for own, other in (both, both[::-1]):
        for mine, theirs in zip(own.members, other.members):
            mine.other_requests = lambda theirs=theirs: theirs.work.requests
    return both


def test_two_conductors_share_replicas_as_one_would(cluster):
    fakes = [make("mixed", paused=True) for _ in range(2)]
    one, two = beside(cluster, *fakes)
    for number, conductor in enumerate((one, one, one, two, one, one, two, two)):
        conductor.submit(f"r{number}", SHORT)
    assert [len(fake.own) for fake in fakes] == [4, 4]


def test_a_request_decodes_where_others_decode_less(cluster):
    prefill, busy, free = make("prefill"), make("decode"), make("decode")
    one = cluster(prefill, busy, free)
    load = dataclasses.replace(EMPTY, running=4)
    one.members[1].other_requests = lambda: 4
    one.members[1].recent_load = lambda: load
    assert_right(one.serve())
    assert free.own and not busy.own


def test_a_prompt_goes_where_others_have_fewer_prompts_queued(cluster):
    busy, free, decode = make("prefill"), make("prefill"), make("decode")
    one = cluster(busy, free, decode)
    load = dataclasses.replace(EMPTY, waiting=4, queued_prefill_seconds=10.0)
    one.members[0].other_requests = lambda: 4
    one.members[0].recent_load = lambda: load
    assert_right(one.serve())
    assert free.jobs and not busy.jobs


def test_requests_of_others_count_where_late_ones_are_refused(cluster):
    one = cluster(make("mixed"), overload="early")
    (member,) = one.members
    load = dataclasses.replace(EMPTY, waiting=4, queued_prefill_seconds=10.0)
    member.other_requests = lambda: 4
    member.recent_load = lambda: load
    with pytest.raises(RequestError) as refusal:
        one.submit("late", slo=Slo(ttft=3.0))
    assert (refusal.value.status, refusal.value.reason) == ("RESOURCE_EXHAUSTED", "ttft")
    member.other_requests = lambda: 0
    assert_right(one.serve("r", slo=Slo(ttft=3.0)))


def test_what_a_conductor_reserved_is_free_again_when_it_ends(cluster):
    """A request is its own reservation: with its conductor it leaves prefill and decode replica."""
    prefill, decode = make("prefill", paused=True), make("decode", paused=True)
    one, two = beside(cluster, prefill, decode)
    for number in range(3):
        one.submit(f"stays {number}", LONG)
        two.submit(f"gone {number}", LONG)
    two.conductor.close()
    eventually(lambda: all("stays" in id for fake in (prefill, decode) for id in fake.requests))
    assert not any(member.other_requests() for member in one.members)
