"""Simulated replicas of several lanes: every exchange under every planner, and what it costs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from experiments.context_parallel.work import choose
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.costs.coefficients import Costs, ShapeCost, SpreadShape
from jaxserve.costs.predictor import Predictor
from jaxserve.costs.profiles import devices
from jaxserve.kernels.kv_pages import SCALE_DTYPE
from jaxserve.lab.research.predicted import lanes as instances
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.replica import StagePassage, VirtualReplica
from jaxserve.lab.simulate.run import Outcome, System, execute
from jaxserve.lanes.choice import EXCHANGE_CHOICES, Correction
from jaxserve.lanes.cost import ExchangeCosts, GatherCosts, moves_per_pair
from jaxserve.lanes.exchange import EXCHANGES
from jaxserve.lanes.groups import ChunkPlace
from jaxserve.lanes.load import LaneLoad, SpreadChunks
from jaxserve.lanes.planner import PlanPart
from jaxserve.lanes.rates import LaneLinks, Link
from jaxserve.lanes.work import SCALE_ITEM
from jaxserve.scheduling import Batch
from jaxserve.scheduling.assembly import ReplicaProfile
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig

SHAPE = MODELS["llama3-8b"]
PLANNERS = ("none", "single", "cdsp", "fixed-2", "fixed-4")
ARRIVALS = [
    Arrival(0.0, 60_000, 20),
    Arrival(0.1, 3_000, 30),
    Arrival(0.2, 25_000, 5),
    Arrival(1.0, 900, 40),
]
PROMPT = 131_072
FOUR = MeshConfig(kvp=4, tp=2)


def replica(
    exchange: str = "auto",
    planner: str = "none",
    placement: str = "striped",
    mesh: MeshConfig = FOUR,
    system: type[System] = System,
    cache: Mapping[str, Any] = {},
    **scheduler,
) -> VirtualReplica:
    lane_tokens = 4096 if planner == "none" else None
    return system(SHAPE, "h100", mesh).replica(
        SchedulerConfig(
            **{
                "exchange": exchange,
                "planner": planner,
                "chunk_tokens": 8192,
                "step_time": 0.1,
                "chunking": "adaptive",
                "policy": "slack",
                "max_seqs": 16,
                **scheduler,
            }
        ),
        CacheConfig(
            **{
                "block_size": 64,
                "pages": 700,
                "placement": placement,
                "lane_tokens": lane_tokens,
                **cache,
            }
        ),
    )


def run(made: VirtualReplica, arrivals: list[Arrival] = ARRIVALS) -> tuple[Outcome, list[Batch]]:
    """Runs arrivals, with the scheduler's invariants checked after every step."""
    batches = []

    class Checked:
        def step_issued(self, batch: Batch, passage: StagePassage) -> None:
            batches.append(batch)

        def step_read(self, batch: Batch, now: float) -> None:
            made.scheduler.check()

    made.listeners.append(Checked())
    return execute(made, arrivals), batches


def pairs() -> list[Any]:
    """Every exchange under every planner that may go with it, by default as many as have each of
    them twice."""
    found: list[Any] = [("gather", "none")]
    for number, exchange in enumerate(list(EXCHANGE_CHOICES)[1:]):
        for place, planner in enumerate(PLANNERS):
            always = place in (number, (number + 1) % len(PLANNERS))
            marks = () if always else pytest.mark.matrix
            found.append(pytest.param(exchange, planner, marks=marks))
    return found


@pytest.mark.parametrize(("exchange", "planner"), pairs())
def test_all_requests_end_with_all_their_tokens(exchange, planner):
    made = replica(exchange, planner, "zigzag" if planner == "cdsp" else "striped")
    outcome, batches = run(made)
    ended = sorted((r.prompt, r.output, r.reason) for r in outcome.records)
    assert ended == sorted((a.prompt, a.output, "length") for a in ARRIVALS)
    computed = sum(int(batch.length.sum()) for batch in batches)
    assert computed == sum(a.prompt + a.output - 1 for a in ARRIVALS)
    assert made.load().pages_free == made.load().pages_total - made.load().pages_cached
    spread = any(batch.spread.any() for batch in batches)
    assert spread


