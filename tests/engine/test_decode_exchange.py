"""Decodes of sequences on several lanes go round a ring alone and beside chunks of prompts: tokens
are those of one lane, and what is decoded lies evenly over the lanes."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from jaxserve.api.events import Token
from jaxserve.engine.engine import Engine
from jaxserve.lanes.groups import group_around
from jaxserve.scheduling import Batch
from tests.engine.harness import Runner, assert_empty, engine, shapes_of, shared, watch_batches

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")

BLOCK = 4
LANE_TOKENS = 32
SIZES = dict(chunk=32, seqs=4, pages=100, block=BLOCK, max_len=256)
LENGTHS = (150, 90, 130, 20)  # all but the last lie on several lanes
PROMPTS = [np.random.default_rng(length).integers(3, 500, length) for length in LENGTHS]
TOKENS = 40
MESHES = ("kvp=2", "kvp=4", "kvp=2,tp=2")
EXCHANGES = ("gather", "pass_q", "pass_kv", "visit")
ALWAYS = set(zip(MESHES, EXCHANGES))
PAIRS = [
    pytest.param(*pair, marks=() if pair in ALWAYS else pytest.mark.matrix)
    for pair in itertools.product(MESHES, EXCHANGES)
]


def generated(real: Engine) -> list[list[int]]:
    """Tokens after each prompt, which comes when the one before it decodes."""
    runner = Runner(real)
    ids = []
    for prompt in PROMPTS:
        ids.append(runner.submit(prompt, max_tokens=TOKENS, ignore_eos=True))
        while not any(isinstance(event, Token) for event in runner.events[ids[-1]]):
            real.step()
    runner.run()
    return [runner.ids(id) for id in ids]


@pytest.fixture(scope="module")
def right() -> list[list[int]]:
    return generated(shared())


def assert_grown_evenly(batches: list[Batch]) -> None:
    """Checks that blocks which decodes add to a sequence on several lanes differ by one between
    lanes of its group at most."""
    held: dict[int, list[np.ndarray]] = {}
    group: dict[int, range] = {}
    for batch in batches:
        for row in np.flatnonzero(batch.is_decode & batch.spread).tolist():
            seq = int(batch.seq[row])
            if LENGTHS[seq] < LANE_TOKENS:
                continue
            held.setdefault(seq, []).append(batch.blocks_per_lane[row])
            group[seq] = group_around(int(batch.lane[row]), int(batch.group_size[row]))
    assert len(held) == 3
    for seq, rows in held.items():
        gained = (rows[-1] - rows[0])[group[seq].start : group[seq].stop]
        assert gained.sum() >= TOKENS // BLOCK - 1 and np.ptp(gained) <= 1


@pytest.mark.parametrize("mesh, exchange", PAIRS)
def test_decodes_around_a_ring_beside_chunks_say_what_one_lane_does(mesh, exchange, right):
    real = engine(
        mesh=mesh,
        exchange=exchange,
        decode_exchange="pass_q",
        placement="striped",
        lane_tokens=LANE_TOKENS,
        **SIZES,
    )
    shapes = shapes_of(real)
    batches: list[Batch] = []
    watch_batches(real, batches.append)
    assert generated(real) == right
    beside = {"nothing": 0, "local chunks": 0, "spread chunks": 0}
    for shape, batch in zip(shapes, batches):
        if not (batch.is_decode & batch.spread).any():
            continue
        assert shape.decode_ring
        chunks = batch.length > 1
        kind = "local chunks" if chunks.any() else "nothing"
        if (chunks & batch.spread).any():
            kind = "spread chunks"
            assert exchange in shape.exchanges
        beside[kind] += 1
    assert min(beside.values()) > 0, beside
    assert_grown_evenly(batches)
    assert_empty(real)
