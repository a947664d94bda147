"""The model of time, on numbers that can be checked by hand. Costs are in seconds, and small whole
numbers where that is possible."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.checkpoint.zoo import MODELS
from jaxserve.costs.coefficients import Costs, ShapeCost, smooth_max
from jaxserve.costs.predictor import Predictor
from jaxserve.costs.profiles import costs
from jaxserve.lanes.choice import ExchangeChooser
from jaxserve.lanes.cost import lane_costs
from jaxserve.lanes.dealing import PromptLanes
from jaxserve.lanes.exchange import decode_exchanges
from jaxserve.lanes.groups import ChunkPlace, group_around, size_of
from jaxserve.lanes.load import LaneLoad
from jaxserve.lanes.placement import Grow
from jaxserve.lanes.rates import ExchangeRates, LaneLinks, Link
from jaxserve.lanes.work import Heads
from jaxserve.scheduling import Batch
from jaxserve.scheduling.budget import StepBudget
from jaxserve.settings.schema import MeshConfig
from tests.examples import examples

ROOT = 2**0.4  # of the maximum where both limits are equal
REAL = costs("a100", MODELS["llama3-8b"], 8)


def chunks(*rows: tuple[int, int, list[int]], home: int = 0) -> Batch:
    """A batch of (start, length, blocks held per lane); chunks of one token are decodes. Blocks on
    other lanes than home: spread."""
    start, length = (np.array([row[place] for row in rows], np.int32) for place in (0, 1))
    held = np.array([row[2] for row in rows], np.int32)
    feed = length == 1
    lane = np.full(len(rows), home, np.int32)
    return Batch(
        0,
        np.arange(len(rows)),
        lane,
        lane,
        start,
        length,
        feed,
        feed,
        np.array([size_of(home, row) for row in held.tolist()], np.int32),
        held,
        np.empty(0, np.int32),
        np.zeros(int(length[~feed].sum()), np.int32),
        np.empty((0, 4), np.int32),
        np.empty((0, 5), np.int32),
        0.0,
        (),
    )


def with_chunk(
    predictor: Predictor, lanes: list[LaneLoad], place: ChunkPlace, *chunk: int
) -> float:
    """Seconds of the step, on the lanes that it bears on, if the chunk (cached, new) joined."""
    return StepBudget(predictor, lanes, 1, 1, np.inf, np.inf).seconds_with(place, *chunk)


def alone(predictor: Predictor, total: int, chunk: int) -> float:
    """The sum of the steps that prefill a prompt, each predicted as a batch."""
    steps = [(start, min(chunk, total - start)) for start in range(0, total, chunk)]
    lanes = []
    for start, length in steps:
        lanes.append([LaneLoad(samples=int(start + length == total))])
        predictor.add_chunk(lanes[-1], ChunkPlace(0), start, length)
    return sum(map(predictor.stage, lanes))


# --- one layer


def test_a_smooth_maximum_is_the_greater_of_two_and_a_little_more_where_they_meet():
    assert (smooth_max(0, 3), smooth_max(3, 0), smooth_max(0, 0)) == (3, 3, 0)
    assert smooth_max(2, 2) == pytest.approx(2 * ROOT) and smooth_max(3, 5) == smooth_max(
        5, 3
    ) == pytest.approx((3**2.5 + 5**2.5) ** 0.4)
    assert smooth_max(1, 1000) == pytest.approx(1000, rel=1e-7)


def test_linear_parts_go_from_reading_weights_to_using_them():
    made = Costs(layers=1, linear_floor=8, linear_base=1, linear_token=0.5)
    assert made.linear(0) == pytest.approx(8, rel=3e-3)
    assert made.linear(14) == pytest.approx(8 * ROOT)  # 1 + 7 = 8
    assert made.linear(2000) == pytest.approx(1001, rel=1e-5)


def test_sums_over_ranks_are_added_to_the_linear_parts():
    assert Costs(layers=1, linear_token=2, tp=10, tp_token=0.5).linear(4) == 8 + 10 + 2


def test_a_chunk_attends_to_all_before_it_and_to_half_of_itself():
    assert Costs(layers=1, pair=1).attend_chunk(10, 4) == (10 + 2) * 4
    assert Costs(layers=1, read=1).attend_chunk(10, 4) == 14
    assert Costs(layers=1, chunk=5, chunk_token=0.25).attend_chunk(10, 4) == 6
    for read, seconds in ((0.9, 48), (1, 48), (1.1, 48 * 1.1)):
        made = Costs(layers=1, pair=1, read=read * 48 / 14)
        assert made.attend_chunk(10, 4) == pytest.approx(seconds), "the greater of both"


def test_decodes_cost_once_each_and_by_their_context():
    made = Costs(layers=1, decode=100, decode_seq=10, decode_kv=0.5)
    assert made.attend_decodes(3, 8) == 100 + 30 + 4
    assert made.attend_decodes(0, 0) == 0


@pytest.mark.parametrize(("mixed", "both"), [(0, 7), (-0.5, 5.5), (1, 10)])
def test_prefill_and_decode_attention_in_one_step_overlap_or_disturb_each_other(mixed, both):
    assert (
        Costs(layers=1, mixed=mixed).attention(4, 3) == both
        and Costs(layers=1, mixed=mixed).attention(4, 0) == 4
    )


# --- compiled shapes

SHAPES = (
    ShapeCost(4, 0, 0, 1.0),
    ShapeCost(4, 1, 64, 2.0),
    ShapeCost(16, 0, 0, 3.0),
    ShapeCost(16, 4, 16, 5.0),
    ShapeCost(16, 1, 256, 8.0),
)


@pytest.mark.parametrize(
    ("decodes", "prefill", "seconds"),
    [
        (1, [], 1),
        (4, [], 1),
        (5, [], 3),
        (0, [64], 2),
        (4, [1], 2),
        (5, [64], 5),
        (0, [65], 8),
        (0, [20, 20], 5),
        (3, [1] * 4, 5),
    ],
)
def test_a_step_costs_what_the_first_compiled_shape_that_holds_it_costs(decodes, prefill, seconds):
    """Chunks take whole tiles of 16 where a shape has several rows; a shape of one row takes one
    chunk."""
    predictor = Predictor(Costs(layers=1, linear_token=100, shapes=SHAPES, tile=16), MeshConfig())
    lanes = [LaneLoad(decodes=decodes)]
    for length in prefill:
        predictor.add_chunk(lanes, ChunkPlace(0), 0, length)
    assert predictor.stage(lanes) == seconds


def test_a_step_that_no_shape_holds_costs_what_its_tokens_do():
    predictor = Predictor(Costs(layers=1, linear_token=100, shapes=SHAPES, tile=16), MeshConfig())
    assert predictor.lane(LaneLoad(decodes=17)) == 1700


def test_decodes_of_one_shape_may_all_cost_what_the_longest_does():
    made = Costs(layers=1, decode_kv=1, longest=True)
    batch = chunks((10, 1, [1]), (100, 1, [1]))
    assert Predictor(made, MeshConfig()).seconds(batch) == 2 * 100
    shaped = Costs(layers=1, decode_kv=1, longest=True, shapes=SHAPES)
    assert Predictor(shaped, MeshConfig()).seconds(batch) == 1 + 4 * 100


# --- one step


def test_a_step_by_hand():
    """Two layers. Linear: 2 decodes and 4 prefill tokens; attention: (10 + 2) 4 pairs at 0.5, and
    100 + 50 tokens of context at 0.1."""
    made = Costs(layers=2, launch=1, linear_token=1, pair=0.5, decode_kv=0.1, head=3, head_token=2)
    batch = chunks((100, 1, [7]), (50, 1, [4]), (10, 4, [1]))
    assert Predictor(made, MeshConfig()).seconds(batch) == pytest.approx(
        1 + 2 * (6 + 24 + 15) + 3 + 2 * 2
    )


def test_only_steps_that_sample_pay_for_the_vocabulary():
    predictor = Predictor(Costs(layers=1, head=3, head_token=2), MeshConfig())
    assert (predictor.lane(LaneLoad(tokens=9)), predictor.lane(LaneLoad(tokens=9, samples=2))) == (
        0,
        7,
    )


def test_the_slowest_lane_decides_and_a_lane_does_its_own_work_only():
    predictor = Predictor(Costs(layers=1, linear_token=1), MeshConfig(kvp=3))
    lanes = [LaneLoad(decodes=2), LaneLoad(decodes=5), LaneLoad()]
    assert predictor.stage(lanes) == 5
    assert with_chunk(predictor, lanes, ChunkPlace(0), 0, 2) == 4  # of the lane that it bears on
    predictor.add_chunk(lanes, ChunkPlace(0), 0, 2)
    assert predictor.stage(lanes) == 5
    predictor.add_chunk(lanes, ChunkPlace(2), 0, 6)
    assert predictor.stage(lanes) == 6


@settings(deadline=None)
@given(
    held=st.lists(st.integers(0, 40), min_size=2, max_size=5).filter(any),
    cached=st.integers(0, 10**6),
    new=st.integers(1, 4096),
)
def test_the_shares_of_a_spread_chunk_add_up(held, cached, new):
    """Each lane attends over what it holds: all pairs and all reads are done once, on
    whichever lane."""
    for made in (Costs(layers=1, pair=1), Costs(layers=1, read=1)):
        predictor = Predictor(made, MeshConfig(kvp=len(held)))
        lanes = [LaneLoad() for _ in held]
        predictor.add_chunk(lanes, ChunkPlace(0, held), cached, new)
        assert sum(lane.attention for lane in lanes) == pytest.approx(
            made.attend_chunk(cached, new)
        )
        assert [lane.attention == 0 for lane in lanes] == [blocks == 0 for blocks in held]
        group = group_around(0, size_of(0, held))
        share = -(-new // len(group)), new * (len(group) > 1)
        assert [(lane.tokens, lane.spread) for lane in lanes] == [
            share if lane in group else (0, 0) for lane in range(len(held))
        ]


@settings(deadline=None)
@given(
    cached=st.integers(0, 10**6),
    new=st.integers(1, 4096),
    held=st.none() | st.lists(st.integers(1, 9), min_size=3, max_size=3),
)
def test_asking_what_a_chunk_would_cost_and_adding_it_agree(cached, new, held):
    predictor = Predictor(REAL, MeshConfig(kvp=3))
    lanes = [LaneLoad(decodes=3, context=1e4, samples=3) for _ in range(3)]
    asked = with_chunk(predictor, lanes, ChunkPlace(1, held), cached, new)
    predictor.add_chunk(lanes, ChunkPlace(1, held), cached, new)
    assert asked == pytest.approx(predictor.stage(lanes))


@settings(max_examples=examples(200))
@given(
    decodes=st.integers(0, 300),
    context=st.integers(0, 10**7),
    before=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 8192)), max_size=3),
    cached=st.integers(0, 10**7),
    new=st.integers(1, 65536),
    windowed=st.sampled_from([0.0, 0.5]),
    mixed=st.sampled_from([-0.5, 0.0, 0.5]),
)
def test_a_chunk_asked_about_takes_to_the_last_digit_what_it_takes_once_it_is_added(
    decodes, context, before, cached, new, windowed, mixed
):
    priced = dataclasses.replace(REAL, window=4096, windowed=windowed, mixed=mixed)
    predictor = Predictor(priced, MeshConfig(spp=2))
    lanes = [LaneLoad(decodes, float(context), samples=decodes)]
    for chunk in before:
        predictor.add_chunk(lanes, ChunkPlace(0), *chunk)
    assert predictor.plain
    asked = predictor.lane_with(lanes[0], cached, new)
    predictor.add_chunk(lanes, ChunkPlace(0), cached, new)
    assert asked == predictor.lane(lanes[0])


def test_local_decodes_burden_their_home_and_spread_ones_every_lane_by_its_blocks():
    predictor = Predictor(Costs(layers=1), MeshConfig(kvp=2))
    context = np.array([100, 40, 1000])
    home = np.array([0, 1, 1])
    group_size = np.array([1, 1, 2])
    lanes = predictor.lane_costs.decodes(
        context, home, group_size, np.array([[7, 0], [0, 3], [30, 10]])
    )
    assert [(lane.decodes, lane.context, lane.spread, lane.samples) for lane in lanes] == [
        (1, 100 + 750, 1, 1),
        (2, 40 + 250, 1, 2),
    ]


LINK = Link(1e-5, 1e9)
RATES = ExchangeRates(1e15, 1e12, 1e-6, LINK, LINK, LINK)


def ringing(decode_exchange: str) -> Predictor:
    """Four lanes with a slow link."""
    chooser = ExchangeChooser(4, Heads(8, 2, 64), RATES, decode_chooser=decode_exchange)
    costs = Costs(layers=1, decode_kv=1e-9)
    return Predictor(costs, MeshConfig(kvp=4), lane_costs(costs, 4, chooser))


def test_pages_change_lanes_by_the_links_of_the_group_that_they_stay_in():
    slow = Link(1e-3, 1e9)
    links = {2: LaneLinks.alike(LINK), 4: LaneLinks.alike(slow)}
    chooser = ExchangeChooser(4, Heads(8, 2, 64), RATES, block=16, moves=2, links=links)
    predictor = Predictor(Costs(layers=1), MeshConfig(kvp=4), lane_costs(Costs(1), 4, chooser))

    def seconds(to_lane: int) -> float:
        moves = np.array([[0, 5, to_lane, 7]], np.int32)
        batch = chunks((50, 1, [1, 0, 0, 0]))
        return predictor.seconds(dataclasses.replace(batch, moves=moves))

    page = 2 * 16 * 2 * 2 * 64 * 2  # two pages of 16 tokens, key and value of two heads
    assert seconds(1) == pytest.approx(LINK(page))
    assert seconds(2) == seconds(3) == pytest.approx(slow(3 * page))


def of_decodes(predictor: Predictor, *rows, beside: str | None = None) -> str:
    """The strategy that a batch's spread decodes get."""
    (load, *_) = predictor.lane_costs.loads(chunks(*rows))
    return load.decode_choice.beside(beside).strategy


