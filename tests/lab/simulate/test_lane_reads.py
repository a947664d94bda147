"""Reads of KV are counted by lane and window."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.checkpoint.zoo import MODELS
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.lane_reads import LaneReads, variation
from jaxserve.lab.simulate.run import System, execute
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig

BLOCK = 16


def reads_of(placement: str, **cache) -> LaneReads:
    """Reads of one request of 64 blocks and 10 tokens on four lanes."""
    system = System(MODELS["llama3-8b"], "a100", MeshConfig(kvp=4, tp=1))
    settings = CacheConfig(block_size=BLOCK, pages=200, placement=placement, **cache)
    replica = system.replica(SchedulerConfig(chunk_tokens=2048), settings)
    reads = LaneReads(4, BLOCK, window=1e6)
    replica.listeners.append(reads)
    execute(replica, [Arrival(0.0, 64 * BLOCK - 1, 10)])
    return reads


def test_a_request_on_one_lane_is_read_there():
    reads = reads_of("grow")
    (tokens,) = reads.between(0.0, 1.0)
    assert reads.spread == 0 and np.count_nonzero(tokens) == 1
    assert tokens.sum() >= reads.steps * 64 * BLOCK
    assert variation(np.array([tokens])) == pytest.approx([3**0.5])


def test_a_request_that_is_dealt_out_is_read_on_all_lanes():
    reads = reads_of("striped", lane_tokens=BLOCK)
    (tokens,) = reads.between(0.0, 1.0)
    assert reads.spread == reads.steps > 0
    assert variation(np.array([tokens]))[0] < 0.1
    assert reads.moves == 0


def test_windows_without_steps_are_empty_and_have_no_variation():
    reads = reads_of("grow")
    reads.window = 1.0
    table = np.array([[0.0, 0.0], [1.0, 3.0]])
    assert variation(table) == pytest.approx([0.5])
    assert reads.between(5.0, 6.5).tolist() == [[0.0] * 4] * 2
