"""What a member has refused a moment ago it is not asked again, and what it may accept it is."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest

from jaxserve.api.errors import RequestError
from jaxserve.api.request import Request, Slo
from jaxserve.api.sampling import SamplingParams
from jaxserve.cluster.recent_refusal import MOST_SECONDS, RecentRefusal
from tests.cluster.test_conductor import Cluster
from tests.server.fakes import FakeReplica
from tests.waiting import eventually

TIGHT = Slo(ttft=0.5)


def request(**changes) -> Request:
    prompt = np.array([1, 2, 3], np.int32)
    return dataclasses.replace(Request("one", prompt, SamplingParams(), slo=TIGHT), **changes)


def late(seconds: float) -> RequestError:
    return RequestError("", "too late", "RESOURCE_EXHAUSTED", seconds, "ttft")


def test_it_stands_for_as_much_work_with_the_same_objectives_until_its_time_is_up():
    refusal = RecentRefusal.of(request(), 0.2, late(0.3), now=10.0)
    assert refusal.covers(request(), 0.2, 10.2)
    assert refusal.covers(request(), 0.5, 10.2)
    assert not refusal.covers(request(), 0.1, 10.2), "a shorter prompt may be in time"
    assert not refusal.covers(request(), 0.2, 10.3), "its time is up"
    assert not refusal.covers(dataclasses.replace(request(), slo=Slo()), 0.2, 10.2)
    assert not refusal.covers(request(priority=1), 0.2, 10.2)
    assert not RecentRefusal.of(request(), 0.2, late(60.0), 10.0).covers(
        request(), 0.2, 10.0 + MOST_SECONDS
    )


@pytest.mark.parametrize("reason", ["queue", "memory", "deadline"])
def test_other_refusals_say_nothing_of_later_requests(reason):
    error = RequestError("", "no", "RESOURCE_EXHAUSTED", 1.0, reason)
    assert RecentRefusal.of(request(), 0.2, error, 10.0) is None


def test_the_refusal_of_least_work_is_kept():
    large = RecentRefusal.of(request(), 0.4, late(0.3), 10.0)
    small = RecentRefusal.of(request(), 0.2, late(0.3), 10.1)
    assert large.or_newer(small, 10.1) is small
    assert small.or_newer(dataclasses.replace(large, until=10.4), 10.2) is small
    assert small.or_newer(large, 10.5) is large


def test_a_conductor_does_not_ask_a_member_twice_and_asks_again_later():
    fake = FakeReplica()
    cluster = Cluster(fake)
    cluster.conductor.start()
    asked = []
    accept = fake.submit

    def submit(request, sink):
        asked.append(request.id)
        if len(asked) == 1:
            raise late(MOST_SECONDS)
        accept(request, sink)

    fake.submit = submit
    for name in ("first", "second", "third"):
        with pytest.raises(RequestError) as refused:
            cluster.submit(name)
        assert refused.value.reason == "ttft"
    assert asked == ["first"]

    def accepted() -> bool:
        with contextlib.suppress(RequestError):
            cluster.submit("fourth")
        return asked == ["first", "fourth"]

    eventually(accepted)
    cluster.conductor.close()