def test_a_step_of_decodes_takes_what_the_exchange_that_is_chosen_does():
    """In a group of two lanes less than in one of four, also beside a local chunk."""
    many = [(10**6, 1, [50, 50, 0, 0])] * 40
    wide = [(10**6, 1, [25] * 4)] * 40
    for rows, lanes in ((many, 2), (wide, 4)):
        seconds = {name: ringing(name).seconds(chunks(*rows)) for name in decode_exchanges()}
        attention = 40 * 1e-9 * 10**6 / lanes
        choice = ExchangeChooser(lanes, Heads(8, 2, 64), RATES).decodes(40, 40 * 10**6 / lanes)
        for name, found in seconds.items():
            assert found == pytest.approx(attention + choice.seconds[name])
        assert seconds["pass_q"] < seconds["gather"]
        auto = ringing("auto")
        assert auto.seconds(chunks(*rows)) == min(seconds.values())
        assert of_decodes(auto, *rows) == min(seconds, key=seconds.get) == "visit"
        beside = chunks(*rows, (0, 8, [1, 0, 0, 0]))
        assert auto.seconds(beside) == pytest.approx(ringing("visit").seconds(beside))
        assert auto.seconds(beside) < ringing("gather").seconds(beside)
    assert of_decodes(ringing("auto"), (50, 1, [1, 1, 0, 0])) == "gather"
    (local, *_) = ringing("auto").lane_costs.loads(chunks((50, 1, [1, 0, 0, 0])))
    assert local.decode_choice is None