@pytest.mark.parametrize("placement", ["grow", "striped", "zigzag", "round_robin", "random"])
def test_every_placement_is_simulated(placement):
    outcome, batches = run(replica("auto", placement=placement))
    assert all(record.reason == "length" for record in outcome.records)
    assert any(batch.spread.any() for batch in batches)


@pytest.mark.parametrize(("placement", "exchange"), [("hashed", "gather"), ("random", "auto")])
def test_elastic_plans_run_prompts_on_as_many_lanes_as_they_say(placement, exchange):
    outcome, batches = run(replica(exchange, "elastic", placement))
    ended = sorted((r.prompt, r.output, r.reason) for r in outcome.records)
    assert ended == sorted((a.prompt, a.output, "length") for a in ARRIVALS)
    assert 2 in {len(lanes) for batch in batches for lanes in batch.dealt.values()}


@pytest.mark.parametrize("decode_exchange", ["gather", "pass_q", "auto"])
def test_decodes_are_simulated_by_every_exchange(decode_exchange):
    outcome, batches = run(replica("gather", decode_exchange=decode_exchange))
    assert all(record.reason == "length" for record in outcome.records)
    assert any(batch.spread.any() and batch.is_decode.all() for batch in batches)


class Silent(System):
    """Lanes that say what they must in no time."""

    def link(self, lanes: int) -> Link:
        return Link(0.0, 1e18)


class Slow(System):
    def link(self, lanes: int) -> Link:
        return Link(2e-4, 2e9)


class Narrow(System):
    def link(self, lanes: int) -> Link:
        return Link(1e-6, 1e8)


@pytest.mark.parametrize(("system", "better"), [(Slow, "gather"), (Narrow, "pass_q")])
def test_simulated_decodes_take_the_time_of_what_is_chosen(system, better):
    """A ring pays the latency of each hop, which a slow link makes long; a narrow one makes queries
    long, behind which it attends. Beside chunks, which are gathered, the other may be faster: most
    tokens are decoded alone."""
    tpot = {}
    for name in ("gather", "pass_q", "auto"):
        made = replica("gather", system=system, decode_exchange=name)
        outcome, _ = run(made, [Arrival(0.0, 6_000, 1_000)] * 4)
        tpot[name] = min(record.tpot for record in outcome.records)
    worse = {"gather": "pass_q", "pass_q": "gather"}[better]
    assert tpot[better] < tpot[worse]
    assert tpot["auto"] <= tpot[better] * (1 + 1e-9)
    assert tpot["auto"] == pytest.approx(tpot[better], rel=1e-2)


def chunks_of(batches: list[Batch]) -> list[tuple[int, ...]]:
    return [tuple(batch.length.tolist()) for batch in batches]


@pytest.mark.parametrize("exchange", ["gather", "pass_q", "pass_kv"])
def test_what_lanes_cost_changes_what_the_scheduler_does(exchange):
    """Chunks are cut to a step's time: where the exchange takes longer they are smaller, and the
    first token comes later."""
    arrivals = [Arrival(0.0, 20_000, 2), Arrival(0.01, 3_000, 10)]
    free, slow = (run(replica(exchange, system=kind), arrivals) for kind in (Silent, Slow))
    assert chunks_of(free[1]) != chunks_of(slow[1])
    assert len(free[1]) < len(slow[1])
    first = [min(r.first for r in each.records if r.prompt == 20_000) for each, _ in (free, slow)]
    assert first[0] < first[1]


class Live(System):
    """System by a profile of lanes that share two cores, with numbers fitted to measured steps.
    What steps run in is compiled: 2 or 8 rows of 64 spread tokens on a lane."""

    @property
    def costs(self) -> Costs:
        return Costs(
            layers=32,
            linear_base=5e-4,
            linear_token=2e-5,
            pair=4e-9,
            read=1e-7,
            decode_kv=1e-7,
            head=5e-3,
            shapes=tuple(
                ShapeCost(16, rows, 64, 5e-4 + 2e-5 * (16 + 64 * rows)) for rows in (0, 1, 8)
            ),
            tile=64,
            spread_shapes=tuple(
                SpreadShape(size, exchange, 16, rows, 20 + 64 * rows)
                for rows in (2, 8)
                for size in (2, 4)
                for exchange in EXCHANGES
            ),
            padding=0.1,
            shared=0.5,
        )

    @property
    def profile(self) -> ReplicaProfile:
        corrections = dict.fromkeys(EXCHANGES, Correction(1e-2, 1.5))
        return dataclasses.replace(super().profile, corrections=corrections)


