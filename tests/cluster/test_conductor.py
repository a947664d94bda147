"""What callers of a conductor rely on when its members fail, fill up, or have prefixes cached.
Members are fakes with threads of their own, which die and hang as real ones do, or virtual ones."""

from __future__ import annotations

import dataclasses
import random
import time

import numpy as np
import pytest
from prometheus_client import generate_latest

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Accepted, Token
from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.cluster.conductor import Conductor, ConductorSettings
from jaxserve.cluster.member import Member
from jaxserve.settings.schema import ConfigError
from tests.replica.holders import Heard, VirtualConductorHolder, virtual
from tests.server.fakes import FakeReplica, expected
from tests.waiting import eventually

PROMPT = list(range(3, 23))


class Cluster:
    """A conductor over fakes."""

    def __init__(self, *fakes: FakeReplica, **settings):
        self.fakes = list(fakes)
        members = [Member(f"fake {number}", fake) for number, fake in enumerate(fakes)]
        self.conductor = Conductor(members, ConductorSettings(**settings), owns_members=True)

    def submit(self, id: str = "r", tokens: int = 5, n: int = 1, **rest) -> Heard:
        heard = Heard()
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, n=n)
        prompt = np.array(PROMPT, np.int32)
        arrival = self.conductor.now()
        self.conductor.submit(Request(id, prompt, sampling, arrival=arrival, **rest), heard)
        return heard

    def holder_of(self, id: str) -> FakeReplica:
        return next(fake for fake in self.fakes if id in fake.requests)

    def counted(self, sample: str) -> float:
        """Returns a sample of the conductor's metrics."""
        text = generate_latest(self.conductor.metrics_registry).decode()
        (line,) = [line for line in text.splitlines() if line.startswith(f"jaxserve:{sample} ")]
        return float(line.rpartition(" ")[2])

    def idle(self) -> bool:
        """Returns True if nothing is left of any request."""
        books = not self.conductor.requests and not any(
            member.work.requests for member in self.conductor.members
        )
        return books and not any(fake.requests for fake in self.fakes if fake.alive)


@pytest.fixture
def make():
    """Makes started clusters that are closed at the end."""
    made = []

    def start(*fakes: FakeReplica, **settings) -> Cluster:
        made.append(Cluster(*fakes, **settings))
        made[-1].conductor.start()
        return made[-1]

    yield start
    for cluster in made:
        cluster.conductor.close()


def paused(**rest) -> FakeReplica:
    fake = FakeReplica(**rest)
    fake.paused = True
    return fake


def assert_served(heard: Heard, tokens: int) -> None:
    """It has heard one acceptance, the right tokens and one end."""
    assert [type(event) for event in heard.events].count(Accepted) == 1
    assert [event.id for event in heard.tokens] == expected(PROMPT, tokens)
    assert heard.end.reason == "length" and heard.end.usage.completion == tokens


# --- members that fail


def test_a_request_without_tokens_is_redone_where_its_member_dies(make):
    cluster = make(paused(), paused())
    heard = cluster.submit(tokens=6)
    dying = cluster.holder_of("r")
    dying.die()
    for fake in cluster.fakes:
        fake.paused = False
    eventually(lambda: heard.ends)
    assert_served(heard, 6)
    assert cluster.idle()


def test_requests_that_were_accepted_move_to_a_member_whose_queue_is_full(make):
    cluster = make(paused(max_queue=2), paused(max_queue=2))
    heard = [cluster.submit(f"{number}", tokens=6) for number in range(4)]
    assert [len(fake.requests) for fake in cluster.fakes] == [2, 2]
    cluster.fakes[0].die()
    cluster.fakes[1].paused = False
    eventually(lambda: all(one.ends for one in heard))
    for one in heard:
        assert_served(one, 6)


def test_all_completions_are_redone_together(make):
    cluster = make(paused(), paused())
    heard = cluster.submit(tokens=4, n=3)
    cluster.holder_of("r").die()
    for fake in cluster.fakes:
        fake.paused = False
    eventually(lambda: len(heard.ends) == 3)
    assert {end.reason for end in heard.ends} == {"length"} and len(heard.tokens) == 12


def slow() -> FakeReplica:
    return FakeReplica(step_seconds=0.01)