def test_decodes_beside_spread_chunks_choose_among_what_is_compiled():
    """They visit beside chunks that do, and no others; nothing is chosen where one is set."""
    rows = [(10**6, 1, [25] * 4)] * 40
    auto = ringing("auto")
    assert of_decodes(auto, *rows) == of_decodes(auto, *rows, beside="visit") == "visit"
    assert {of_decodes(auto, *rows, beside=name) for name in ("gather", "pass_q", "pass_kv")} == {
        "pass_q"
    }
    few = [(50, 1, [1] * 4)]
    assert of_decodes(auto, *few, beside="gather") == "gather"
    for name in decode_exchanges():
        assert of_decodes(ringing(name), *rows, beside="pass_kv") == name


def test_a_spread_chunk_that_joins_spread_decodes_takes_their_messages_along():
    """Counts messages that attention does not hide: both of `gather`; of the others one, on the way
    home or to the other lanes."""
    rows = [(10**6, 1, [25] * 4)] * 40
    for name, shared in (("gather", 2), ("pass_q", 1), ("visit", 1)):
        seconds = []
        for beside in (name, "pass_kv"):
            chooser = ExchangeChooser(
                4, Heads(8, 2, 64), RATES, chooser=beside, decode_chooser=name
            )
            costs = Costs(layers=1)
            predictor = Predictor(costs, MeshConfig(kvp=4), lane_costs(costs, 4, chooser))
            (load, *_) = predictor.lane_costs.loads(chunks(*rows, (0, 8, [1] * 4)))
            seconds.append(predictor.lane_costs.messages(load))
        assert seconds[1] - seconds[0] == pytest.approx(shared * LINK.seconds, rel=1e-6), name