class LiveSilent(Live, Silent):
    """Live system whose lanes exchange in no time."""

    @property
    def profile(self) -> ReplicaProfile:
        return dataclasses.replace(super().profile, corrections={})


@pytest.mark.parametrize("exchange", ["gather", "pass_q", "pass_kv", "auto"])
def test_what_was_measured_of_an_exchange_changes_what_the_scheduler_does(exchange):
    """Where its exchange takes long in each step, a long prompt has fewer and longer chunks, and
    its first token comes later."""
    arrivals = [Arrival(0.0, 6_000, 2), Arrival(0.01, 500, 10)]
    settings = dict(chunk_tokens=512, min_chunk=64)
    silent, slow = (
        run(replica(exchange, system=kind, **settings), arrivals) for kind in (LiveSilent, Live)
    )
    assert chunks_of(silent[1]) != chunks_of(slow[1])
    longest = [max(map(max, chunks_of(batches))) for _, batches in (silent, slow)]
    assert longest[0] <= longest[1]
    first = [min(r.first for r in each.records if r.prompt == 6_000) for each, _ in (silent, slow)]
    assert first[0] < first[1]


@pytest.mark.parametrize("exchange", ["gather", "auto"])
def test_the_exchange_of_a_step_is_decided_once_and_said_in_its_batch(exchange, monkeypatch):
    decided = []
    decide = ExchangeCosts.exchanged
    counted = lambda *args: decided.append(decide(*args)) or decided[-1]
    monkeypatch.setattr(ExchangeCosts, "exchanged", counted)
    _, batches = run(replica(exchange, chunking="static"), [Arrival(0.0, 100_000, 3)])
    spread = [batch for batch in batches if batch.block_lane.size]
    assert len(decided) == len(spread) > 2
    assert [batch.exchange for batch in spread] == [each.strategy for each in decided]
    known = {"gather"} if exchange == "gather" else set(EXCHANGES)
    assert {batch.exchange for batch in spread} <= known


def test_the_exchange_is_the_one_that_is_predicted_to_be_fastest():
    """No prompt waits longer with `auto` than with the best fixed choice."""
    alone = [Arrival(0.0, PROMPT, 1)]
    seconds = {
        name: run(replica(name, chunking="static"), alone)[0].records[0].ttft
        for name in ("auto", *EXCHANGES)
    }
    assert seconds["auto"] <= min(seconds.values()) * 1.001


@pytest.mark.parametrize("exchange", ["gather", "pass_q", "pass_kv", "auto"])
def test_a_prompt_alone_takes_what_was_predicted_of_it(exchange):
    made = replica(exchange, chunking="static", mesh=MeshConfig(kvp=4, tp=8))
    outcome, _ = run(made, [Arrival(0.0, PROMPT, 1)])
    predicted = made.scheduler.predictor.prefill(0, PROMPT, 8192)
    assert outcome.records[0].ttft == pytest.approx(predicted, rel=0.04)


