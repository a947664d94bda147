"""Operators find the cached blocks of a prompt on a replica, and keep them there for a time."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.api.errors import RequestError
from jaxserve.replica.kv_pool import HasKvPool, KvHolding
from tests.cache.test_tiers import Lower
from tests.replica.holders import virtual
from tests.replica.pools import PoolOf

PROMPT = np.arange(10, 27, dtype=np.int32)  # four full blocks, and a part
OTHERS = [np.arange(start, start + 17, dtype=np.int32) for start in (100, 200, 300, 400)]


def refused(work, field: str) -> str:
    with pytest.raises(RequestError) as refusal:
        work()
    assert refusal.value.field == field
    return refusal.value.status


def test_the_blocks_of_a_prompt_are_found_on_pages_and_below():
    lower = Lower()
    made = PoolOf(lower=lower)
    keys = made.hold(PROMPT, 2)
    lower.keys = {keys[2]}
    assert made.pool.find(PROMPT, "") == [KvHolding("", 4, 4, 2, 1)]
    assert made.pool.find(PROMPT, "another tenant's") == [KvHolding("", 4, 4, 0, 0)]
    assert made.pool.find(PROMPT[:3], "") == [KvHolding("", 4, 0, 0, 0)]


def test_leased_blocks_stay_while_others_come_and_go_until_the_lease_ends():
    made = PoolOf()
    made.hold(PROMPT, 4)
    lease = made.pool.lease(PROMPT, "", 10.0, "")
    assert (lease.on_devices, lease.below, lease.seconds) == (4, 0, 10.0)
    for _ in range(3):
        for other in OTHERS:
            made.hold(other, 4)
            made.cache.check()
    assert made.pool.find(PROMPT, "")[0].held == 4
    made.now += 4
    assert [one.seconds for one in made.pool.leases()] == [6.0]
    made.now += 6
    assert made.pool.leases() == [] and not made.cache.pages.locks
    for other in OTHERS:
        made.hold(other, 4)
    assert made.pool.find(PROMPT, "")[0].held == 0
    assert not made.pool.release(lease.id)


def test_a_lease_is_released_before_its_time():
    made = PoolOf()
    made.hold(PROMPT, 4)
    lease = made.pool.lease(PROMPT, "", 10.0, "")
    assert made.pool.release(lease.id) and not made.pool.release(lease.id)
    assert not made.cache.pages.locks


def test_leases_take_a_quarter_of_the_pages_and_no_lease_ends_for_another():
    made = PoolOf(pages=16)
    made.hold(PROMPT, 4)
    made.hold(OTHERS[0], 2)
    first = made.pool.lease(PROMPT, "", 10.0, "")
    made.pool.lease(PROMPT, "", 20.0, "")  # the same blocks, once more
    assert (
        refused(lambda: made.pool.lease(OTHERS[0], "", 1.0, ""), "prompt") == "RESOURCE_EXHAUSTED"
    )
    assert len(made.pool.leases()) == 2 and first in made.pool.leases()


def test_blocks_below_the_devices_are_leased_too():
    lower = Lower()
    made = PoolOf(lower=lower)
    keys = made.hold(PROMPT, 2)
    lower.keys = {keys[2]}
    lease = made.pool.lease(PROMPT, "", 10.0, "")
    assert (lease.on_devices, lease.below) == (2, 1) and lower.locked == {keys[2]}
    made.pool.release(lease.id)
    assert not lower.locked


def test_a_promise_that_ends_leaves_the_lease_of_the_same_blocks():
    lower = Lower()
    made = PoolOf(lower=lower)
    keys = made.hold(PROMPT, 2)
    lower.keys = {keys[2]}
    made.pool.lease(PROMPT, "", 10.0, "")
    hashes = made.cache.block_hashes("", lambda first, last: PROMPT[first:last])
    made.cache.promise(7, 1.0, hashes, 4)
    made.cache.promises.release(7)
    assert set(made.cache.pages.locks) == set(keys[:2]) and lower.locked == {keys[2]}


def test_what_cannot_be_leased_is_refused_and_says_why():
    made = PoolOf()
    lease = made.pool.lease
    assert refused(lambda: lease(PROMPT, "", 10.0, ""), "prompt") == "NOT_FOUND"
    made.hold(PROMPT, 4)
    for seconds in (0.0, -1.0, 86401.0, float("nan"), float("inf")):
        refused(lambda seconds=seconds: lease(PROMPT, "", seconds, ""), "seconds")
    refused(lambda: lease(PROMPT, "", 10.0, "elsewhere"), "replica")
    refused(lambda: made.pool.replicate(PROMPT, "", "elsewhere", ""), "replica")


def test_a_replica_has_a_pool_and_its_leases_end_as_its_clock_goes():
    holder = virtual()
    replica = holder.replica
    assert isinstance(replica, HasKvPool)
    replica.start()
    holder.submit("r", prompt=37, tokens=2)
    replica.advance(100.0)
    prompt = np.arange(3, 40, dtype=np.int32)
    assert replica.kv_pool.find(prompt, "")[0].held == 2
    replica.kv_pool.lease(prompt, "", 50.0, "")
    assert replica.scheduler.cache.leases
    replica.advance(200.0)
    assert not replica.scheduler.cache.leases
