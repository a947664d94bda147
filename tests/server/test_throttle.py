"""At overload most calls are refused before they are read; a burst, and other keys' calls, are
not."""

from __future__ import annotations

from collections import Counter

import pytest

from jaxserve.api.errors import RequestError
from jaxserve.server.client import ServerError
from jaxserve.server.throttle import MEMORY_SECONDS, PER_ACCEPTED, SPARE, Throttle
from tests.server.fakes import FakeReplica
from tests.server.http_client import HttpClient, post
from tests.server.keyed import bearer, sha
from tests.waiting import eventually

FULL = RequestError("", "full", "RESOURCE_EXHAUSTED", 0.7, "ttft")


def through(throttle: Throttle, rate: float, room: float, begin: float, seconds: float) -> int:
    """Sends calls at `rate` a second to a replica that accepts `room` a second; returns how many
    were read."""
    read = 0
    free = room
    for number in range(int(rate * seconds)):
        now = begin + number / rate
        free = min(free + room / rate, room)
        try:
            throttle.check(now)
        except RequestError as error:
            assert error.status == "RESOURCE_EXHAUSTED"
            assert error.retry_after == 0.7
            continue
        read += 1
        if free >= 1:
            free -= 1
            throttle.accepted(now)
        else:
            throttle.refused(FULL, now)
    return read


def test_at_ten_times_the_load_little_more_than_can_be_accepted_is_read():
    throttle = Throttle()
    assert through(throttle, 20, 20, 0.0, 10) == 200
    overload = through(throttle, 200, 20, 10.0, 60)
    assert 20 * 60 < overload < (PER_ACCEPTED + 1) * 20 * 60
    # the refusals of the overload are forgotten soon
    through(throttle, 10, 20, 70.0, 3 * MEMORY_SECONDS)
    assert through(throttle, 10, 20, 70.0 + 3 * MEMORY_SECONDS, 10) == 100


def test_a_burst_and_a_few_refusals_refuse_no_one_unread():
    throttle = Throttle()
    for _ in range(1000):
        throttle.check(0.0)
    for _ in range(1000):
        throttle.accepted(0.1)
    for _ in range(int(SPARE)):
        throttle.refused(FULL, 0.2)
    for _ in range(1000):
        throttle.check(0.2)


def test_where_no_request_is_accepted_some_are_still_tried():
    throttle = Throttle()
    assert through(throttle, 200, 0.0, 0.0, 60) > 60


@pytest.mark.parametrize("status", ["UNAVAILABLE", "INVALID_ARGUMENT"])
def test_only_want_of_room_counts(status):
    throttle = Throttle()
    for _ in range(1000):
        throttle.refused(RequestError("", "no", status), 0.0)
    throttle.check(0.0)


# --- a server


def full_server(serve):
    """A server whose replica refuses all, after a few requests."""
    engine = FakeReplica()
    served = serve(engine)
    engine.fault = FULL
    return served


def test_calls_over_http_are_refused_unread_and_the_connection_goes_on(serve):
    served = full_server(serve)
    body = {"prompt": [5, 6], "max_tokens": 2}
    with HttpClient(served) as client:
        answers = [post(client, "/v1/completions", body) for _ in range(200)]
        assert {answer.status_code for answer in answers} == {429}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
        reasons = Counter(answer.headers["jaxserve-reject-reason"] for answer in answers)
        assert reasons["overloaded"] > reasons["ttft"] > SPARE
        # what does not compute is read as ever
        assert client.get("/v1/models").status_code == 200
        assert len(post(client, "/tokenize", {"prompt": "ab"}).json()["tokens"]) == 2
        served.engine.fault = None
        eventually(lambda: post(client, "/v1/completions", body).status_code == 200)


def test_calls_over_grpc_are_refused_unread(serve):
    served = full_server(serve)
    reasons: Counter[str] = Counter()
    for _ in range(200):
        with pytest.raises(ServerError) as refused:
            served.client.complete([5, 6])
        assert refused.value.status == "RESOURCE_EXHAUSTED"
        assert refused.value.retry_after == pytest.approx(0.7)
        reasons[refused.value.reason] += 1
    assert reasons["overloaded"] > reasons["ttft"] > SPARE


def test_the_overload_of_one_key_is_not_that_of_another(serve, tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(
        f"keys:\n  - {{name: alice, sha256: {sha('a')}}}\n  - {{name: bob, sha256: {sha('b')}}}\n"
    )
    file.chmod(0o600)
    engine = FakeReplica()
    engine.fault = FULL
    served = serve(engine, api_keys=str(file))
    body = {"prompt": [5, 6], "max_tokens": 2}
    with HttpClient(served) as client:
        for _ in range(200):
            post(client, "/v1/completions", body, authorization=bearer("a"))
        engine.fault = None
        assert post(client, "/v1/completions", body, authorization=bearer("b")).status_code == 200