def test_a_request_with_tokens_goes_on_where_its_member_dies(make):
    cluster = make(slow(), slow(), slow())
    heard = cluster.submit(tokens=60)
    for tokens in (2, 20):
        eventually(lambda tokens=tokens: len(heard.tokens) > tokens)
        cluster.holder_of("r").die()
        eventually(lambda: sum("r" in fake.requests for fake in cluster.fakes if fake.alive))
    eventually(lambda: heard.ends)
    assert_served(heard, 60)
    assert heard.end.timing.first_token < 0.5 * heard.end.timing.total
    assert cluster.counted('migrations_total{cause="lost"}') == 2
    assert cluster.counted('retries_total{cause="lost"}') == 0
    assert cluster.idle()


def test_a_request_moves_from_a_member_that_is_closed(make):
    cluster = make(slow(), slow())
    heard = cluster.submit(tokens=40)
    eventually(lambda: len(heard.tokens) > 2)
    cluster.holder_of("r").close()
    eventually(lambda: heard.ends)
    assert_served(heard, 40)
    assert cluster.counted('migrations_total{cause="ended"}') == 1


def test_each_completion_goes_on_from_its_own_tokens(make):
    cluster = make(slow(), slow())
    heard = cluster.submit(tokens=40, n=3)
    eventually(lambda: len(heard.tokens) > 12)
    assert cluster.conductor.stop("r", 1)
    eventually(lambda: heard.ends)
    cluster.holder_of("r").die()
    eventually(lambda: len(heard.ends) == 3)
    assert [end.index for end in heard.ends] == [1, 0, 2]
    for index in (0, 2):
        tokens = [event.id for event in heard.of(index) if isinstance(event, Token)]
        assert tokens == expected(PROMPT, 40, index)


def test_a_stream_that_may_not_move_ends_with_the_cause(make):
    cluster = make(slow(), slow(), migrations=0)
    heard = cluster.submit(tokens=1000)
    eventually(lambda: len(heard.tokens) > 2)
    cluster.holder_of("r").die()
    eventually(lambda: heard.ends)
    assert heard.end.reason == "error" and heard.end.error.status in ("INTERNAL", "UNAVAILABLE")
    assert heard.end.usage.completion == len(heard.tokens)
    assert cluster.idle()


def test_a_request_whose_caller_waits_for_the_whole_moves_all_the_same(make):
    cluster = make(slow(), slow(), migrations=0)
    heard = cluster.submit(tokens=40, streamed=False)
    eventually(lambda: len(heard.tokens) > 2)
    cluster.holder_of("r").die()
    eventually(lambda: heard.ends)
    assert_served(heard, 40)


def test_a_request_may_return_to_a_member_that_was_lost_and_came_back(make):
    cluster = make(slow(), slow())
    heard = cluster.submit(tokens=60)
    first = cluster.holder_of("r")
    second = next(fake for fake in cluster.fakes if fake is not first)
    second.paused = True
    eventually(lambda: len(heard.tokens) > 2)
    for silent, other in ((first, second), (second, first)):
        silent.paused = True
        silent.alive = False
        eventually(lambda other=other: "r" in other.requests)
        silent.cancel("r")  # as a replica does whose conductor is gone
        silent.alive = True
        eventually(lambda: not any(member.lost for member in cluster.conductor.members))
    first.paused = False
    eventually(lambda: heard.ends)
    assert_served(heard, 60)


def test_a_member_that_falls_silent_loses_its_requests_and_is_not_heard_later(make):
    """A process stopped by SIGSTOP does so: it ends nothing, and goes on when it wakes."""
    cluster = make(FakeReplica(), FakeReplica())
    for fake in cluster.fakes:
        fake.paused = True
    heard = cluster.submit(tokens=6)
    silent = cluster.holder_of("r")
    silent.alive = False
    other = next(fake for fake in cluster.fakes if fake is not silent)
    eventually(lambda: "r" in other.requests)
    silent.paused = False  # it wakes, and tells its tokens
    eventually(lambda: not silent.requests)
    assert not heard.tokens
    other.paused = False
    eventually(lambda: heard.ends)
    assert_served(heard, 6)
    silent.alive = True
    eventually(lambda: not cluster.conductor.members[cluster.fakes.index(silent)].lost)
    again = [cluster.submit(f"again {number}") for number in range(4)]
    eventually(lambda: all(one.ends for one in again))


def test_a_silent_member_with_tokens_sent_ends_the_request_within_a_bound(make):
    cluster = make(FakeReplica(step_seconds=0.01), FakeReplica())
    cluster.fakes[1].available = False
    heard = cluster.submit(tokens=1000)
    eventually(lambda: len(heard.tokens) > 2)
    cluster.fakes[0].paused = True
    cluster.fakes[0].alive = False
    eventually(lambda: heard.ends)
    assert heard.end.reason == "error" and heard.end.error.status == "UNAVAILABLE"
    assert "fake 0" in str(heard.end.error)
    timing = heard.end.timing
    assert 0 <= timing.queued <= timing.first_token <= timing.total
    assert heard.end.usage.completion == len(heard.tokens)


