"""Steps of prompts and decodes that a placement deals over lanes: as they are predicted before any
block has its page, beside what they take on a virtual replica."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.api.batch import Batch
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.replica import StagePassage, VirtualReplica
from jaxserve.lab.simulate.run import System, execute
from jaxserve.lanes.dealing import PromptLanes, drawn_shares
from jaxserve.lanes.placement import PLACEMENTS, Grow, Hashed, Random, RoundRobin, Striped
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig

SETTINGS = {
    "striped": {"lane_tokens": 64},
    "zigzag": {"lane_tokens": 64},
    "hashed": {"segment_tokens": 1024},
}


def replica(placement: str, lanes: int) -> VirtualReplica:
    return System(MODELS["llama3-8b"], "h100", MeshConfig(kvp=lanes)).replica(
        SchedulerConfig(chunk_tokens=2048, chunking="static", max_seqs=64),
        CacheConfig(block_size=64, placement=placement, **SETTINGS.get(placement, {})),
    )


class Batches:
    """The batches that a replica issues."""

    def __init__(self, made: VirtualReplica):
        self.issued: list[Batch] = []
        made.listeners.append(self)

    def step_issued(self, batch: Batch, passage: StagePassage) -> None:
        self.issued.append(batch)

    def step_read(self, batch: Batch, now: float) -> None:
        pass


@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_prompt_takes_as_long_as_its_placement_lets_it(placement, lanes):
    """On average over some prompts: where few segments come to lie is chance."""
    for tokens in (500, 3_000, 24_000, 120_000):
        made = replica(placement, lanes)
        predicted = made.scheduler.predictor.prefill(0, tokens, 2048)
        arrivals = [Arrival(1000.0 * number, tokens, 1) for number in range(4)]
        seconds = [record.ttft for record in execute(made, arrivals).records]
        assert predicted == pytest.approx(np.mean(seconds), rel=0.12), tokens


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_decodes_take_as_long_as_their_placement_lets_them(placement):
    for tokens, count in ((4_000, 2), (4_000, 16), (20_000, 16)):
        made = replica(placement, 8)
        batches = Batches(made)
        execute(made, [Arrival(0.0, tokens, 40)] * count)
        seconds = [
            batch.seconds for batch in batches.issued if batch.length.tolist() == [1] * count
        ]
        predictor = made.scheduler.predictor
        load = predictor.lane_costs.decodes_ahead(
            -(-count // 8), count * tokens / 8, tokens, tokens
        )
        assert predictor.lane(load) == pytest.approx(np.mean(seconds), rel=0.04), (tokens, count)


def test_a_placement_says_over_how_many_lanes_a_prompt_lies():
    lanes = lambda placement, tokens: PromptLanes(placement, 16).dealt_over(tokens)
    assert lanes(Grow(8, limit=4), 1000) == 1
    assert [lanes(Striped(8, limit=4), tokens) for tokens in (64, 65)] == [1, 8]
    assert lanes(RoundRobin(8), 1) == lanes(Random(8), 1) == 8
    hashed = Hashed(32, stripe=4, pool=8)
    assert [lanes(hashed, tokens) for tokens in (64, 65, 10_000)] == [1, 8, 8]
    grow = PromptLanes(Grow(8, limit=4), 16)
    assert grow.meeting(np.array([64, 65, 129, 10_000])).tolist() == [1, 2, 4, 8]
    pool = PromptLanes(hashed, 16)
    assert pool.meeting(np.array([64, 65, 10_000])).tolist() == [1, 8, 8]


def test_lanes_have_expected_shares_of_a_prompt():
    assert PromptLanes(Striped(4), 16).shares(160, 4) == [0.25] * 4
    assert PromptLanes(Grow(4, limit=1), 16).shares(40, 4) == [1 / 3] * 3
    for segments in (1, 2, 5, 40, 3000):
        shares = drawn_shares(segments, 8)
        assert sum(shares) == pytest.approx(1) and shares == tuple(sorted(shares, reverse=True))
    assert drawn_shares(1, 8)[0] == 1 and drawn_shares(2, 2)[0] == pytest.approx(0.75, abs=0.03)
    assert drawn_shares(3000, 8)[0] == pytest.approx(1 / 8, rel=0.1)
