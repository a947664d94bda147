"""Tiers of virtual replicas: what leaves the devices comes back from host memory and disk, in the
time that its links take, and where computing is faster it is computed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.api.request import Slo
from jaxserve.lab.simulate import run as run_module
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.run import System, execute, shape_of
from jaxserve.lab.simulate.tiers import VirtualTiers
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig
from tests.examples import examples

LLAMA = System(shape_of("llama-3-8b"), "a100", MeshConfig())
BLOCK = 512
BLOCK_BYTES = LLAMA.shape.kv_bytes_per_token() * BLOCK
PROMPT = 16  # blocks
PAGES = 2 * PROMPT
GIB = 2**30


def replica(host: int = 0, disk: int = 0, pages: int = PAGES, max_seqs: int = 8):
    """A virtual replica with as many blocks of host memory and disk."""
    share = BLOCK_BYTES / GIB
    cache = CacheConfig(
        block_size=BLOCK,
        pages=pages,
        host_cache_gib=(host + 0.5) * share if host else 0.0,
        disk_cache=f"/no/such/folder:{(disk + 0.5) * share}" if disk else None,
    )
    return LLAMA.replica(SchedulerConfig(max_seqs=max_seqs, chunk_tokens=2048), cache)


def again(others: int, seconds: float = 100.0) -> list[Arrival]:
    """A prompt, prompts of others that push it out, and the same prompt again."""
    prompts = [0, *range(1, others + 1), 0]
    return [
        Arrival(seconds * turn, BLOCK * PROMPT + 1, 2, blocks=tuple(range(n * 100, n * 100 + 17)))
        for turn, n in enumerate(prompts)
    ]


def last(machine, arrivals):
    outcome = execute(machine, arrivals, Slo(ttft=1e4))
    record = max(outcome.records, key=lambda one: one.arrival)
    assert record.reason == "length"
    return record


def counts(machine):
    tiers = machine.scheduler.cache.lower
    assert isinstance(tiers, VirtualTiers)
    return tiers.counts()


def test_a_prompt_comes_back_from_host_memory_in_the_time_that_the_link_takes():
    near = replica(host=200)
    record = last(near, again(4))
    assert record.cached == BLOCK * PROMPT
    seconds = PROMPT * BLOCK_BYTES / run_module.HOST_LINK
    assert seconds < record.first - record.arrival < seconds + 0.1  # a step of one token
    assert counts(near).host_reads == PROMPT
    without = last(replica(), again(4))
    assert without.cached == 0
    assert without.first - without.arrival > 3 * (record.first - record.arrival)


def test_what_leaves_host_memory_comes_back_from_disk_more_slowly():
    far = replica(host=PROMPT, disk=400)
    record = last(far, again(4))
    assert record.cached == BLOCK * PROMPT and counts(far).disk_reads == PROMPT
    assert record.first - record.arrival > PROMPT * BLOCK_BYTES / run_module.DISK
    assert counts(far).to_disk > 0


def test_blocks_on_disk_come_up_while_their_prompt_waits_for_a_slot():
    machine = replica(host=4 * PROMPT, disk=400, max_seqs=1)
    turns = again(6)
    long = Arrival(turns[-1].time - 0.1, BLOCK * PROMPT + 1, 400, blocks=tuple(range(900, 917)))
    last(machine, sorted([*turns, long], key=lambda one: one.time))
    assert counts(machine).prefetched > 0


def test_what_is_gone_from_all_tiers_is_computed():
    record = last(replica(host=PROMPT), again(8))
    assert record.cached == 0


def test_computing_is_chosen_where_the_link_is_slower(monkeypatch):
    monkeypatch.setattr(run_module, "HOST_LINK", 1e8)
    slow = replica(host=200)
    assert last(slow, again(4)).cached == 0
    assert counts(slow).host_reads == 0


def test_of_windows_only_the_last_pages_come_back():
    """A page of any group of gpt-oss is half of a block of all of its layers."""
    system = System(shape_of("gpt-oss-20b"), "a100", MeshConfig())
    cache = CacheConfig(block_size=BLOCK, pages=2 * (PROMPT + 4), host_cache_gib=20.0)
    machine = system.replica(SchedulerConfig(max_seqs=8, chunk_tokens=2048), cache)
    record = last(machine, again(4))
    assert record.cached == BLOCK * PROMPT
    assert (counts(machine).host_reads, counts(machine).further_reads) == (PROMPT, 1)
    page = machine.scheduler.cache.lower.block_bytes
    assert page == system.shape.kv_bytes_per_token() * BLOCK // 2
    seconds = (PROMPT + 1) * page / run_module.HOST_LINK
    assert seconds < record.first - record.arrival < seconds + 0.1


@settings(max_examples=examples(30), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.floats(0.0, 3.0)), min_size=1, max_size=30),
    st.sampled_from([0, 4, PROMPT, 3 * PROMPT]),
    st.sampled_from([0, 7, 5 * PROMPT]),
)
def test_every_request_ends_whatever_is_asked(asked, host, disk):
    time, arrivals = 0.0, []
    for prompt, gap in asked:
        time += gap
        keys = tuple(range(prompt * 100, prompt * 100 + 17))
        arrivals.append(Arrival(time, BLOCK * PROMPT + 1, 3, blocks=keys))
    machine = replica(host, disk if host else 0)
    outcome = execute(machine, arrivals, Slo(ttft=1e4))
    assert [record.reason for record in outcome.records] == ["length"] * len(arrivals)
    machine.scheduler.check()
    if host:
        assert counts(machine).host_blocks <= host
        assert counts(machine).disk_blocks <= disk


@pytest.mark.parametrize("disk", [0, 50])
def test_tiers_leave_a_load_that_fits_the_devices_as_it_was(disk):
    arrivals = again(4)
    plain = execute(replica(pages=1000), arrivals)
    tiered = execute(replica(host=50, disk=disk, pages=1000), arrivals)
    assert plain.records == tiered.records