def test_a_batch_is_its_decodes_and_its_chunks():
    predictor = Predictor(Costs(layers=1, pair=1), MeshConfig(kvp=2))
    lanes = predictor.lane_costs.loads(
        chunks((8, 1, [0, 2]), (20, 4, [3, 3]), (0, 10, [0, 2]), home=1)
    )
    assert [(lane.decodes, lane.context, lane.tokens, lane.spread) for lane in lanes] == [
        (0, 0, 2, 4),
        (1, 8, 12, 4),
    ]
    # half of (20 + 2) 4; and 10 / 2 * 10
    assert [lane.attention for lane in lanes] == [44, 44 + 50]


# --- stages (Medha, Eq. 4)


def test_layers_are_divided_over_the_stages_and_the_largest_share_counts():
    assert [
        Predictor(Costs(layers=10, linear_token=1), MeshConfig(spp=p)).lane(LaneLoad(tokens=1))
        for p in (1, 2, 4, 10)
    ] == [10, 5, 3, 1]


def test_a_step_goes_through_all_stages_and_the_hops_between_them():
    predictor = Predictor(Costs(layers=1, hop=5, hop_token=0.5), MeshConfig(spp=4))
    assert predictor.latency(10.0, 6, samples=0) == 4 * 10 + 3 * (5 + 3)
    assert Predictor(Costs(layers=1, hop=5), MeshConfig()).latency(10.0, 6, samples=0) == 10


