"""A replica on another process, beside what the suite of replicas says: who may hold a session,
what crosses, and what is left when a side is gone. The replica behind is the tests' fake."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import threading
import time

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Accepted, Finished, Logprobs, Progress, Timing, Token, Usage
from jaxserve.api.request import Continuation, KvSource, Request, Slo
from jaxserve.api.sampling import SamplingParams
from jaxserve.cache.tiers import Fetched
from jaxserve.group.channel import free_port
from jaxserve.server import replica_pb2 as pb
from jaxserve.server.own_address import OwnAddress
from jaxserve.server.remote_replica import RemoteReplica
from jaxserve.server.replica_auth import PROOF_KEY, CallerCheck
from jaxserve.server.replica_messages import (
    error_message,
    error_of,
    event_message,
    event_of,
    info_of,
    info_text,
    request_of,
    submit_message,
)
from jaxserve.server.replica_service import ReplicaService
from jaxserve.server.replica_session import ReplicaSession
from jaxserve.text.structured_output import Guide, Guided, Guides
from tests.replica.holders import Heard
from tests.server.fakes import EOS, VOCAB, FakeReplica, FakeTokenizer, expected
from tests.waiting import eventually

SECRET = b"of the tests of remote replicas"


@pytest.fixture
def offered():
    """Offers a fake replica, and reaches it."""
    with contextlib.ExitStack() as stack:
        yield Offered(stack)


class Offered:
    def __init__(self, stack: contextlib.ExitStack):
        self._stack = stack
        self.port = free_port("127.0.0.1")
        self.behind = FakeReplica(step_seconds=0.002)
        self.behind.start()
        stack.callback(self.behind.close)
        self.guides = Guides(FakeTokenizer(), VOCAB, (EOS,))
        stack.callback(self.guides.close)
        self.service = self.offer()

    def offer(self, silent_seconds: float = 4.0) -> ReplicaService:
        service = ReplicaService(SECRET, silent_seconds=silent_seconds, max_message_bytes=1 << 16)
        service.start(f"127.0.0.1:{self.port}")
        service.open(self.behind, self.guides)
        self._stack.callback(service.stop)
        return service

    def reach(self, secret: bytes = SECRET, silent_seconds: float = 4.0) -> RemoteReplica:
        remote = RemoteReplica(f"127.0.0.1:{self.port}", secret, silent_seconds=silent_seconds)
        self._stack.callback(remote.close)
        return remote

    def reached(self) -> RemoteReplica:
        remote = self.reach()
        assert remote.wait_connected(60)
        return remote


def request(remote: RemoteReplica, id: str = "r", tokens: int = 5, **rest) -> Request:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Request(id, np.arange(1, 8, dtype=np.int32), sampling, arrival=remote.now(), **rest)


def test_who_does_not_know_the_secret_is_refused_and_told_nothing(offered):
    stranger = offered.reach(b"another secret of some length")
    eventually(lambda: "another secret" in stranger.fault)
    assert not stranger.alive and not stranger.wait_connected(0)
    with pytest.raises(RequestError, match="another secret") as error:
        _ = stranger.info
    assert error.value.status == "UNAVAILABLE"
    assert offered.reached().alive


@pytest.mark.parametrize("metadata", [(), ((PROOF_KEY, bytes(32)),)], ids=["none", "wrong"])
def test_a_replica_that_does_not_know_the_secret_is_not_used(offered, monkeypatch, metadata):
    admit = lambda _, context: context.send_initial_metadata(metadata)
    monkeypatch.setattr(CallerCheck, "_admit", admit)
    remote = offered.reach()
    eventually(lambda: "does not know the cluster's secret" in remote.fault)
    assert not remote.alive


def test_a_refusal_crosses_with_its_field_reason_and_time(offered):
    remote = offered.reached()
    offered.behind.fault = RequestError("queue", "is full", "RESOURCE_EXHAUSTED", 2.5, "queue")
    with pytest.raises(RequestError) as refusal:
        remote.submit(request(remote), Heard())
    error = refusal.value
    assert (error.field, str(error), error.status) == (
        "queue",
        "queue: is full",
        "RESOURCE_EXHAUSTED",
    )
    assert (error.retry_after, error.reason) == (2.5, "queue")


def test_what_is_too_large_for_a_message_is_refused_and_the_session_goes_on(offered):
    remote = offered.reached()
    large = dataclasses.replace(request(remote), prompt=np.zeros(1 << 15, np.int32))
    with pytest.raises(RequestError, match="messages of at most 65536 bytes") as refusal:
        remote.submit(large, Heard())
    assert refusal.value.field == "prompt"
    heard = Heard()
    remote.submit(request(remote), heard)
    eventually(lambda: heard.ends)
    assert [token.id for token in heard.tokens] == expected(range(1, 8), 5)


def test_a_guide_is_compiled_by_the_replica(offered):
    remote = offered.reached()
    guide = offered.guides.compile(Guided("regex", "ab|cd"))
    heard = Heard()
    remote.submit(dataclasses.replace(request(remote), guide=guide), heard)
    eventually(lambda: heard.ends)
    (compiled,) = offered.behind.guides_seen
    assert compiled.spec == guide.spec and compiled is not guide


class HeldGuides(Guides):
    """Guides of which each is compiled when the test lets it."""

    def __init__(self):
        super().__init__(FakeTokenizer(), VOCAB, (EOS,))
        self.released = threading.Event()

    def _compiled(self, *arguments):
        assert self.released.wait(100)
        return super()._compiled(*arguments)


@pytest.fixture
def held(offered, monkeypatch):
    """A replica whose guides wait, which ends sessions that are silent for 3 s; its guides."""
    monkeypatch.setattr("jaxserve.server.replica_connection.ALIVE_SECONDS", 0.05)
    monkeypatch.setattr("jaxserve.server.remote_replica.ANSWER_SECONDS", 100.0)
    monkeypatch.setattr("jaxserve.text.structured_output.guides.QUEUE_SECONDS", 100.0)
    offered.service.stop()
    offered.guides.close()
    offered.guides = HeldGuides()
    offered.service = offered.offer(silent_seconds=3.0)
    yield offered.guides
    offered.guides.released.set()
    offered.guides.close()


def submitted(remote: RemoteReplica, id: str, heard: Heard, tokens: int = 3):
    """Submits a request with a guide on another thread, and waits until it is compiled."""
    guide = Guide(Guided("regex", "ab|cd"), None, VOCAB)
    asked = dataclasses.replace(request(remote, id, tokens), guide=guide)
    future: concurrent.futures.Future[None] = concurrent.futures.Future()

    def submit() -> None:
        try:
            future.set_result(remote.submit(asked, heard))
        except RequestError as error:
            future.set_exception(error)

    threading.Thread(target=submit, daemon=True).start()
    return future


def test_requests_and_signs_of_life_pass_a_guide_that_is_compiled(offered, held):
    remote = offered.reached()
    slow, quick = Heard(), Heard()
    asked = submitted(remote, "guided", slow)
    eventually(lambda: offered.service.requests == 1)
    remote.submit(request(remote, "plain"), quick)
    eventually(lambda: quick.ends)
    time.sleep(4)  # longer than a session may be silent
    assert remote.alive and not slow.ends and not asked.done()
    held.released.set()
    asked.result(60)
    eventually(lambda: slow.ends)
    assert slow.end.reason == "length" and not offered.service.requests


def test_a_request_that_is_cancelled_while_its_guide_is_compiled_is_not_left(offered, held):
    remote = offered.reached()
    heard = Heard()
    asked = submitted(remote, "guided", heard, tokens=4000)
    eventually(lambda: offered.service.requests == 1)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        cancelled = thread.submit(remote.cancel, "guided")
        held.released.set()
        assert cancelled.result(60)
    asked.result(60)
    eventually(lambda: heard.ends)
    assert heard.end.reason == "cancelled" and not offered.behind.requests


def test_a_caller_that_leaves_while_its_guide_is_compiled_leaves_no_request(offered, held):
    remote = offered.reached()
    submitted(remote, "guided", Heard(), tokens=4000)
    eventually(lambda: offered.service.requests == 1)
    remote.close()
    eventually(lambda: not offered.service.requests)
    held.released.set()
    eventually(lambda: offered.behind.cancelled and not offered.behind.requests)


def test_a_lost_session_ends_requests_and_the_replica_comes_back(offered):
    remote = offered.reached()
    heard = Heard()
    remote.submit(request(remote, tokens=4000), heard)
    eventually(lambda: len(heard.tokens) > 3)
    offered.service.stop()
    eventually(lambda: heard.ends)
    end = heard.end
    assert (end.reason, end.error.status) == ("error", "UNAVAILABLE")
    assert end.usage.completion == len(heard.tokens)
    assert not remote.alive
    with pytest.raises(RequestError, match="lost"):
        remote.submit(request(remote, "other"), Heard())
    eventually(lambda: not offered.behind.requests)
    offered.offer()
    assert remote.wait_connected(60)
    again = Heard()
    remote.submit(request(remote), again)
    eventually(lambda: again.ends)
    assert again.end.reason == "length"


def test_requests_of_a_caller_that_says_nothing_are_cancelled(offered, monkeypatch):
    offered.service.stop()
    offered.offer(silent_seconds=3.0)
    monkeypatch.setattr("jaxserve.server.replica_connection.ALIVE_SECONDS", 60)
    remote = offered.reached()
    heard = Heard()
    remote.submit(request(remote, tokens=4000), heard)
    assert offered.behind.requests
    eventually(lambda: not offered.behind.requests and heard.ends)
    assert "conductor has said nothing for 3 s" in str(heard.end.error)


def test_requests_at_a_silent_replica_end_with_that_cause(offered, monkeypatch):
    monkeypatch.setattr("jaxserve.server.replica_service.BEAT_SECONDS", 60)
    monkeypatch.setattr("jaxserve.server.replica_connection.ALIVE_SECONDS", 0.05)
    offered.behind.paused = True
    offered.service.stop()
    offered.offer(silent_seconds=60)
    remote = offered.reach(silent_seconds=3.0)
    assert remote.wait_connected(60)
    heard = Heard()
    remote.submit(request(remote), heard)
    eventually(lambda: heard.ends)
    assert "is lost: it has said nothing for 3 s" in str(heard.end.error)


def test_a_session_that_another_thread_has_ended_before_it_begins_says_why():
    session = ReplicaSession("127.0.0.1:1", b"of a test without a replica")
    session.end("it was silent")
    with pytest.raises(RequestError, match="it was silent"):
        session.open()


def test_requests_of_a_caller_that_closes_are_cancelled(offered):
    remote = offered.reached()
    heard = Heard()
    remote.submit(request(remote, tokens=4000), heard)
    remote.close()
    assert heard.end.error.status == "UNAVAILABLE"
    eventually(lambda: not offered.behind.requests)


def test_a_replica_says_by_which_addresses_and_how_quickly_kv_comes(offered):
    offered.service.stop()
    fetched = [
        Fetched("a:1", "tcp", blocks=3, bytes_per_s=1e6),
        Fetched("b:1", "tcp"),
        Fetched("a:1", "mooncake-tcp", blocks=3, bytes_per_s=7e9),
    ]
    offered.behind.kv_fetched = lambda: fetched
    service = ReplicaService(SECRET, own_address=OwnAddress.of("10.0.0.1:5,10.0.0.2", "0.0.0.0"))
    service.start(f"127.0.0.1:{offered.port}")
    service.open(offered.behind)
    try:
        peer = offered.reached().facts.kv_peer
        assert peer.addresses == ("10.0.0.1:5", f"10.0.0.2:{offered.port}")
        assert peer.rates == {"a:1": 7e9}, "by the plane that was used last"
    finally:
        service.stop()


def test_two_callers_have_sessions_of_their_own(offered):
    one, two = offered.reached(), offered.reached()
    heard = Heard(), Heard()
    one.submit(request(one, "one", tokens=200), heard[0])
    two.submit(request(two, "two", tokens=20), heard[1])
    two_end = two.cancel("one")
    one.close()
    eventually(lambda: heard[1].ends)
    assert two_end is False and heard[1].end.reason == "length" and two.alive


def test_two_callers_may_have_requests_of_one_id(offered):
    one, two = offered.reached(), offered.reached()
    heard = Heard(), Heard()
    one.submit(request(one, "trace", tokens=4000), heard[0])
    two.submit(request(two, "trace", tokens=20), heard[1])
    eventually(lambda: heard[1].ends)
    assert heard[1].end.reason == "length" and not heard[0].ends
    assert one.cancel("trace")
    eventually(lambda: heard[0].ends and not offered.behind.requests)
    assert heard[0].end.reason == "cancelled"


def test_a_session_is_kept_up_without_requests(offered):
    remote = offered.reached()
    time.sleep(1.0)
    assert remote.alive and remote.recent_load is not None


def test_each_session_is_told_how_many_requests_the_others_have_there(offered):
    offered.behind.paused = True
    one, two = offered.reached(), offered.reached()
    for id in "abc":
        one.submit(request(one, id), Heard())
    two.submit(request(two, "d"), Heard())
    eventually(lambda: (one.other_requests, two.other_requests) == (1, 3))
    three = offered.reached()
    assert three.other_requests == 4  # with the first word
    one.close()
    eventually(lambda: (two.other_requests, three.other_requests) == (0, 1))


# --- what crosses


numbers = st.integers(0, 2**31 - 1)
seconds = st.floats(0, 1e6)
logprobs = st.builds(
    Logprobs,
    st.floats(-100, 0),
    st.lists(st.tuples(numbers, st.floats(-100, 0)), max_size=3).map(tuple),
)
errors = st.builds(
    RequestError,
    st.sampled_from(["", "prompt"]),
    st.text(max_size=20),
    st.sampled_from(["UNAVAILABLE", "INTERNAL"]),
    st.none() | seconds,
    st.sampled_from(["", "queue"]),
)
events = st.one_of(
    st.builds(Accepted, numbers, seconds),
    st.builds(Progress, numbers, numbers, numbers, seconds),
    st.builds(Token, numbers, numbers, st.none() | logprobs),
    st.builds(
        Finished,
        numbers,
        st.sampled_from(["stop", "length", "error"]),
        st.builds(Usage, numbers, numbers, numbers),
        st.builds(Timing, seconds, seconds, seconds, seconds, seconds),
        st.none() | st.lists(st.none() | logprobs, min_size=1, max_size=3).map(tuple),
        in_time=st.none() | st.booleans(),
    ),
)


@hypothesis.given(events)
def test_events_cross_unchanged(event):
    assert event_of(pb.Event.FromString(event_message(event).SerializeToString())) == event


@hypothesis.given(errors)
@hypothesis.settings(max_examples=25)
def test_errors_cross_unchanged(error):
    copy = error_of(pb.Error.FromString(error_message(error).SerializeToString()))
    assert str(copy) == str(error)
    names = ("field", "status", "retry_after", "reason")
    assert [getattr(copy, name) for name in names] == [getattr(error, name) for name in names]


def test_info_crosses_unchanged():
    info = dataclasses.replace(FakeReplica().info, role="decode", settings={"a": {"b": 1}})
    assert info_of(info_text(info)) == info


@hypothesis.given(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=50),
    st.floats(0, 100),
    st.none() | st.floats(0, 100),
    st.builds(Slo, st.none() | st.floats(0.1, 9), st.none() | st.floats(0.1, 9)),
    st.builds(
        SamplingParams,
        temperature=st.floats(0, 2),
        seed=st.none() | st.integers(-(2**63), 2**63 - 1),
        n=st.integers(1, 4),
        max_tokens=st.integers(1, 100),
        stop=st.lists(st.text(min_size=1, max_size=5), max_size=2).map(tuple),
        logprobs=st.none() | st.integers(0, 5),
        ignore_eos=st.booleans(),
    ),
    st.integers(-8, 8),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 86400]),
)
def test_requests_cross_with_moments_on_the_replicas_clock(
    prompt, age, left, slo, sampling, priority, bypass, retention
):
    here, there = 1000.0, 5.0
    asked = Request(
        "id",
        np.array(prompt, np.int32),
        sampling,
        arrival=here - age,
        deadline=None if left is None else here + left,
        slo=slo,
        priority=priority,
        cache_salt="salt",
        bypass_prefix_cache=bypass,
        cache_retention=retention,
        kv_source=None if bypass else KvSource("host:1", 7, "id"),
        embed=bypass and sampling.n == 1,
        job=bypass,
        probe=bypass,
        tenant="team-a",
    )
    message = pb.Submit.FromString(submit_message(1, asked, here).SerializeToString())
    copy = request_of(message, FakeReplica().info, there)
    assert copy.prompt.tolist() == prompt
    assert copy.arrival == pytest.approx(there - age)
    assert copy.deadline == (None if left is None else pytest.approx(there + left))
    for name in (
        "sampling",
        "slo",
        "priority",
        "cache_salt",
        "bypass_prefix_cache",
        "kv_source",
        "embed",
        "job",
        "probe",
        "tenant",
    ):
        assert getattr(copy, name) == getattr(asked, name)
    assert copy.cache_retention == retention


def continued(outputs: dict[int, list[int]], first_token: float | None = 900.0) -> pb.Submit:
    """A message of a request with three completions of at most 9 tokens that goes on."""
    asked = Request(
        "id",
        np.array([1, 2], np.int32),
        SamplingParams(n=3, max_tokens=9),
        arrival=890.0,
        continuation=Continuation(outputs, first_token, "2", first_token and first_token + 5),
    )
    return pb.Submit.FromString(submit_message(1, asked, 1000.0).SerializeToString())


def test_a_request_that_goes_on_crosses_with_its_tokens():
    copy = request_of(continued({2: [7, 8], 0: []}), FakeReplica().info, 5.0)
    assert copy.completions == [0, 2] and list(copy.output(2)) == [7, 8] and not copy.output(0)
    assert copy.continuation.first_token == pytest.approx(5.0 - 100.0)
    assert copy.continuation.last_token == pytest.approx(5.0 - 95.0)
    assert copy.continuation.weight_version == "2"
    assert copy.arrival == pytest.approx(5.0 - 110.0)


@pytest.mark.parametrize(
    "outputs, first_token, said",
    [
        ({}, None, "no completion"),
        ({3: [1]}, 1.0, "completion 3 is not in 0 to 2"),
        ({0: [1] * 9}, 1.0, "has 9 tokens, max_tokens is 9"),
        ({0: [VOCAB]}, 1.0, f"id {VOCAB} is not in"),
        ({0: [1]}, None, "not when the first"),
    ],
)
def test_a_request_that_cannot_go_on_so_is_refused_by_the_field(outputs, first_token, said):
    with pytest.raises(RequestError) as refused:
        request_of(continued(outputs, first_token), FakeReplica().info, 5.0)
    assert refused.value.field == "continuation" and said in str(refused.value)
