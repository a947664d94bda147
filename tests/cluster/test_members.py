"""Members that come and go while a conductor serves, and prefixes that one fetches from another."""

from __future__ import annotations

import dataclasses

import pytest

from jaxserve.api.errors import RequestError
from jaxserve.api.request import KvSource
from jaxserve.cluster.member import KvPeer
from jaxserve.settings.schema import ConfigError
from tests.cluster.fakes import BLOCK, LONG, RoleCluster, RoleReplica, assert_right, make
from tests.waiting import eventually

WHOLE = len(LONG) // BLOCK


class Late(RoleReplica):
    """A fake of another process, which says what it is once it answers. model: that it serves."""

    answers = False
    served = "fake"

    @property
    def info(self):
        if not self.answers:
            raise RequestError("", "it has not answered yet", "UNAVAILABLE")
        return dataclasses.replace(super().info, model=self.served)


# --- requests among equal members


def test_requests_go_to_members_with_fewer_of_them(cluster):
    fakes = [make(step_seconds=0.002) for _ in range(3)]
    three = cluster(*fakes)
    for number in range(9):
        heard = three.submit(str(number), prompt=[number], tokens=1000)
        eventually(lambda heard=heard: heard.tokens)  # its prefill is over: no queue tells of it
    assert [len(fake.requests) for fake in fakes] == [3, 3, 3]


def test_a_request_does_not_wait_for_a_slot_where_another_member_has_one(cluster):
    full, free = make(paused=True), make(paused=True)
    both = cluster(full, free)
    full.cache(LONG, WHOLE)
    both.members[1].prefill_costs.scale = 10.0  # it would be slower
    for number in range(full.info.max_seqs):
        both.members[0].work.expect_decode(f"busy {number}", 10, 0.0)
        both.members[0].work.begin_decode(f"busy {number}", 0.0)
    both.members[0].completion = 60.0
    both.submit()
    assert free.requests and not full.requests


# --- members that come


def test_a_member_that_comes_is_sent_requests(cluster):
    first, second = make(paused=True), make(paused=True)
    one = cluster(first)
    one.submit("a")
    second.start()
    one.conductor.add(one.member(second))
    one.submit("b")
    assert list(first.requests) == ["a"] and list(second.requests) == ["b"]
    assert one.conductor.info.max_seqs == 2 * first.info.max_seqs
    second.close()


def test_a_member_joins_once_it_answers(cluster):
    known, late = make(paused=True), Late()
    both = cluster(known, late)
    roles = [row["role"] for row in both.conductor.view()["members"]]
    assert roles == ["mixed", ""]
    both.submit("a")
    both.submit("b")
    assert len(known.requests) == 2
    late.answers = True
    eventually(lambda: both.members[1].joined)
    assert_right(both.serve("c"))
    assert late.seen


def test_a_member_of_another_model_is_not_used_and_says_why(cluster):
    known, other = make(), Late()
    both = cluster(known, other)
    other.served = "another"
    other.answers = True
    eventually(lambda: both.members[1].fault)
    assert "differ in model" in both.members[1].fault
    for number in range(3):
        assert_right(both.serve(str(number)))
    assert not other.seen


def test_a_conductor_needs_a_member_that_answers():
    with pytest.raises(ConfigError, match="none that answer"):
        RoleCluster(Late())


# --- members that go


def test_a_member_that_goes_ends_what_it_has_and_is_closed(cluster):
    staying, going = make(), make(step_seconds=0.002)
    both = cluster(staying, going)
    staying.available = False
    heard = both.submit("old", tokens=100)
    going.paused = True
    staying.available = True
    both.conductor.remove(both.members[1])
    for number in range(3):
        assert_right(both.serve(str(number)))
    assert len(staying.seen) == 3 and not going.closed
    going.paused = False
    eventually(lambda: heard.ends)
    assert_right(heard, tokens=100)
    eventually(lambda: going.closed)
    assert both.conductor.members == (both.members[0],)
    assert not staying.closed


def test_requests_of_a_member_that_goes_and_dies_are_redone(cluster):
    staying, going = make(), make(paused=True)
    both = cluster(staying, going)
    staying.available = False
    heard = both.submit()
    staying.available = True
    both.conductor.remove(both.members[1])
    going.die()
    eventually(lambda: heard.ends)
    assert_right(heard)
    eventually(lambda: going.closed and both.idle())


def test_a_member_that_prefills_goes_after_its_last_job(cluster):
    prefill, decode = make("prefill", True), make("decode", True)
    both = cluster(prefill, decode)
    heard = both.submit()
    both.conductor.remove(both.members[0])
    both.conductor.check()
    assert not prefill.closed
    prefill.paused = decode.paused = False
    eventually(lambda: heard.ends)
    assert_right(heard)
    eventually(lambda: prefill.closed)