def test_tokens_are_sampled_in_the_last_stage_only():
    predictor = Predictor(
        Costs(layers=4, linear_token=1, head=5, head_token=0.5), MeshConfig(spp=4)
    )
    step = [LaneLoad(decodes=2, samples=2)]
    assert predictor.stage(step) == 2 + 5 + 1  # the pace is that of the slowest stage
    assert predictor.latency(predictor.stage(step), 2, samples=2) == 4 * 2 + 5 + 1


def test_prefill_falls_with_the_stages_but_for_the_hand_off():
    """The first token comes when the last chunk has left the last stage: all chunks at the pace of
    a stage, and P - 1 stages and hops."""
    made = Costs(layers=16, linear_token=1, pair=0.001, hop=7)
    total = 64 * 32
    chunk = 32
    whole = Predictor(made, MeshConfig()).prefill(0, total, chunk)
    for stages in (1, 2, 4, 8, 16):
        predictor = Predictor(made, MeshConfig(spp=stages))
        assert predictor.prefill(0, total, chunk) == pytest.approx(whole / stages)
        pace = with_chunk(predictor, [LaneLoad()], ChunkPlace(0), total - chunk, chunk)
        first_token = whole / stages + predictor.latency(pace, chunk, samples=0) - pace
        assert first_token == pytest.approx(whole / stages + (stages - 1) * (pace + 7))
        assert first_token < whole / stages * 1.5 or stages == 1


