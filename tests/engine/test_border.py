"""What crosses from host to device in a step depends on the step alone, up to contexts of a million
tokens."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.cache import CacheManager
from jaxserve.engine.step_demand import StepDemand
from jaxserve.engine.step_rows import StepRows
from jaxserve.engine.step_shapes import shapes
from jaxserve.scheduling import Scheduler
from jaxserve.scheduling.batch_reader import StepResults
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig

# in so many steps every sequence begins three blocks
BLOCK = 16
STEPS = 48


def decode_messages(context: int, lanes: int, company: int) -> list[tuple]:
    """Measures the steps that decode after a prompt of `context` tokens, beside `company` short
    sequences: shape, bytes to devices, bytes of the batch they are made from."""
    config = SchedulerConfig(max_seqs=8, chunk_tokens=8192)
    room = CacheConfig(
        block_size=BLOCK,
        pages=context // BLOCK + 100,
        lane_tokens=context // lanes,
        prefix_caching=False,
    )
    cache = CacheManager(room, lanes, config.max_seqs)
    scheduler = Scheduler(config, cache, MeshConfig(kvp=lanes), context + 1000)
    compiled = shapes(config, lanes, BLOCK)
    params = SamplingParams(temperature=0, max_tokens=900)
    for number, length in enumerate([context] + [BLOCK] * company):
        scheduler.add(Request(str(number), np.zeros(length, np.int32), params))
    found = []
    while len(found) < STEPS:
        batch = scheduler.start(0.0)
        demand = StepDemand.of(batch, lanes, config.tile, BLOCK)
        shape = next(shape for shape in compiled if demand.fits(shape))
        arrays = StepRows(batch, demand, shape, BLOCK).arrays()
        if batch.is_decode.all() and len(batch.seq) == 1 + company:
            assert batch.start.max() >= context
            found.append(
                (str(shape), arrays.rows.nbytes + arrays.early_updates.nbytes, batch.nbytes)
            )
        scheduler.finish(batch, StepResults(np.ones(len(batch.slot), np.int32)), 0.0)
    return found


@pytest.mark.parametrize("lanes, company", [(1, 0), (1, 3), (4, 0), (4, 3)])
def test_a_decode_at_a_million_tokens_sends_what_it_sends_at_a_thousand(lanes, company):
    short, long = (decode_messages(context, lanes, company) for context in (2**10, 2**20))
    assert [message[:2] for message in short] == [message[:2] for message in long]
    # new blocks fall on other steps, but not more of them
    assert sum(size for *_, size in short) == sum(size for *_, size in long)
    assert max(size for _, size, _ in long) < 8192
