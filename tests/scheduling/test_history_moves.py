"""Planned prompts find their history dealt out evenly where their group of lanes grows, and pass
that on to decodes."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.api.batch import Batch
from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.cache import CacheManager, LaneRules
from jaxserve.lanes.cost import moves_per_pair
from jaxserve.lanes.planner import PlanPart
from jaxserve.scheduling import Scheduler
from jaxserve.scheduling.batch_reader import StepResults
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig

LANES = 8
BLOCK = 16
EIGHT = tuple(range(LANES))


class Parts:
    """Plans the same parts for every prompt."""

    def __init__(self, *parts: PlanPart):
        self.parts = parts

    def arrived(self, now: float) -> None:
        pass

    def __call__(self, pending: list[float], start: int, target: int) -> tuple[PlanPart, ...]:
        return self.parts


def batches_of(
    history: int, total: int, first: tuple[int, ...], tokens: int = 1, **scheduler
) -> list[Batch]:
    """All batches of one prompt of `total` tokens, of which `history` on the `first` lanes and the
    others on all, and of its completion of `tokens` tokens."""
    config = SchedulerConfig(max_seqs=4, chunk_tokens=512, planner="cdsp", **scheduler)
    rules = LaneRules(config.stripe(BLOCK), moves_per_pair(512, BLOCK, LANES))
    pages = CacheConfig(block_size=BLOCK, pages=total // BLOCK + 100, placement="zigzag")
    cache = CacheManager(pages, LANES, 4, rules=rules)
    plan = Parts(PlanPart(history, first), PlanPart(total, EIGHT))
    core = Scheduler(config, cache, MeshConfig(kvp=LANES), total + 1000, planner=plan)
    sampling = SamplingParams(temperature=0, max_tokens=tokens)
    core.add(Request("a", np.zeros(total, np.int32), sampling))
    batches = []
    while core.sequences:
        batch = core.start(0.0)
        assert batch is not None
        core.finish(batch, StepResults(np.ones(1, np.int32)), 0.0)
        if not batch.number % 8:
            core.check()
        batches.append(batch)
    return batches


@pytest.mark.parametrize(
    "history, total, first",
    [
        (32_768, 65_536, (0,)),
        (32_768, 65_536, (0, 1, 2, 3)),
        (131_072, 163_840, (0, 1)),
    ],
)
def test_every_step_on_a_grown_group_finds_even_history(history, total, first):
    """Nothing moves that need not, each lane of the former group gives away what it has too many,
    and these alone compute until then."""
    batches = batches_of(history, total, first)
    grown = [batch for batch in batches if batch.start[0] >= history]
    assert grown and all(np.ptp(batch.blocks_per_lane[0]) <= 1 for batch in grown)
    moves = np.concatenate([batch.moves for batch in batches])
    assert len(moves) == history // BLOCK * (LANES - len(first)) // LANES
    assert set(moves[:, 0].tolist()) == set(first)
    ahead = [batch for batch in batches if len(batch.moves) and batch.start[0] < history]
    assert all(batch.dealt == {0: range(len(first))} for batch in ahead)
    before = [batch for batch in batches if batch.start[0] < ahead[0].start[0]]
    assert len(before) > len(ahead)  # which are no earlier than need be
    assert all((batch.group_size == len(first)).all() for batch in before)


def test_decodes_go_on_to_move_what_is_uneven():
    """The grown part is one step, in which not all of a long history can move: with no costs known
    the prompt does not wait for it."""
    batches = batches_of(131_072, 131_072 + 512, (0,), 40, exchange="pass_kv")
    decodes = [batch for batch in batches if batch.is_decode[0]]
    assert np.ptp(decodes[0].blocks_per_lane[0]) > 1000
    assert np.ptp(decodes[-1].blocks_per_lane[0]) <= 2 and not len(decodes[-1].moves)
    assert max(len(batch.moves) for batch in decodes) == 7 * moves_per_pair(512, BLOCK, LANES)