# --- lanes (Medha, Eq. 5 and 6)


@settings(deadline=None)
@given(
    near=st.integers(0, 10**4),
    far=st.integers(10**6, 10**7),
    new=st.integers(1, 512),
    lanes=st.integers(2, 8),
)
def test_what_lanes_say_to_each_other_does_not_depend_on_the_context(near, far, new, lanes):
    silent = Costs(layers=3, pair=1e-9)
    talking = Costs(layers=3, pair=1e-9, kvp=2.0, kvp_token=0.5)

    def exchange(cached: int) -> float:
        spread = [1] * lanes
        mesh = MeshConfig(kvp=lanes)
        seconds = [
            with_chunk(
                Predictor(made, mesh),
                [LaneLoad() for _ in spread],
                ChunkPlace(0, spread),
                cached,
                new,
            )
            for made in (talking, silent)
        ]
        return seconds[0] - seconds[1]

    assert exchange(near) == pytest.approx(exchange(far)) == pytest.approx(3 * (2 + 0.5 * new))


def test_local_work_exchanges_nothing():
    predictor = Predictor(Costs(layers=1, kvp=9), MeshConfig(kvp=2))
    assert predictor.seconds(chunks((1000, 1, [9, 0]), (0, 9, [9, 0]))) == 0
    assert predictor.seconds(chunks((1000, 1, [9, 9]))) == 9


@pytest.mark.parametrize("lanes", [1, 2, 4, 8])
def test_a_decode_over_lanes_reads_its_context_at_once(lanes):
    """Linear 1 s, a million tokens at 1 us; with more than one lane an exchange of 0.1 s."""
    made = Costs(layers=1, linear_floor=1, decode_kv=1e-6, kvp=0.1)
    seconds = Predictor(made, MeshConfig(kvp=lanes)).seconds(chunks((10**6, 1, [50] * lanes)))
    assert seconds == pytest.approx(1 + 1 / lanes + 0.1 * (lanes > 1))


# --- a whole prompt


@settings(max_examples=examples(60), deadline=None)
@given(
    total=st.integers(1, 300_000),
    chunk=st.sampled_from([512, 1024, 2048, 4096, 8192]),
    tp=st.sampled_from([1, 8]),
    spp=st.sampled_from([1, 4]),
)
def test_prefill_in_closed_form_is_the_sum_of_its_steps(total, chunk, tp, spp):
    """To a thousandth and one step's reading of the weights, which a short last chunk takes too."""
    made = costs("a100", MODELS["llama3-8b"], tp)
    predictor = Predictor(made, MeshConfig(spp=spp, tp=tp))
    closed = predictor.prefill(0, total, chunk)
    steps = alone(predictor, total, chunk)
    assert abs(steps - closed) < 0.001 * steps + predictor.layers * made.linear(1)


@pytest.mark.parametrize("total", [512, 8192, 2**17])
def test_prefill_of_whole_chunks_is_exact_where_attention_has_one_limit(total):
    predictor = Predictor(
        Costs(
            layers=3,
            launch=1,
            linear_floor=4,
            linear_token=0.01,
            chunk=2,
            chunk_token=0.1,
            pair=1e-4,
            head=5,
            head_token=6,
        ),
        MeshConfig(),
    )
    assert predictor.prefill(0, total, 512) == pytest.approx(alone(predictor, total, 512))


