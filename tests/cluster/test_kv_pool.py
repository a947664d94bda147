"""Operators ask a conductor which members have a prompt's blocks, have them kept and copied."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.api.errors import RequestError
from jaxserve.api.request import KvSource
from jaxserve.replica.kv_pool import KvHolding
from tests.cluster.fakes import BLOCK, LONG, make
from tests.replica.pools import PoolOf

PROMPT = np.array(LONG, np.int32)
WHOLE = len(LONG) // BLOCK


def refused(work, field: str, status: str) -> str:
    with pytest.raises(RequestError) as refusal:
        work()
    assert (refusal.value.field, refusal.value.status) == (field, status)
    return str(refusal.value)


def test_members_are_found_by_what_they_have_reported(cluster):
    one, two = make(), make()
    both = cluster(one, two)
    two.cache(LONG, 3)
    names = [member.name for member in both.members]
    assert both.conductor.kv_pool.find(PROMPT, "") == [
        KvHolding(names[0], BLOCK, WHOLE, 0, -1),
        KvHolding(names[1], BLOCK, WHOLE, 3, -1),
    ]
    assert not any(one.held for one in both.conductor.kv_pool.find(PROMPT, "a salt"))


def test_all_full_blocks_of_a_prompt_are_found(cluster):
    one = make()
    single = cluster(one)
    one.cache(LONG, WHOLE)
    (found,) = single.conductor.kv_pool.find(PROMPT[: WHOLE * BLOCK], "")
    assert found.held == found.blocks == WHOLE


def test_blocks_are_copied_by_a_job_that_fetches_them(cluster):
    holder, target = make(), make("prefill")
    both = cluster(holder, target)
    holder.cache(LONG, 3)
    name = both.members[1].name
    copied = both.conductor.kv_pool.replicate(PROMPT, "", name, "")
    assert copied == KvHolding(name, BLOCK, WHOLE, 3, -1)
    (job,) = target.seen
    assert job.kv_source == KvSource(both.address(holder), 3, block_size=BLOCK) and job.job
    assert job.prompt.tolist() == LONG[: 3 * BLOCK + 1] and not holder.seen
    assert both.idle()


def test_members_with_other_layers_are_found_by_their_own_keys_and_copy_nothing(cluster):
    """As of models with windows whose stages differ."""
    one, two = make(), make()
    one.cache_layout, two.cache_layout = "a", "b"
    both = cluster(one, two)
    one.cache(LONG, 3)
    two.cache(LONG, 2)
    pool = both.conductor.kv_pool
    assert [holding.on_devices for holding in pool.find(PROMPT, "")] == [3, 2]
    names = [member.name for member in both.members]
    refused(lambda: pool.replicate(PROMPT, "", names[1], names[0]), "source", "INVALID_ARGUMENT")
    refused(lambda: pool.replicate(PROMPT, "", names[1], ""), "prompt", "NOT_FOUND")


def test_a_source_may_be_named(cluster):
    most, some, target = make(), make(), make()
    three = cluster(most, some, target)
    most.cache(LONG, 4)
    some.cache(LONG, 2)
    names = [member.name for member in three.members]
    three.conductor.kv_pool.replicate(PROMPT, "", names[2], names[1])
    assert target.seen[0].kv_source == KvSource(three.address(some), 2, block_size=BLOCK)


def test_copies_that_cannot_be_are_refused_and_say_why(cluster):
    one, two, full = make(), make(), make(max_queue=0)
    three = cluster(one, two, full)
    pool = three.conductor.kv_pool
    names = [member.name for member in three.members]
    refused(lambda: pool.replicate(PROMPT, "", "nowhere", ""), "replica", "NOT_FOUND")
    refused(lambda: pool.replicate(PROMPT, "", names[1], ""), "prompt", "NOT_FOUND")
    refused(lambda: pool.replicate(PROMPT, "", names[1], names[0]), "prompt", "NOT_FOUND")
    one.cache(LONG, 3)
    refused(lambda: pool.replicate(PROMPT, "", names[1], names[1]), "source", "INVALID_ARGUMENT")
    refused(lambda: pool.replicate(PROMPT, "", names[2], ""), "queue", "RESOURCE_EXHAUSTED")
    two.host_cache_gib = 0.0
    said = refused(lambda: pool.replicate(PROMPT, "", names[1], ""), "replica", "INVALID_ARGUMENT")
    assert "--host_cache_gib" in said


def test_a_copy_that_fails_says_so(cluster):
    holder, target = make(), make(paused=True)
    both = cluster(holder, target)
    holder.cache(LONG, 3)
    target.submit = lambda request, sink: (
        type(target).submit(target, request, sink),
        target.cancel(request.id, "cancelled"),
    )
    pool = both.conductor.kv_pool
    name = both.members[1].name
    said = refused(lambda: pool.replicate(PROMPT, "", name, ""), "replica", "UNAVAILABLE")
    assert "cancelled" in said


def test_leases_are_kept_by_the_member_that_has_most_of_a_prompt(cluster):
    one, two = make(), make()
    both = cluster(one, two)
    pools = [PoolOf(), PoolOf()]
    for fake, pool, blocks in zip((one, two), pools, (1, 3)):
        fake.kv_pool = pool.pool
        fake.cache(LONG, blocks)
        pool.hold(PROMPT, 2 * blocks - 1)
    names = [member.name for member in both.members]
    pool = both.conductor.kv_pool
    refused(lambda: pool.lease(PROMPT, "", 0.0, ""), "seconds", "INVALID_ARGUMENT")
    refused(lambda: pool.lease(PROMPT, "", 9.0, "nowhere"), "replica", "NOT_FOUND")
    refused(lambda: pool.lease(PROMPT, "", 9.0, names[1]), "prompt", "RESOURCE_EXHAUSTED")
    made = pool.lease(PROMPT, "", 9.0, names[0])
    assert (made.replica, made.on_devices) == (names[0], 1)
    assert pool.leases() == [made]
    assert pool.release(made.id) and not pool.release(made.id)
    assert not pools[0].cache.pages.locks


def test_a_member_without_a_pool_is_named(cluster):
    one = make()
    single = cluster(one)
    one.cache(LONG, 3)
    pool = single.conductor.kv_pool
    refused(lambda: pool.lease(PROMPT, "", 9.0, ""), "replica", "UNIMPLEMENTED")
    assert pool.leases() == [] and not pool.release("x")
