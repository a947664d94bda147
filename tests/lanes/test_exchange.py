"""Bytes by hand, seconds by hand, and that every rule chooses what it says it does."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.context_parallel.boundary import (
    Boundary,
    equal_miss,
    fit_boundary,
    fitted,
    hides_pass_kv,
    hides_pass_q,
)
from experiments.context_parallel.work import bytes_of, choose, work_of
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.costs.coefficients import NOMINAL
from jaxserve.costs.profiles import devices
from jaxserve.lanes.choice import (
    DECODE_CHOICES,
    EXCHANGE_CHOICES,
    Correction,
    ExchangeChooser,
)
from jaxserve.lanes.exchange import EXCHANGES, ExchangeBytes, decode_exchanges
from jaxserve.lanes.load import SpreadChunks
from jaxserve.lanes.rates import ExchangeRates, Link
from jaxserve.lanes.work import ExchangeWork, Heads, most_visits, work_of_decodes
from jaxserve.settings.schema import ConfigError

# of one of 8 ranks of the paper's model
HEADS = Heads(heads=16, kv_heads=1, head_dim=128, item=2, partial=2)
RATES = ExchangeRates(500e12, 2e12, 5e-6, Link(30e-6, 25e9), Link(30e-6, 25e9), Link(70e-6, 40e9))
CHUNKS = st.lists(
    st.tuples(st.integers(0, 200_000), st.one_of(st.just(1), st.integers(1, 50_000))),
    min_size=1,
    max_size=5,
)
LANES = st.sampled_from([1, 2, 3, 4, 8])


def exchange(lanes: int = 4, chooser: str = "auto", **fields) -> ExchangeChooser:
    return ExchangeChooser(lanes, HEADS, RATES, chooser=chooser, **fields)


def sent(name: str, work: ExchangeWork) -> ExchangeBytes:
    return EXCHANGES[name].traffic(work, HEADS)


# --- bytes


def test_work_by_hand():
    work = work_of([(1000, 10), (500, 1), (700, 1), (0, 3)], 4)
    # ceil(10/4), ceil(3/4), two decodes on four lanes
    assert (work.tokens, work.context, work.share) == (15, 2215, 3 + 1 + 1)
    assert work.pairs == (10 * 1000 + 55) + 501 + 701 + 6
    assert work.shard == (250 + 3) + (125 + 1) + (175 + 1) + 1
    assert work.touched == 253 + 1 + (126 + 176) / 2  # a step of the ring has one of two decodes


def test_bytes_by_hand():
    """The row of Table 5 with 3200 new tokens of 128000 on 4 ranks: shards of 32000 and 800 tokens,
    512 B of KV and 4096 of queries."""
    work = work_of([(124_800, 3200)], 4)
    kv, q, all_lanes = (
        EXCHANGES[name].traffic(work, HEADS) for name in ("pass_kv", "pass_q", "gather")
    )
    assert (kv.hops, kv.hop, bytes_of(kv)) == (3, 32_000 * 512, 3 * 16_384_000)
    assert (q.hops, q.hop, q.returned) == (3, 800 * 4096, 3 * 800 * 16 * 129 * 2)
    assert all_lanes.hops == 0
    assert (all_lanes.gathered, all_lanes.returned) == (3 * 800 * (4096 + 512), q.returned)


@pytest.mark.parametrize("lanes", [2, 4, 8])
@pytest.mark.parametrize("cached, new", [(0, 64_000), (48_000, 16_000), (64_000, 32)])
def test_bytes_are_the_formulas(lanes, cached, new):
    work = work_of([(cached, new)], lanes)
    heads = Heads(32, 8, 64, 2, 4)
    assert (
        bytes_of(EXCHANGES["pass_kv"].traffic(work, heads))
        == (lanes - 1) * 2 * (new + cached) // lanes * 8 * 64 * 2
    )
    back = (lanes - 1) * new // lanes * 32 * 65 * 4
    assert (
        bytes_of(EXCHANGES["pass_q"].traffic(work, heads))
        == (lanes - 1) * new // lanes * 32 * 64 * 2 + back
    )
    assert (
        bytes_of(EXCHANGES["gather"].traffic(work, heads))
        == (lanes - 1) * new // lanes * (32 + 2 * 8) * 64 * 2 + back
    )


def test_pass_kv_sends_the_fullest_lanes_shard_in_padded_pieces():
    work = work_of([(1000, 8), (100, 4)], 2, shards=[900, 52])
    assert bytes_of(EXCHANGES["pass_kv"].traffic(work, HEADS)) == 952 * 512
    cut = EXCHANGES["pass_kv"].traffic(work, HEADS, 256)
    assert (cut.rounds, cut.hops, bytes_of(cut)) == (4, 4, 4 * 256 * 512)


def test_kv_goes_round_as_it_is_stored():
    """In 8 bits a vector of 128 numbers has 128 bytes and a scale of 2; what is gathered is not
    stored yet."""
    work = work_of([(10_000, 100)], 2)
    narrow = dataclasses.replace(HEADS, stored=130)
    assert bytes_of(EXCHANGES["pass_kv"].traffic(work, narrow)) == 5050 * 2 * 130
    assert all(
        EXCHANGES[name].traffic(work, narrow) == EXCHANGES[name].traffic(work, HEADS)
        for name in ("gather", "pass_q")
    )
    assert equal_miss(narrow) == pytest.approx(0.125 * 130 / 256)


@pytest.mark.parametrize(
    "visits, room", [(0, 0.25), (0.25, 0.25), (0.3, 0.5), (0.5, 0.5), (0.51, 1), (1, 1)]
)
def test_visits_send_the_share_of_what_is_gathered_that_there_is_room_for(visits, room):
    work = dataclasses.replace(work_of([(1000, 64)], 4), visits=visits)
    assert bytes_of(sent("visit", work)) == room * bytes_of(sent("gather", work))


def test_the_rows_of_a_lane_that_visit_one_other_lane_are_counted():
    home = np.array([0, 0, 0, 1, 2])
    blocks = np.array([[9, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 0], [0, 1, 0, 0], [1, 0, 0, 1]])
    assert most_visits(home, blocks) == 2  # of lane 0 to lane 1
    assert most_visits(home[3:4], blocks[3:4]) == 0


def test_a_chunk_visits_the_lanes_that_hold_its_sequence():
    chunk = 100, 8, [0.25] * 4
    one = SpreadChunks.none(4).plus(*chunk, [0.5, 0.5, 0, 0], range(4), range(4))
    two = one.plus(*chunk, [0, 0, 0, 1.0], range(4), range(4))
    assert one.work().visits == 1 and two.work().visits == 0.5
    apart = SpreadChunks.none(4)
    for lane in (0, 1):  # each is computed by a lane of its own
        dealt = range(lane, lane + 1)
        apart = apart.plus(*chunk, [0, 0, 1.0, 0], range(4), dealt)
    assert apart.work().visits == 1


@given(CHUNKS, LANES)
def test_bytes_of_queries_do_not_depend_on_what_is_cached(chunks, lanes):
    bare = work_of([(0, new) for _, new in chunks], lanes)
    work = work_of(chunks, lanes)
    for name in ("gather", "pass_q"):
        assert EXCHANGES[name].traffic(work, HEADS) == EXCHANGES[name].traffic(bare, HEADS)
    assert bytes_of(EXCHANGES["pass_kv"].traffic(work, HEADS)) >= bytes_of(
        EXCHANGES["pass_kv"].traffic(bare, HEADS)
    )


@given(CHUNKS)
def test_one_lane_sends_nothing_and_all_strategies_are_one(chunks):
    work = work_of(chunks, 1)
    assert not any(bytes_of(sent(name, work)) for name in EXCHANGES)
    assert len(set(exchange(1).seconds(work).values())) == 1


@given(CHUNKS, LANES)
def test_work_is_never_less_than_an_even_split(chunks, lanes):
    work = work_of(chunks, lanes)
    assert (
        work.share * lanes >= work.tokens
        and work.shard * lanes >= work.context
        and 0 < work.touched <= work.shard + 1e-6
    )


def test_bytes_of_decodes_by_hand():
    """Five decodes on four lanes, two of them at home on one: all lanes send two rows of 4096 B of
    queries and 512 of keys and values, and 4128 of partials, to three others."""
    work = work_of_decodes(4, 2, 1000.0)
    ring, all_lanes = (EXCHANGES[name].decode_traffic(work, HEADS) for name in ("pass_q", "gather"))
    assert (ring.hops, ring.hop) == (3, 2 * 4096)
    assert (ring.gathered, ring.returned) == (3 * 2 * 512, 3 * 2 * 4128)
    assert (all_lanes.hops, all_lanes.gathered) == (0, 3 * 2 * (4096 + 512))
    assert all_lanes.returned == ring.returned


# --- seconds


def test_seconds_of_the_ring_by_hand():
    # causal: 1600.5 of the new tokens on average
    attention = 5e-6 + 4 * 16 * 128 * 800 * (124_800 + 1600.5) / 4 / 500e12
    hop = 30e-6 + 32_000 * 512 / 25e9
    assert 3 * hop > 3 * attention
    found = exchange().seconds(work_of([(124_800, 3200)], 4))
    assert found["pass_kv"] == pytest.approx(3 * hop + attention, rel=1e-9)
    home = 70e-6 + 3 * 800 * 16 * 129 * 2 / 40e9
    # its hops are shorter than attention
    assert found["pass_q"] == pytest.approx(4 * attention + home, rel=1e-9)
    first = 30e-6 + 3 * 800 * (4096 + 512) / 25e9
    assert found["gather"] == pytest.approx(first + 4 * (attention - 5e-6) + 5e-6 + home, rel=1e-9)


def test_what_is_not_hidden_is_added():
    work = work_of([(124_800, 3200)], 4)
    slow = dataclasses.replace(exchange(), rates=dataclasses.replace(RATES, hidden=0.0)).seconds(
        work
    )
    fast = exchange().seconds(work)
    assert (
        slow["gather"] == fast["gather"]
        and slow["pass_kv"] > fast["pass_kv"]
        and slow["pass_q"] > fast["pass_q"]
    )


def test_decodes_read_a_shard_once_whatever_the_strategy():
    """Four decodes over 4 lanes: gather reads all four shards at once, a ring one sequence's in
    each of its four steps (Alg. 4)."""
    found = exchange().seconds(work_of([(64_000, 1)] * 4, 4))
    shard = 16_001 * 512 / 2e12
    small = lambda link, size: link.seconds + size / link.bytes_per_s
    back = small(RATES.all_to_all, 3 * 16 * 129 * 2)
    assert found["gather"] == pytest.approx(
        small(RATES.all_gather, 3 * 4608) + 5e-6 + 4 * shard + back
    )
    assert found["pass_q"] == pytest.approx(
        3 * max(small(RATES.hop, 4096), 5e-6 + shard) + 5e-6 + shard + back
    )


@given(CHUNKS, LANES, st.integers(1, 50_000), st.sampled_from([0.0, 0.5, 1.0]))
def test_seconds_grow_with_what_is_cached(chunks, lanes, more, hidden):
    chooser = ExchangeChooser(lanes, HEADS, dataclasses.replace(RATES, hidden=hidden))
    longer = [(cached + more, new) for cached, new in chunks]
    before, after = (chooser.seconds(work_of(some, lanes)) for some in (chunks, longer))
    # but for what padding adds to short ones
    assert all(after[name] >= before[name] * (1 - 1e-3) > 0 for name in before)


@given(st.integers(0, 50_000), st.integers(1, 5000), LANES, st.integers(0, 1000))
def test_seconds_grow_with_what_is_new(cached, new, lanes, more):
    before, after = (
        exchange(lanes).seconds(work_of([(cached * lanes, n * lanes)], lanes))
        for n in (new, new + more)
    )
    assert all(after[name] >= before[name] * (1 - 1e-9) for name in before)


def test_gathered_decode_gets_faster_with_lanes_where_the_ring_gets_slower():
    work = [work_of([(1_000_000, 1)], lanes) for lanes in (2, 4, 8, 16)]
    found = [exchange(some.lanes).seconds(some) for some in work]
    gathered, ring = ([seconds[name] for seconds in found] for name in ("gather", "pass_q"))
    assert gathered == sorted(gathered, reverse=True) and ring == sorted(ring)


def test_rates_come_from_a_profile():
    shape = MODELS["llama3.1-405b"]
    device = devices()["h100"]
    rates = device.costs(shape, 8).exchange_rates(Heads(16, 1, 128))
    assert rates.flops_per_s == pytest.approx(device.attention_flops_per_s)
    assert rates.hop == rates.all_gather == rates.all_to_all and rates.hop.seconds == pytest.approx(
        device.node.seconds
    )
    assert rates.hop.bytes_per_s == pytest.approx(device.node.bytes_per_s)
    nothing = choose(ExchangeChooser(4, HEADS, NOMINAL.exchange_rates(HEADS)), [(1000, 10)])
    assert nothing.strategy == "gather" and set(nothing.seconds.values()) == {0.0}


# --- choice


@given(CHUNKS, LANES)
def test_auto_is_the_least_and_a_strategys_name_is_itself(chunks, lanes):
    decision = choose(exchange(lanes), chunks)
    assert decision.seconds[decision.strategy] == min(decision.seconds.values())
    for name in EXCHANGES:
        fixed = choose(exchange(lanes, name), chunks)
        assert fixed.strategy == name and fixed.seconds == decision.seconds


@pytest.mark.parametrize("chooser", ["alg1", "alg5"])
@given(
    cached=st.integers(0, 500_000),
    new=st.integers(1, 50_000),
    more=st.integers(0, 50_000),
    lanes=st.sampled_from([2, 4, 8]),
)
def test_once_pass_kv_is_chosen_more_new_tokens_do_not_change_it(chooser, cached, new, more, lanes):
    rule = exchange(lanes, chooser)
    assert (
        choose(rule, [(cached, new)]).strategy == "pass_q"
        or choose(rule, [(cached, new + more)]).strategy == "pass_kv"
    )


def test_thresholds_of_the_paper():
    """Eq. 1: 12.5 %. Eq. 2: N C N_KV e / (2 N_H BW) = 5000 tokens here. Appendix C lowers the first
    by 4 T BW / (N C e)."""
    some = exchange()
    assert equal_miss(HEADS) == 0.125
    assert hides_pass_kv(some, 5000) and not hides_pass_kv(some, 4999)
    assert hides_pass_q(some, 40_000) and not hides_pass_q(some, 39_999)  # Eq. 3: N e C / (4 BW)
    first, fifth = (exchange(chooser=name) for name in ("alg1", "alg5"))
    assert [choose(first, [(8000 - new, new)]).strategy for new in (999, 1000)] == [
        "pass_q",
        "pass_kv",
    ]
    assert (
        choose(first, [(10**6, 4999)]).strategy == "pass_q"
        and choose(first, [(10**6, 5000)]).strategy == "pass_kv"
    )
    miss = 0.125 - 4 * 3200 * 25e9 / (4 * 500e12 * 2)  # 4.5 %
    below, above = (int(3200 / miss * scale) - 3200 for scale in (1.01, 0.99))
    assert [choose(fifth, [(cached, 3200)]).strategy for cached in (below, above)] == [
        "pass_q",
        "pass_kv",
    ]


def test_full_prefill_passes_kv_and_decode_gathers():
    assert choose(exchange(), [(0, 128_000)]).strategy == "pass_kv"
    assert choose(exchange(), [(128_000, 1)] * 8).strategy == "gather"


def test_a_line_is_fitted_to_measurements():
    true = Boundary(-0.5, 1.2, 7.0)
    dice = np.random.default_rng(0)
    cached = dice.integers(0, 200_000, 400)
    new = dice.integers(1, 30_000, 400)
    points = [
        (p, t, 1.0, 2.0 if true(p, t) > 0 else 0.5) for p, t in zip(cached.tolist(), new.tolist())
    ]
    found = fit_boundary(points)
    wrong = sum((found(p, t) > 0) != (kv < q) for p, t, kv, q in points)
    assert wrong <= 4 and found.new / found.miss == pytest.approx(true.new / true.miss, rel=0.15)
    chooser = exchange(chooser=fitted(found))
    assert (
        choose(chooser, [(0, 20_000)]).strategy == "pass_kv"
        and choose(chooser, [(200_000, 10)]).strategy == "pass_q"
    )


def test_points_of_one_length_still_give_a_line():
    points = [
        (128_000 - new, new, 1.0, 2.0 if new > 8000 else 0.5)
        for new in (1280, 3200, 6400, 12_800, 64_000, 128_000)
    ]
    found = fit_boundary(points)
    assert [found(cached, new) > 0 for cached, new, *_ in points] == [False] * 3 + [True] * 3


# --- mistakes


@pytest.mark.parametrize(
    "field, make",
    [
        ("lanes", lambda: work_of([(0, 1)], 0)),
        ("chunks", lambda: work_of([], 2)),
        ("cached", lambda: work_of([(-1, 1)], 2)),
        ("new", lambda: work_of([(5, 0)], 2)),
        ("shards", lambda: work_of([(5, 1)], 2, [3, 3])),
        ("kv_heads", lambda: Heads(4, 0, 64)),
        ("stored", lambda: Heads(4, 1, 64, stored=-1)),
        ("flops_per_s", lambda: dataclasses.replace(RATES, flops_per_s=0)),
        ("hidden", lambda: dataclasses.replace(RATES, hidden=1.1)),
        ("hop", lambda: dataclasses.replace(RATES, hop=Link(0, 0))),
        ("launch", lambda: dataclasses.replace(RATES, launch=-1)),
        ("exchange", lambda: exchange(chooser="alg2")),
        ("exchange", lambda: exchange(chooser="roofline")),
        ("lanes", lambda: exchange(0)),
        ("piece", lambda: exchange(piece=-1)),
        ("points", lambda: fit_boundary([(0, 10, 1.0, 2.0)])),
        ("points", lambda: fit_boundary([])),
    ],
)
def test_what_is_wrong_is_named(field, make):
    with pytest.raises(ConfigError) as error:
        make()
    assert error.value.field == field


def test_choosers_and_strategies_have_their_names():
    assert list(EXCHANGES) == ["gather", "pass_q", "pass_kv", "visit"]
    assert list(EXCHANGE_CHOICES) == [*EXCHANGES, "auto", "alg1", "alg5"]
    assert list(DECODE_CHOICES) == ["gather", "pass_q", "visit", "auto"]


# --- decodes


def test_seconds_of_decodes_by_hand():
    """Two decodes on each of four lanes. A hop takes longer than the attention of a quarter of the
    KV, and is hidden behind it with 100 times as much."""
    gathered = 30e-6 + 3 * 2 * 4608 / 25e9
    home = 70e-6 + 3 * 2 * 4128 / 40e9
    kv = 30e-6 + 3 * 2 * 512 / 25e9
    hop = 30e-6 + 2 * 4096 / 25e9
    attention = 5e-6 + 10_000 * 512 / 2e12
    seconds = exchange(4).decodes(2, 40_000).seconds
    assert seconds["gather"] == pytest.approx(gathered + home)
    assert seconds["pass_q"] == pytest.approx(kv + 3 * (hop - attention + 5e-6) + home)
    hidden = exchange(4).decodes(2, 4_000_000).seconds
    assert hidden["gather"] == seconds["gather"]
    assert hidden["pass_q"] == pytest.approx(kv + 3 * 5e-6 + home)


def test_what_of_a_hop_nothing_hides_counts():
    rates = dataclasses.replace(RATES, hidden=0.0)
    open_, hidden = (
        ExchangeChooser(4, HEADS, some).decodes(2, 4e6).seconds["pass_q"] for some in (rates, RATES)
    )
    assert open_ - hidden == pytest.approx(3 * (30e-6 + 2 * 4096 / 25e9))


@pytest.mark.parametrize(
    "share, context, fastest",
    [(1, 1_000, "gather"), (1, 1e7, "gather"), (200, 1_000, "gather"), (200, 100_000, "pass_q")],
)
def test_decodes_go_round_a_ring_where_they_are_many_and_their_contexts_long(
    share, context, fastest
):
    """Few have queries that are gathered sooner than a ring makes its calls of attention; short
    contexts hide no hop."""
    decision = exchange(4, decode_chooser="auto").decodes(share, share * context)
    assert decision.strategy == min(decision.seconds, key=decision.seconds.get)
    assert fastest == min(("gather", "pass_q"), key=decision.seconds.get)
    for fixed in decode_exchanges():
        found = exchange(4, decode_chooser=fixed).decodes(share, share * context)
        assert (found.strategy, found.seconds) == (fixed, decision.seconds)


@pytest.mark.parametrize(("bytes_per_s", "fastest"), [(25e9, "pass_q"), (2.5e12, "gather")])
def test_a_slow_link_favours_the_ring_of_long_decodes(bytes_per_s, fastest):
    link = Link(1e-6, bytes_per_s)
    rates = dataclasses.replace(RATES, hop=link, all_gather=link, all_to_all=link)
    chooser = ExchangeChooser(8, HEADS, rates, decode_chooser="auto")
    seconds = chooser.decodes(64, 64 * 500_000).seconds
    assert fastest == min(("gather", "pass_q"), key=seconds.get)


def test_decodes_leave_an_exchange_that_was_measured_to_be_slow():
    """What chunks take by it says nothing of that."""
    slow = {"gather": Correction(seconds=1.0)}
    plain = exchange(4, decode_chooser="auto").decodes(1, 1_000)
    measured = exchange(4, decode_chooser="auto", decode_corrections=slow).decodes(1, 1_000)
    assert plain.strategy == "gather" != measured.strategy
    assert measured.seconds["gather"] == pytest.approx(1 + plain.seconds["gather"])
    assert exchange(4, decode_chooser="auto", corrections=slow).decodes(1, 1_000) == plain


def test_a_smaller_group_of_as_many_decodes_a_lane_says_less():
    two, four, eight = (exchange(lanes).decodes(4, 1e5).seconds for lanes in (2, 4, 8))
    for name in decode_exchanges():
        assert two[name] < four[name] < eight[name]


def test_seconds_of_visiting_decodes_by_hand():
    """Four decodes on each of four lanes, of which one visits each other lane: the attention of a
    lane's own decodes hides the way home, if it is long enough."""
    there = 70e-6 + 3 * 4096 / 40e9
    beside = 70e-6 + 3 * 4128 / 40e9 + 70e-6 + 3 * 512 / 40e9
    attention = 5e-6 + 10_000 * 512 / 2e12
    short, long = (exchange(4).decodes(4, kv, 0.25).seconds["visit"] for kv in (40_000, 4_000_000))
    assert short == pytest.approx(there + beside - attention + 5e-6)
    assert long == pytest.approx(there + 5e-6)


def test_decodes_visit_where_few_lanes_hold_them():
    few, all_lanes = (exchange(8, decode_chooser="auto").decodes(128, 1e3, x) for x in (0.1, 1.0))
    assert (few.strategy, all_lanes.strategy) == ("visit", "gather")


def test_attention_of_decodes_takes_what_a_profile_says():
    costs = dataclasses.replace(NOMINAL, decode=1.0, decode_seq=0.5, decode_kv=1e-3)
    seconds = exchange(2, costs=costs).decodes(3, 1000).seconds
    # a call more, which hides the hop
    assert seconds["pass_q"] == pytest.approx(1.0, abs=1e-3)


def test_an_exchange_of_decodes_that_is_not_known_is_refused():
    with pytest.raises(ConfigError, match="'pass_kv' is not one of gather, pass_q, visit, auto"):
        exchange(4, decode_chooser="pass_kv")