@pytest.mark.parametrize("strategy", EXCHANGES)
def test_a_step_takes_what_the_exchange_says(strategy):
    """Linear parts of a lane's share, and what the chooser says of attention and hops: of one chunk
    over all four lanes."""
    made = replica(strategy, chunking="static")
    _, batches = run(made, [Arrival(0.0, 100_000, 1)])
    predictor = made.scheduler.predictor
    chooser = predictor.lane_costs.chooser
    batch = batches[1]
    cached, new = int(batch.start[0]), int(batch.length[0])
    layer = choose(chooser, [(cached, new)]).seconds[strategy] + predictor.costs.linear(new // 4)
    assert batch.seconds == pytest.approx(
        predictor.costs.launch + predictor.layers * layer, rel=1e-3
    )


def test_pages_that_change_lanes_take_time():
    """However few pages they are: those of the first layer all that they take, of others what the
    linear parts of the layer before do not hide."""
    predictor = replica("pass_q", "cdsp").scheduler.predictor
    chooser = predictor.lane_costs.chooser
    assert chooser.moves == moves_per_pair(8192, 64, 4) == 64
    costs = ExchangeCosts(predictor.costs, dataclasses.replace(chooser, moves=256))
    layer = costs.chooser.move_seconds()
    batch = run(replica("pass_q"), [Arrival(0.0, 5_000, 1)])[1][0]
    moves = np.array([[0, 0, 1, 0]])
    moving = dataclasses.replace(batch, moves=moves, group_size=np.full(len(batch.slot), 4))
    many, few = [LaneLoad(tokens=8192)] * 4, [LaneLoad(decodes=1)] * 4
    assert costs.exposed_moves(batch, many, 32) == 0
    assert costs.exposed_moves(moving, many, 32) == pytest.approx(layer)
    exposed = layer - predictor.costs.linear(1)
    assert exposed > 0
    assert costs.exposed_moves(moving, few, 32) == pytest.approx(layer + 31 * exposed)
    # page groups share pools: 11 of these are sent in place of 32
    shared = ExchangeCosts(predictor.costs, dataclasses.replace(chooser, moves=256, seen=(4, 9)))
    assert shared.exposed_moves(moving, few, 32) == pytest.approx(layer + 10 * exposed)
    once = shared.growth(1, 2, 64 * (2 * 256 - 13), 8192, 32)
    assert once == pytest.approx(costs.growth(1, 2, 64 * 2 * 256, 8192, 32))
    assert shared.growth(1, 2, 64 * 2 * 256, 8192, 32) > once


class SlowMoves(System):
    """Lanes that send pages at 10 MB/s, and all else as they do."""

    @property
    def profile(self) -> ReplicaProfile:
        profile = super().profile
        links = {
            lanes: dataclasses.replace(each, all_to_all=Link(0.0, 1e7))
            for lanes, each in profile.links.items()
        }
        return dataclasses.replace(profile, links=links)


class Growing:
    """Plans one lane for the first `alone` tokens of a prompt, and all four for the rest."""

    def __init__(self, alone: int):
        self.alone = alone

    def arrived(self, now: float) -> None:
        pass

    def __call__(self, pending: list[float], start: int, target: int) -> tuple[PlanPart, ...]:
        return PlanPart(self.alone, (0,)), PlanPart(target, (0, 1, 2, 3))


def grown(
    alone: int, prompt: int, exchange: str = "auto", limit: int = 64
) -> tuple[VirtualReplica, list[Batch]]:
    """The batches of a prompt on one lane, then on four. limit: pages that a step moves from a lane
    to another."""
    made = replica(exchange, "cdsp", chunking="static", cache={"pages": 3000})
    made.scheduler.cache.moves.limit = limit
    made.scheduler.packer.prefill.chunks.planner = Growing(alone)
    _, batches = run(made, [Arrival(0.0, prompt, 1)])
    return made, batches


def test_a_growing_group_moves_pages_and_the_clock_knows():
    """Three quarters of 256 blocks move: those of the first step with the second one, and what that
    computes with the first step on all lanes, which are even then."""
    made, batches = grown(16_384, 60_000)
    ahead, first = [batch for batch in batches if len(batch.moves)]
    assert [len(ahead.moves), len(first.moves)] == [3 * 32, 3 * 32]
    assert ahead.start[0] == 8192 and ahead.dealt == {0: range(1)}
    assert first.start[0] == 16_384 and not first.dealt
    assert np.ptp(first.blocks_per_lane[0]) <= 1
    predictor = made.scheduler.predictor
    costs = predictor.lane_costs
    without = predictor.seconds(dataclasses.replace(first, moves=first.moves[:0]))
    shown = costs.exposed_moves(first, costs.loads(first), predictor.layers)
    assert first.seconds == pytest.approx(without + shown) and shown > 0


@pytest.mark.parametrize("exchange", ["auto", "pass_q"])
@pytest.mark.parametrize(("alone", "prompt"), [(16_384, 60_000), (65_536, 300_000)])
def test_plans_are_charged_for_growth_as_steps_are_for_moves(alone, prompt, exchange):
    """As many steps move pages as the planner reckons with, and expose as much. Round a ring, none
    of them ahead."""
    planner = replica(exchange, "cdsp", improvement=0.1).scheduler.packer.prefill.chunks.planner
    made, batches = grown(alone, prompt, exchange)
    predictor = made.scheduler.predictor
    costs = predictor.lane_costs
    shown = [costs.exposed_moves(each, costs.loads(each), predictor.layers) for each in batches]
    charged = planner.instances.growth(1, 4, alone, prompt - alone)
    assert charged == pytest.approx(sum(shown)) and charged > 0


def test_a_live_plan_grows_only_where_links_are_fast_enough():
    """The second lane is free in a second: with a link of 10 MB/s the history of a second takes
    longer than the time that two lanes save."""
    plan = lambda system: replica(
        "gather", "cdsp", mesh=MeshConfig(kvp=2), improvement=0.0, system=system
    ).scheduler.packer.prefill.chunks.planner([0.0, 1.0], 0, 60_000)
    assert [part.lanes for part in plan(System)] == [(0,), (0, 1)]
    assert len(plan(SlowMoves)) == 1


def test_what_a_step_cannot_move_goes_with_the_next_ones():
    """Three quarters of 1024 blocks, in as many steps as that takes, and no earlier."""
    moving = [batch for batch in grown(65_536, 300_000)[1] if len(batch.moves)]
    assert sum(len(batch.moves) for batch in moving) == 768
    assert all(set(batch.moves[:, 0].tolist()) == {0} for batch in moving)
    assert [batch.start[0] for batch in moving] == [32_768, 40_960, 49_152, 57_344, 65_536]
    assert np.ptp(moving[-1].blocks_per_lane[0]) <= 1


@pytest.mark.parametrize("limit", [0, 64])
def test_around_a_ring_short_chunks_go_until_history_lies_evenly(limit):
    """Nothing moves ahead. Then a tile at a time takes little while pages move; where they cannot,
    chunks are whole, and take longer."""
    made, batches = grown(65_536, 300_000, "pass_q", limit)
    chunks = [(int(each.start[0]), int(each.length[0])) for each in batches]
    assert chunks[7] == (57_344, 8192) and not any(len(each.moves) for each in batches[:8])
    tile = made.scheduler.config.tile
    if not limit:
        assert chunks[8] == (65_536, 32_768)
        assert batches[8].blocks_per_lane[0].tolist() == [1152, 128, 128, 128]
        return
    assert chunks[8:12] == [(65_536 + tile * step, tile) for step in range(3)] + [
        (65_536 + 3 * tile, 32_768)
    ]
    assert np.ptp(batches[11].blocks_per_lane[0]) <= 1
    whole = grown(65_536, 300_000, "pass_q", 0)[1][8]
    assert sum(batch.seconds for batch in batches[8:12]) < whole.seconds / 2


def test_a_small_group_passes_a_ring_of_its_own_lanes():
    """Half of the lanes take twice as long to attend, and have one hop of three."""
    chooser = replica("pass_kv").scheduler.predictor.lane_costs.chooser
    works = []
    for lanes in (2, 4):
        share = [1 / lanes] * lanes + [0.0] * (4 - lanes)
        works.append(
            SpreadChunks.none(4).plus(50_000, 4096, share, share, range(lanes), range(lanes)).work()
        )
    half, whole = works
    assert (half.lanes, whole.lanes) == (half.holders, whole.holders) == (2, 4)
    assert half.share == 2 * whole.share

    def seconds(hop: Link) -> list[float]:
        rates = dataclasses.replace(chooser.rates, hop=hop)
        return [
            dataclasses.replace(chooser, lanes=work.lanes, rates=rates).seconds(work)["pass_kv"]
            for work in works
        ]

    computing = seconds(Link(0.0, 1e30))
    assert 1.5 < computing[0] / computing[1] < 2  # half of the lanes, and what each call takes
    rounds = [-(-work.shard // chooser.piece) for work in works]
    assert seconds(Link(1.0, 1e30)) == pytest.approx([rounds[0], 3 * rounds[1]], rel=0.01)


def test_prompts_on_disjoint_groups_of_lanes_take_as_long_as_one():
    made = replica("pass_q", "fixed-2", chunking="static").scheduler.predictor
    one, both = [LaneLoad()] * 4, [LaneLoad()] * 4
    made.add_chunk(one, ChunkPlace(0, [1, 1, 0, 0]), 50_000, 4096)
    made.add_chunk(both, ChunkPlace(0, [1, 1, 0, 0]), 50_000, 4096)
    made.add_chunk(both, ChunkPlace(2, [0, 0, 1, 1]), 50_000, 4096)
    assert made.stage(both) == pytest.approx(made.stage(one))
    assert len({lane.tokens for lane in both}) == 1


# --- the model of the system


def test_groups_within_a_node_are_joined_as_its_ranks_are_and_larger_ones_by_the_network():
    device = devices()["h100"]

    def node_of(kvp: int, tp: int, **fields) -> dict[int, bool]:
        """By size of group, whether it has the links of a node."""
        system = System(SHAPE, "h100", MeshConfig(kvp=kvp, tp=tp), **fields)
        kinds = {LaneLinks.alike(device.ranks[2]): True, LaneLinks.alike(device.node): False}
        return {size: kinds[links] for size, links in system.profile.links.items()}

    assert node_of(1, 8) == {}
    assert node_of(4, 2) == {2: True, 4: True} and node_of(2, 8) == {2: False}
    assert node_of(16, 1) == {2: True, 4: True, 8: True, 16: False}
    assert node_of(6, 2) == {2: True, 6: False}
    assert node_of(16, 1, node_devices=4) == {2: True, 4: True, 8: False, 16: False}


def test_what_a_group_exchanges_depends_on_the_node_that_it_leaves_or_not():
    """Groups of eight of sixteen lanes take as long as where there is one node alone."""
    one, two = (
        replica("gather", mesh=MeshConfig(kvp=lanes)).scheduler.predictor for lanes in (8, 16)
    )
    slow = replica(
        "gather", mesh=MeshConfig(kvp=16), system=functools.partial(System, node_devices=1)
    ).scheduler.predictor

    def seconds(predictor: Predictor, size: int) -> float:
        loads = [LaneLoad()] * predictor.mesh.kvp
        blocks = [1] * size + [0] * (predictor.mesh.kvp - size)
        predictor.add_chunk(loads, ChunkPlace(0, blocks), 50_000, 4096)
        return predictor.stage(loads)

    assert seconds(two, 8) == seconds(one, 8) < seconds(slow, 8)
    assert seconds(two, 16) == seconds(slow, 16)
    latencies = [
        instances(System(SHAPE, "h100", MeshConfig(kvp=16), **fields), 100_000).latencies
        for fields in ({}, {"node_devices": 1})
    ]
    assert latencies[0][8](0, 50_000) < latencies[1][8](0, 50_000)
    assert latencies[0][16] == latencies[1][16]


def test_kv_in_fp8_has_half_the_bytes_and_a_scale():
    plain = System(SHAPE, "h100", MeshConfig(tp=8))
    small = plain.with_cache(CacheConfig(kv_cache_dtype="fp8"))
    assert small.heads.stored == 128 + 2 and plain.heads.stored == 256
    assert small.kv_tokens() == pytest.approx(plain.kv_tokens() * 256 / 130, abs=1)
    assert small.costs.decode_kv == pytest.approx(plain.costs.decode_kv * 130 / 256)
    assert small.costs.pair == plain.costs.pair
    decodes = [Arrival(0.0, 100_000, 50)]
    cache = {"kv_cache_dtype": "fp8"}
    ends = [run(replica(cache=each), decodes)[0].records[0].tpot for each in ({}, cache)]
    assert ends[1] < ends[0]


def test_memory_for_kv_is_as_it_is_given():
    system = System(SHAPE, "h100", MeshConfig(tp=8))
    token = 32 * 2 * 256  # layers, key and value, bytes of one head
    assert system.with_cache(CacheConfig(kv_memory_gib=1.0)).kv_tokens() == 2**30 // token
    half = system.with_cache(CacheConfig(gpu_memory_utilization=0.5))
    assert half.kv_tokens() < system.kv_tokens()


def test_a_scale_has_as_many_bytes_as_the_engine_stores():
    assert SCALE_DTYPE.itemsize == SCALE_ITEM


def test_without_a_chooser_queries_are_gathered():
    """By the costs alone, as where nothing was measured."""
    made = Costs(layers=1, linear_token=1, kvp=5)
    assert type(Predictor(made, MeshConfig(kvp=2)).lane_costs) is GatherCosts