def test_what_a_member_had_cached_is_not_taken_for_that_of_its_successor(cluster):
    staying, going, coming = make(), make(), make()
    both = cluster(staying, going)
    going.cache(LONG, WHOLE)
    both.conductor.remove(both.members[1])
    eventually(lambda: going.closed)
    going.cache(LONG, WHOLE)  # said too late
    coming.start()
    member = both.member(coming)
    both.conductor.add(member)
    assert member.number == both.members[1].number
    assert both.conductor.router.prefixes(both.request()) == [0, 0]
    coming.close()


def test_the_last_member_may_go_and_another_come(cluster):
    going, coming = make(), make()
    one = cluster(going)
    one.conductor.remove(one.members[0])
    with pytest.raises(RequestError) as refused:
        one.submit()
    assert refused.value.status == "UNAVAILABLE" and not one.conductor.available
    eventually(lambda: going.closed)
    coming.start()
    one.conductor.add(one.member(coming))
    assert_right(one.serve())
    coming.close()


# --- prefixes that another member has


def slow(made: RoleCluster) -> None:
    """Has members be expected to take 0.01 s per token, a hundred times the nominal seconds."""
    for member in made.members:
        member.prefill_costs.scale = 100.0


def fetched(*fakes, cluster, **settings) -> tuple[KvSource | None, object]:
    """From where a request is to fetch its prefix, where the second member has it and is busy."""
    both = cluster(*fakes, routing="cache_aware", **settings)
    slow(both)
    fakes[1].cache(LONG, WHOLE)
    for number in range(4):
        both.members[1].work.begin_prefill(f"busy {number}", 5.0, both.conductor.now())
    assert_right(both.serve())
    (taker,) = [fake for fake in fakes if fake.own]
    assert taker is fakes[0]
    return taker.own[-1].kv_source, both.address(fakes[1])


def test_a_prefix_is_fetched_from_a_busy_member_that_has_it(cluster):
    source, address = fetched(make(), make(), cluster=cluster)
    assert source == KvSource(address, WHOLE, block_size=BLOCK)


def test_a_prefix_is_computed_where_that_takes_less(cluster):
    source, _ = fetched(make(), make(), cluster=cluster, kv_bandwidth=1e-7)
    assert source is None


@pytest.mark.parametrize(
    "measured, expected, is_fetched",
    [
        ({"holder:1": 1e12}, 1e-7, True),
        ({"holder:1": 100.0}, 1.0, False),
        ({"another:1": 100.0}, 1.0, True),
        ({}, 1.0, True),
    ],
)
def test_a_fetch_is_predicted_by_what_was_measured_between_the_two(
    cluster, measured, expected, is_fetched
):
    """measured: bytes per second at the taker, by source; expected: GB/s of the flag."""
    both = cluster(make(), make(), routing="cache_aware", kv_bandwidth=expected)
    slow(both)
    taker, holder = both.members
    holder.kv_peer = lambda: KvPeer(("holder:1", "holder:2"))
    taker.kv_peer = lambda: KvPeer(rates=measured)
    holder.replica.cache(LONG, WHOLE)
    for number in range(4):
        holder.work.begin_prefill(f"busy {number}", 5.0, both.conductor.now())
    assert_right(both.serve())
    source = taker.replica.own[-1].kv_source
    assert (source is not None) is is_fetched
    if source is not None:
        assert source == KvSource("holder:1,holder:2", WHOLE, block_size=BLOCK)


def test_a_prefix_is_computed_where_its_holder_cannot_be_asked(cluster):
    one, holder = make(), make()
    both = cluster(one, holder, routing="cache_aware")
    slow(both)
    both.members[1].address = None
    holder.cache(LONG, WHOLE)
    both.members[1].work.begin_prefill("busy", 20.0, both.conductor.now())
    assert_right(both.serve())
    assert one.own[-1].kv_source is None


def test_a_member_that_prefills_for_another_fetches_a_prefix_too(cluster):
    one, holder, decode = make("prefill"), make("prefill"), make("decode")
    three = cluster(one, holder, decode, routing="cache_aware")
    slow(three)
    holder.cache(LONG, WHOLE)
    three.members[1].work.begin_prefill("busy", 20.0, three.conductor.now())
    assert_right(three.serve())
    (job,) = one.jobs
    assert job.kv_source == KvSource(three.address(holder), WHOLE, block_size=BLOCK)
    assert decode.own[-1].kv_source == KvSource(three.address(one), WHOLE, job.id, BLOCK)


def test_members_may_have_blocks_of_other_sizes(cluster):
    """A prefix is found in the holder's blocks, and the taker is told how large these are."""
    one, holder, decode = make("prefill"), make("prefill", block_size=24), make("decode")
    three = cluster(one, holder, decode, routing="cache_aware")
    slow(three)
    whole = len(LONG) // 24
    holder.cache(LONG, whole)
    three.members[1].work.begin_prefill("busy", 20.0, three.conductor.now())
    assert_right(three.serve())
    (job,) = one.jobs
    assert job.kv_source == KvSource(three.address(holder), whole, block_size=24)
    assert decode.own[-1].kv_source == KvSource(three.address(one), WHOLE, job.id, BLOCK)