def grown(context: int, reach: int, lanes: int) -> list[int]:
    """Tokens per lane when lanes join one by one, each with its share, and fill up evenly once all
    have theirs."""
    if context >= reach * lanes:
        return [context // lanes] * lanes
    return [min(max(context - lane * reach, 0), reach) for lane in range(lanes)]


@pytest.mark.parametrize("lanes", [2, 4])
@pytest.mark.parametrize("total", [1000, 4096, 6144, 16384, 65536])
def test_prefill_over_lanes_is_the_sum_of_its_steps(total, lanes):
    """Local up to 4096 tokens, then dealt over two lanes up to 2 x 4096, then over four, of which
    the fullest decides; a step has a chunk for each lane."""
    made = Costs(layers=2, linear_token=1, pair=1e-3, chunk=1, launch=3, kvp=7, kvp_token=0.25)
    reach = 4096
    chunk = 512
    prompts = PromptLanes(Grow(lanes, reach), 1)
    predictor = Predictor(made, MeshConfig(kvp=lanes), lane_costs(made, lanes, prompts=prompts))
    steps = 0.0
    start = 0
    while start < total:
        new = min(chunk * size_of(0, grown(start + 1, reach, lanes)), total - start)
        held = grown(start + new // 2, reach, lanes)
        place = ChunkPlace(0, held if start >= reach else None)
        steps += with_chunk(predictor, [LaneLoad()] * lanes, place, start, new)
        start += new
    assert predictor.prefill(0, total, chunk) == pytest.approx(steps, rel=0.03)
    assert predictor.prefill(0, total, chunk) <= Predictor(made, MeshConfig()).prefill(
        0, total, chunk
    ) + 128 * 2 * (7 + 0.25 * chunk)


def test_prefill_goes_on_from_what_is_cached():
    predictor = Predictor(Costs(layers=2, launch=1, linear_token=1, pair=0.01), MeshConfig())
    first = predictor.prefill(0, 1024, 256)
    second = predictor.prefill(1024, 2048, 256)
    assert first + second == pytest.approx(predictor.prefill(0, 2048, 256)) and second > first
    assert predictor.prefill(7, 7, 256) == predictor.prefill(9, 7, 256) == 0


# --- learning


@pytest.mark.parametrize("truth", [0.4, 1.0, 1.7, 3.9])
def test_the_scale_finds_the_factor_that_predictions_are_off_by(truth):
    predictor = Predictor(Costs(layers=1, linear_token=1), MeshConfig())
    dice = np.random.default_rng(0)
    for tokens in dice.integers(1, 100, 300):
        predictor.seen(
            predictor.lane(LaneLoad(tokens=int(tokens))),
            truth * float(tokens) * float(dice.uniform(0.95, 1.05)),
        )
    assert predictor.scale == pytest.approx(truth, rel=0.02)
    assert predictor.lane(LaneLoad(tokens=10)) == pytest.approx(10 * truth, rel=0.02)
    assert predictor.prefill(0, 10, 10) == pytest.approx(10 * truth, rel=0.02)


def test_the_scale_is_bounded_and_one_slow_step_moves_it_little():
    predictor = Predictor(Costs(layers=1), MeshConfig())
    predictor.seen(1.0, 1000.0)
    assert predictor.scale == pytest.approx(4**0.05)
    for _ in range(500):
        predictor.seen(predictor.scale, 1000.0)
    assert predictor.scale == pytest.approx(4)
    for _ in range(500):
        predictor.seen(predictor.scale, 1e-9)
    assert predictor.scale == pytest.approx(0.25)


@pytest.mark.parametrize(("predicted", "seconds"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)])
def test_nothing_is_learnt_from_a_step_without_time(predicted, seconds):
    predictor = Predictor(Costs(layers=1), MeshConfig())
    predictor.seen(predicted, seconds)
    assert predictor.scale == 1