def test_nobody_left_to_redo_it_ends_it(make):
    cluster = make(paused(), paused())
    heard = cluster.submit()
    for fake in cluster.fakes:
        fake.die()
    eventually(lambda: heard.ends)
    assert heard.end.error.status in ("UNAVAILABLE", "INTERNAL")
    assert not cluster.conductor.available
    with pytest.raises(RequestError) as refused:
        cluster.submit("new")
    assert refused.value.status == "UNAVAILABLE" and refused.value.retry_after
    assert cluster.idle()


def test_a_member_that_cannot_be_reached_is_passed_over_and_tried_again_later(make):
    cluster = make(FakeReplica(), FakeReplica())
    cluster.fakes[0].fault = OSError("connection reset")
    heard = [cluster.submit(f"{number}") for number in range(4)]
    eventually(lambda: all(one.ends for one in heard))
    assert {one.end.reason for one in heard} == {"length"}
    cluster.fakes[0].fault = None
    eventually(lambda: cluster.conductor.members[0].usable)


def test_a_member_that_is_drained_is_passed_over(make):
    cluster = make(FakeReplica(), FakeReplica())
    cluster.fakes[0].drain()
    heard = [cluster.submit(f"{number}") for number in range(4)]
    eventually(lambda: all(one.ends for one in heard))
    assert {one.end.reason for one in heard} == {"length"}


def test_a_hung_member_is_sent_nothing(make):
    cluster = make(FakeReplica(), FakeReplica())
    cluster.fakes[0].overdue_seconds = 3.0
    assert cluster.conductor.overdue() is None
    for number in range(4):
        cluster.submit(f"{number}", tokens=1000)
    assert not cluster.fakes[0].requests
    cluster.fakes[1].overdue_seconds = 2.0
    assert cluster.conductor.overdue() == 2.0 and not cluster.conductor.available


@pytest.mark.parametrize("seed", range(3))
def test_members_that_die_at_random_leave_every_request_ended_once(make, seed):
    rng = random.Random(seed)
    cluster = make(*(FakeReplica(step_seconds=0.002, chunk=7) for _ in range(4)))
    heard: dict[str, tuple[Heard, int]] = {}
    for number in range(60):
        tokens = rng.randint(1, 12)
        heard[str(number)] = cluster.submit(str(number), tokens=tokens), tokens
        if number in (15, 30, 45):
            rng.choice([fake for fake in cluster.fakes if fake.alive]).die()
        time.sleep(0.001)
    eventually(lambda: all(one.ends for one, _ in heard.values()))
    for one, tokens in heard.values():
        assert_served(one, tokens)
        assert one.events[-1] is one.end
    eventually(cluster.idle)


# --- ends that are asked for while a member is gone


class Unreachable(FakeReplica):
    """A fake that answers no call once `cut` is set."""

    cut = False

    def cancel(self, request_id: str, reason: str = "cancelled") -> bool:
        if self.cut:
            raise ConnectionError("cut")
        return super().cancel(request_id, reason)

    def stop(self, request_id: str, index: int) -> bool:
        if self.cut:
            raise ConnectionError("cut")
        return super().stop(request_id, index)


def test_what_an_unreachable_member_has_is_ended_at_the_close_within_a_bound(make, monkeypatch):
    monkeypatch.setattr("jaxserve.cluster.conductor.CLOSE_SECONDS", 0.5)
    fake = Unreachable()
    fake.paused = fake.cut = True
    cluster = make(fake)
    heard = cluster.submit()
    started = time.monotonic()
    cluster.conductor.close()
    assert time.monotonic() - started < 60
    assert heard.end.error.status == "UNAVAILABLE"


def test_a_completion_whose_end_a_lost_member_did_not_hear_of_ends_on_the_next(make):
    cluster = make(Unreachable(step_seconds=0.01), Unreachable(step_seconds=0.01))
    heard = cluster.submit(tokens=1000)
    eventually(lambda: len(heard.tokens) > 2)
    first = cluster.holder_of("r")
    first.cut = True
    cluster.conductor.stop("r", 0)
    first.die()
    eventually(lambda: heard.ends)
    assert heard.end.reason == "stop" and heard.end.usage.completion == len(heard.tokens)


