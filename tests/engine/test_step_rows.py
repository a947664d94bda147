"""Whatever the scheduler starts fits a compiled shape, and the message to the devices says all of
it once: no token lost, none twice."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter

import numpy as np
import pytest

from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.cache import CacheManager
from jaxserve.engine.step_demand import StepDemand
from jaxserve.engine.step_rows import StepArrays, StepRows
from jaxserve.engine.step_shapes import (
    FEED,
    LENGTH,
    NOWHERE,
    StepShape,
    layout,
    sample_sizes,
    shapes,
)
from jaxserve.lanes.exchange import ROOMS, rows_with_room
from jaxserve.lanes.groups import group_around
from jaxserve.scheduling import Batch, Scheduler
from jaxserve.scheduling.batch_reader import StepResults
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig
from tests.examples import examples

BLOCK = 4
CONFIGS = [  # lanes, sequences, chunk tokens, placement, tokens of a request per lane
    (1, 1, 1, "grow", None),
    (1, 5, 7, "grow", None),
    (1, 8, 100, "grow", None),
    (1, 16, 256, "grow", None),
    (2, 4, 1, "random", None),
    (2, 8, 16, "grow", 40),
    (2, 7, 130, "random", None),
    (3, 6, 64, "round_robin", None),
    (4, 8, 200, "grow", 30),
    (4, 5, 320, "random", None),
]


def traffic(
    config: SchedulerConfig, lanes: int, placement: str, lane_tokens: int | None, seed: int
):
    """Batches of random requests, with shared prefixes, full queues, preemptions and cancels."""
    rng = random.Random(seed)
    room = CacheConfig(
        block_size=BLOCK,
        pages=60 // lanes + 60,
        lane_tokens=lane_tokens,
        placement=placement,
    )
    cache = CacheManager(room, lanes, config.max_seqs)
    scheduler = Scheduler(config, cache, MeshConfig(kvp=lanes), 400)
    flights = []
    number = 0
    while number < 60 or scheduler.sequences:
        while number < 60 and scheduler.slots.waiting < 3:
            length = rng.choice((1, 2, rng.randint(1, 20), rng.randint(1, 200)))
            prompt = np.roll(np.arange(300, dtype=np.int32), rng.choice((0, 0, number)))[:length]
            params = SamplingParams(
                temperature=0, max_tokens=rng.randint(1, 30), n=rng.choice((1, 1, 3))
            )
            scheduler.add(Request(str(number), prompt, params))
            number += 1
        batch = scheduler.start(0.0)
        if batch is not None:
            flights.append(batch)
            yield batch
        if len(flights) > 1 or (batch is None and flights):
            first = flights.pop(0)
            tokens = np.array([rng.randint(3, 299) for _ in first.slot], np.int32)
            scheduler.finish(first, StepResults(tokens), 0.0)
        if rng.random() < 0.05 and scheduler.requests.entries:
            scheduler.cancel(rng.choice(list(scheduler.requests.entries)), 0.0)


def said(arrays: StepArrays, lanes: int) -> Counter:
    """(slot, position, token, spread, lane) of every token in the message; a local token must be on
    its home lane."""
    shape = arrays.shape
    found = Counter()
    view = layout(shape, BLOCK).views(arrays.rows)
    for lane in range(lanes):
        row = token = 0
        for groups, spread in ((shape.local, False), (shape.spread, True)):
            for rows, width in groups:
                for _ in range(rows):
                    slot, start, length, adapter = view["rows"][lane, row].tolist()
                    assert not adapter
                    assert 0 <= length <= width
                    for i in range(length):
                        found[
                            slot,
                            start + i,
                            int(view["tokens"][lane, token + i]),
                            spread,
                            None if spread else lane,
                        ] += 1
                    row = row + 1
                    token = token + width
    return found


def meant(batch: Batch) -> Counter:
    found = Counter()
    at = 0
    for slot, lane, start, length, feed, spread in zip(
        batch.slot, batch.lane, batch.start, batch.length, batch.is_decode, batch.spread
    ):
        ids = [FEED] if feed else batch.tokens[at : at + length].tolist()
        at += 0 if feed else length
        for i, token in enumerate(ids):
            found[
                int(slot), int(start) + i, token, bool(spread), None if spread else int(lane)
            ] += 1
    return found


def check_message(batch: Batch, arrays: StepArrays, lanes: int) -> None:
    view = layout(arrays.shape, BLOCK).views(arrays.rows)
    assert said(arrays, lanes) == meant(batch)
    check_samples(batch, arrays, view)
    check_held(batch, arrays, view)
    riding = [
        (lane, *entry)
        for lane in range(lanes)
        for entry in view["deltas"][lane].tolist()
        if entry[0] != NOWHERE
    ]
    assert Counter(map(tuple, batch.table_updates.tolist())) == Counter(riding) + Counter(
        map(tuple, arrays.early_updates.tolist())
    )


def check_samples(batch: Batch, arrays: StepArrays, view: dict[str, np.ndarray]) -> None:
    """After the last token of each chunk that samples, on its home lane, for its slot and the next
    position."""
    tokens_of = row_tokens(arrays, view)
    wanted = 0
    for chunk in range(len(batch.slot)):
        lane = int(batch.lane[chunk])
        place = int(arrays.sampled[chunk])
        assert (place >= 0) == bool(batch.sample[chunk])
        slot = int(batch.slot[chunk])
        last = int(batch.start[chunk] + batch.length[chunk]) - 1
        assert tokens_of[lane, int(arrays.last[chunk])] == (slot, last)
        if place >= 0:
            sample = [arrays.last[chunk], slot, last + 1, FEED]
            assert view["samples"][lane, place].tolist() == sample
            wanted += 1
    assert wanted == (view["samples"][:, :, 1] != NOWHERE).sum()


def row_tokens(
    arrays: StepArrays, view: dict[str, np.ndarray]
) -> dict[tuple[int, int], tuple[int, int]]:
    """(lane, index of a token among its lane's) -> slot, position."""
    found = {}
    for lane in range(len(view["rows"])):
        row = token = 0
        for rows, width in arrays.shape.local + arrays.shape.spread:
            for _ in range(rows):
                slot, start, length, adapter = view["rows"][lane, row].tolist()
                assert not adapter
                found |= {(lane, token + i): (slot, start + i) for i in range(length)}
                row = row + 1
                token = token + width
    return found


def check_held(batch: Batch, arrays: StepArrays, view: dict[str, np.ndarray]) -> None:
    """Every row of a spread sequence knows how many of its blocks each lane of its group holds, and
    which one is home; no other lane holds any."""
    home = dict(zip(batch.slot.tolist(), batch.lane.tolist()))
    held = {int(slot): row.tolist() for slot, row in zip(batch.slot, batch.blocks_per_lane)}
    local = sum(rows for rows, _ in arrays.shape.local)
    for lane in range(len(view["rows"])):
        for row, (slot, _, length, _) in enumerate(view["rows"][lane, local:].tolist()):
            if length:
                group = group_around(lane, arrays.shape.group_size)
                assert view["held"][lane, row].tolist() == held[slot][group.start : group.stop]
                assert sum(held[slot][lane] for lane in group) == sum(held[slot])
                assert group[view["homes"][lane, row]] == home[slot]


def cheapest(compiled: list[StepShape], demand: StepDemand) -> StepShape:
    shape = next((shape for shape in compiled if demand.fits(shape)), None)
    assert shape is not None, f"no shape holds {demand}"
    return shape


@pytest.mark.parametrize("lanes, seqs, chunk, placement, lane_tokens", CONFIGS)
def test_every_batch_fits_a_shape_that_says_all_of_it(lanes, seqs, chunk, placement, lane_tokens):
    config = SchedulerConfig(max_seqs=seqs, chunk_tokens=chunk)
    compiled = shapes(config, lanes, BLOCK)
    used = set()
    spread = 0
    for seed in range(examples(15)):
        for batch in traffic(config, lanes, placement, lane_tokens, seed):
            demand = StepDemand.of(batch, lanes, config.tile, BLOCK)
            shape = cheapest(compiled, demand)
            used.add(str(shape))
            spread += int(batch.spread.any())
            check_message(batch, StepRows(batch, demand, shape, BLOCK).arrays(), lanes)
    assert len(used) >= min(2, len(compiled)) and (spread > 20 or lanes == 1)


def moves_said(arrays: StepArrays, lanes: int) -> list[tuple[int, ...]]:
    """Lane, page, to lane, page of each move in the message."""
    size = arrays.shape.group_size
    moves = layout(arrays.shape, BLOCK).views(arrays.rows)["moves"]
    return [
        (lane, int(page), to_lane, int(moves[to_lane, 1, lane % size, nth]))
        for lane in range(lanes)
        for to_lane in group_around(lane, size)
        for nth, page in enumerate(moves[lane, 0, to_lane % size])
        if page != NOWHERE
    ]


def random_moves(rng: random.Random, lanes: int, most: int) -> np.ndarray:
    """Moves between random lanes, at most `most` from each to each."""
    pairs = [pair for pair in itertools.permutations(range(lanes), 2) for _ in range(most)]
    chosen = rng.sample(pairs, rng.randint(0, min(6, len(pairs))))
    return np.array(
        [(lane, rng.randrange(50), to_lane, at) for at, (lane, to_lane) in enumerate(chosen)],
        np.int32,
    ).reshape(-1, 4)


@pytest.mark.parametrize(
    "lanes, pool, placement", [(2, 2, "random"), (4, 1, "grow"), (8, 8, "round_robin")]
)
def test_every_batch_may_copy_pages_to_any_lane(lanes, pool, placement):
    """In the smallest group of lanes that has the chunks' and the copies', and in a program without
    rows of prompts, or of spread ones, where the batch has none."""
    config = SchedulerConfig(max_seqs=7, chunk_tokens=100, exchange="pass_q")
    compiled = shapes(config, lanes, BLOCK, pool, copies=True)
    most = max(shape.moves for shape in compiled)
    rng = random.Random(5)
    seen = Counter()
    for batch in traffic(config, lanes, placement, 30 if placement == "grow" else None, 1):
        batch = dataclasses.replace(batch, moves=random_moves(rng, lanes, most))
        demand = StepDemand.of(batch, lanes, config.tile, BLOCK)
        shape = cheapest(compiled, demand)
        arrays = StepRows(batch, demand, shape, BLOCK).arrays()
        check_message(batch, arrays, lanes)
        assert sorted(moves_said(arrays, lanes)) == sorted(map(tuple, batch.moves.tolist()))
        decodes = bool((batch.length == 1).all())
        assert not decodes or not shape.prefill.rows
        if not batch.block_lane.size and (decodes or len(batch.moves)):
            assert not shape.spread_prefill.rows
        seen[decodes, bool(shape.moves)] += 1
        seen["left"] += demand.group_size > batch.group_size.max()
    assert min(seen[True, True], seen[True, False], seen[False, True]) > 5
    assert seen["left"] > 5 or pool > 1


@pytest.mark.parametrize("dealt", [range(2), range(2, 4), range(3, 4), range(4)])
@pytest.mark.parametrize("home", range(4))
def test_a_chunk_is_dealt_over_the_lanes_that_a_plan_says(dealt, home):
    """All but its last row, which is at home, wherever its blocks are. A lane's rows follow each
    other, those at home come last."""
    lanes = 4
    config = SchedulerConfig(max_seqs=4, chunk_tokens=64, min_chunk=16)
    cache = CacheManager(CacheConfig(BLOCK, 60, placement="round_robin"), lanes, 4)
    scheduler = Scheduler(config, cache, MeshConfig(kvp=lanes), 400)
    params = SamplingParams(temperature=0, max_tokens=1)
    scheduler.add(Request("long", np.arange(50, dtype=np.int32), params))
    batch = scheduler.start(0.0)
    batch = dataclasses.replace(batch, dealt={0: dealt}, lane=np.array([home], np.int32))
    demand = StepDemand.of(batch, lanes, config.tile, BLOCK)
    shape = cheapest(shapes(config, lanes, BLOCK), demand)
    arrays = StepRows(batch, demand, shape, BLOCK).arrays()
    check_message(batch, arrays, lanes)
    *parts, last = [part.lane for part in arrays.slices]
    assert last == home and len(parts) == 3 and set(parts) <= set(dealt)
    runs = [lane for lane, _ in itertools.groupby([*parts, last])]
    assert len(runs) == len({*parts, last})


def test_spread_decodes_of_a_pool_take_a_program_of_its_group():
    config = SchedulerConfig(max_seqs=16)
    pooled = shapes(config, 8, BLOCK, pool=4)
    for spread in (1, 5, 16):
        demand = StepDemand(16, spread, (), 8, 4, False)
        assert cheapest(pooled, demand).group_size == 4
    grouped = shapes(config, 8, BLOCK)
    assert len(shapes(config, 8, BLOCK, pool=8, copies=True)) < len(grouped)
    assert len(shapes(config, 8, BLOCK, copies=True)) == len(grouped) + 4


def visits_said(arrays: StepArrays) -> list[int]:
    """Rows of a lane that visit one other lane, at most, in the message: of each group of spread
    rows."""
    shape = arrays.shape
    view = layout(shape, BLOCK).views(arrays.rows)
    size = shape.group_size
    local = sum(group.rows for group in shape.local)
    visits = (view["held"] > 0) & (view["rows"][:, local:, LENGTH, None] > 0)
    for lane in range(len(visits)):
        visits[lane, :, lane % size] = False
    ends = np.cumsum([group.rows for group in shape.spread])[:-1]
    return [int(rows.sum(1).max()) for rows in np.split(visits, ends, 1)]


@pytest.mark.parametrize(
    "lanes, pool, placement, most",
    [(4, 4, "random", 1.0), (8, 8, "random", 1.0), (8, 1, "grow", 0.5)],
)
def test_the_least_room_holds_all_rows_that_visit_a_lane(lanes, pool, placement, most):
    settings = dict(exchange="visit", decode_exchange="visit")
    config = SchedulerConfig(max_seqs=16, chunk_tokens=128, min_chunk=8, **settings)
    every = shapes(config, lanes, BLOCK, pool)
    compiled = [shape for shape in every if set(shape.exchanges) == {"visit"}]
    seen = Counter()
    for batch in traffic(config, lanes, placement, 30 if placement == "grow" else None, 2):
        if not batch.spread.any():
            continue
        batch = dataclasses.replace(batch, exchange="visit", decode_exchange="visit")
        demand = StepDemand.of(batch, lanes, config.tile, BLOCK)
        shape = cheapest(compiled, demand)
        arrays = StepRows(batch, demand, shape, BLOCK).arrays()
        check_message(batch, arrays, lanes)
        visits = visits_said(arrays)
        holds = {
            room: all(
                count <= rows_with_room(room, group.rows)
                for count, group in zip(visits, shape.spread)
            )
            for room in ROOMS
        }
        others = [one for one in compiled if dataclasses.replace(one, room=shape.room) == shape]
        assert shape.room == min(one.room for one in others if holds[one.room])
        seen[shape.room] += 1
    assert min(seen) == 0.25 and max(seen) >= most


@pytest.mark.parametrize("placement", ["striped", "zigzag", "random"])
def test_around_a_ring_each_token_is_computed_where_its_block_is(placement):
    config = SchedulerConfig(max_seqs=8, chunk_tokens=96, min_chunk=16, exchange="pass_q")
    lanes = 4
    count = 0
    compiled = shapes(config, lanes, BLOCK)
    for seed in range(6):
        where = {}  # slot, block -> lane
        for batch in traffic(config, lanes, placement, 32, seed):
            where |= {
                (slot, block): lane for lane, slot, _, _, block in batch.table_updates.tolist()
            }
            demand = StepDemand.of(
                dataclasses.replace(batch, exchange="pass_q"), lanes, config.tile, BLOCK
            )
            rings = (shape for shape in compiled if shape.prefill_ring)
            shape = next(filter(demand.fits, rings), None)
            if shape is None:
                continue
            count += 1
            arrays = StepRows(batch, demand, shape, BLOCK).arrays()
            assert said(arrays, lanes) == meant(batch)
            far = {int(chunk) for chunk in np.flatnonzero(batch.spread & (batch.length > 1))}
            assert {piece.chunk for piece in arrays.slices if batch.spread[piece.chunk]} == far
            for piece in arrays.slices:
                if piece.chunk in far:
                    slot = int(batch.slot[piece.chunk])
                    first = int(batch.start[piece.chunk]) + piece.offset
                    blocks = range(first // BLOCK, (first + piece.size - 1) // BLOCK + 1)
                    assert {where[slot, block] for block in blocks} == {piece.lane}
            for chunk in np.flatnonzero(batch.sample):
                lane = int(batch.lane[chunk])
                place = int(arrays.sampled[chunk])
                view = layout(shape, BLOCK).views(arrays.rows)
                end = int(batch.start[chunk] + batch.length[chunk])
                assert view["samples"][lane, place].tolist() == [
                    arrays.last[chunk],
                    int(batch.slot[chunk]),
                    end,
                    FEED,
                ]
                assert row_tokens(arrays, view)[lane, int(arrays.last[chunk])] == (
                    int(batch.slot[chunk]),
                    end - 1,
                )
    assert count > 10


@pytest.mark.parametrize("lanes, seqs, chunk, placement, lane_tokens", CONFIGS)
def test_shapes_are_few_different_and_sample_enough(lanes, seqs, chunk, placement, lane_tokens):
    config = SchedulerConfig(max_seqs=seqs, chunk_tokens=chunk)
    room = CacheConfig(placement=placement)
    gathered = dataclasses.replace(config, decode_exchange="gather")
    assert len(shapes(gathered, lanes, BLOCK, room.pool(lanes), copies=True)) < 40
    compiled = shapes(config, lanes, BLOCK, room.pool(lanes), copies=True)
    assert len(set(map(str, compiled))) == len(compiled) < 70
    assert [bool(shape.spread) for shape in compiled] == sorted(
        bool(shape.spread) for shape in compiled
    )
    for shape in compiled:
        assert shape.samples in sample_sizes(config) and shape.samples >= min(shape.rows, seqs)
        if lanes == 1:
            assert not shape.spread
