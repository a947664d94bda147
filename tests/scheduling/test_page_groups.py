"""Layers with sliding windows: how their pages come and go beside those of other sequences."""

from __future__ import annotations

import pytest

from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig
from tests.lanes.plans import Plans
from tests.scheduling.fakes import Replica


@pytest.mark.parametrize("length", [100, 200])
@pytest.mark.parametrize("chunking", ["static", "adaptive"])
def test_chunks_leave_decodes_the_pages_that_they_were_promised(chunking, length):
    """A chunk has pages in all groups for all of its blocks, most of which no later token sees."""
    replica = Replica(
        SchedulerConfig(max_seqs=4, decode_reserve=1.0, chunk_tokens=100, chunking=chunking),
        CacheConfig(block_size=4, pages=100),
        windows=(8, 8, 8),
    )
    replica.add([1, 2, 3], max_tokens=60, ignore_eos=True)
    replica.step()
    replica.add([number % 12 for number in range(length)], max_tokens=40, ignore_eos=True)
    replica.drain()
    replica.check_answers()
    assert not replica.scheduler.slots.preemptions


ON_LANES = [("striped", 2), ("zigzag", 4)]
MORE_LANES = [("zigzag", 2), ("striped", 4), ("striped", 8), ("zigzag", 8)]


@pytest.mark.parametrize(
    "placement, lanes",
    [*ON_LANES, *(pytest.param(*case, marks=pytest.mark.matrix) for case in MORE_LANES)],
)
def test_prompts_whose_blocks_move_by_plans_find_in_their_pages_what_windows_see(placement, lanes):
    """While pages are short, so that sequences are preempted and blocks evicted."""
    replica = Replica(
        SchedulerConfig(max_seqs=6, chunk_tokens=16, decode_reserve=0.0),
        CacheConfig(block_size=4, pages=150 // lanes + 4),
        MeshConfig(kvp=lanes),
        placement,
        planner=Plans(lanes, lanes, longest=40),
        windows=(8, 21),
    )
    for number in range(16):
        tail = [(number * token) % 11 for token in range(70)]
        replica.add([1, 2, 3] * 7 + tail, max_tokens=120, ignore_eos=True)
    replica.drain()
    replica.check_answers()
    assert replica.device.moved > 10 and replica.scheduler.slots.preemptions