def test_what_a_lost_member_has_can_be_cancelled():
    fake = Unreachable()
    fake.paused = fake.cut = True
    cluster = Cluster(fake)  # not started: nobody checks
    heard = cluster.submit()
    fake.alive = False
    assert cluster.conductor.cancel("r") is True
    assert heard.end.reason == "cancelled"
    assert cluster.conductor.cancel("r") is False


# --- queues and caches


def test_a_full_member_is_passed_over_and_all_full_refuse():
    cluster = Cluster(paused(max_queue=2), paused(max_queue=3))
    for number in range(5):
        cluster.submit(str(number))
    with pytest.raises(RequestError) as refused:
        cluster.submit("one too many")
    assert (refused.value.status, refused.value.reason) == ("RESOURCE_EXHAUSTED", "queue")
    assert [len(fake.requests) for fake in cluster.fakes] == [2, 3]
    assert cluster.conductor.load().running == 5


def test_a_prompt_goes_to_the_member_that_has_its_prefix():
    holder = VirtualConductorHolder([virtual().replica for _ in range(3)])
    holder.replica.start()
    size = holder.replica.info.block_size
    first = holder.submit("first", prompt=6 * size, tokens=2)
    holder.wait_ended(first)
    for number in range(4):
        again = holder.submit(f"again {number}", prompt=6 * size, tokens=2)
        holder.wait_ended(again)
        assert again.end.usage.cached == 5 * size
    assert holder.replica.flush_cache() == 6
    fresh = holder.submit("fresh", prompt=6 * size, tokens=2)
    holder.wait_ended(fresh)
    assert fresh.end.usage.cached == 0
    holder.replica.close()


def test_another_tenants_prefix_is_none():
    holder = VirtualConductorHolder([virtual().replica for _ in range(2)])
    holder.replica.start()
    holder.wait_ended(holder.submit("a", prompt=100, cache_salt="one"))
    other = holder.submit("b", prompt=100, cache_salt="two")
    holder.wait_ended(other)
    assert other.end.usage.cached == 0
    holder.replica.close()


def test_requests_that_come_at_once_are_spread():
    holder = VirtualConductorHolder([virtual().replica for _ in range(3)])
    for number in range(9):
        holder.submit(str(number), prompt=100 + number)
    assert [member.load().waiting for member in holder.members] == [3, 3, 3]
    holder.replica.close()


# --- what it says of itself


def test_metrics_are_those_of_all_members():
    holder = VirtualConductorHolder([virtual().replica for _ in range(2)])
    holder.replica.start()
    holder.wait_ended(*(holder.submit(str(number), prompt=40, tokens=9) for number in range(4)))
    text = generate_latest(holder.replica.metrics_registry).decode()
    assert 'jaxserve:request_success_total{finished_reason="length"} 4.0' in text
    assert "jaxserve:generation_tokens_total 36.0" in text
    assert "jaxserve:predictor_scale 1.0" in text, "a mean, no sum"
    holder.replica.close()


def test_the_view_lists_members_and_the_requests_of_all(make):
    holder = VirtualConductorHolder([virtual().replica for _ in range(2)])
    for number in range(4):
        holder.submit(str(number))
    shown = holder.replica.view()
    assert [row["name"] for row in shown["members"]] == ["virtual 0", "virtual 1"]
    assert sum(row["load"]["waiting"] for row in shown["members"]) == 4 == shown["waiting"]
    column = shown["columns"].index("id")
    assert sorted(row[column] for row in shown["requests"]) == ["0", "1", "2", "3"]
    holder.replica.close()


class Other(FakeReplica):
    """A fake with other facts."""

    def __init__(self, **facts):
        super().__init__()
        self.facts = facts

    @property
    def info(self):
        return dataclasses.replace(super().info, **self.facts)


def test_members_that_cannot_serve_together_are_refused():
    with pytest.raises(ConfigError, match="differ in model"):
        Cluster(FakeReplica(), Other(model="another"))
    with pytest.raises(ConfigError, match="differ in cache_dtype"):
        Cluster(FakeReplica(), Other(cache_dtype="float8"))
    with pytest.raises(ConfigError, match="there are none"):
        Conductor([])
    with pytest.raises(ConfigError, match="local_cache_aware"):
        Conductor([Member("a", FakeReplica())], ConductorSettings(routing="round_robin"))


def test_tokens_come_in_order_and_not_after_the_end(make):
    cluster = make(FakeReplica(), FakeReplica())
    heard = [cluster.submit(str(number), tokens=50) for number in range(20)]
    eventually(lambda: all(one.ends for one in heard))
    for one in heard:
        assert_served(one, 50)
        assert not isinstance(one.events[-1], Token)
