"""Every exchange strategy gives dense attention in groups of every size, and the bytes that cross
the lanes of a group are those of the formulas."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from experiments.multihost.hlo import collectives
from jaxserve.kernels.kv_pages import KVPages
from jaxserve.lanes import exchange as strategies
from jaxserve.lanes.work import ExchangeWork, Heads, work_of_decodes
from jaxserve.sharding import attention, exchange
from jaxserve.sharding.attend import Attend
from jaxserve.sharding.exchange import EXCHANGES
from jaxserve.sharding.lane_groups import LaneGroups
from jaxserve.sharding.mesh import KVP, TP
from jaxserve.sharding.rows import Groups, spread_rows
from tests.examples import examples

ATTEND = Attend(0.3)
CAPPED = Attend(0.3, softcap=0.7)
# tokens of a page, head dim, sequences, pages of a lane, tokens of a prefill row
C = 4
H = 8
SLOTS = 5
PAGES = 110
LARGE_POOL = 2**15  # pages, where memory is read
WIDTH = 8
# of a lane
ROWS = 16
DECODES = 2
HEADS = {1: (2, 3), 2: (1, 16), 4: (4, 1), 8: (1, 2)}  # kv heads and queries of each, by lanes

# lanes, and those of a group
ALONE = (1, 1)
SEVERAL = [(2, 2), (4, 2), (4, 4), (8, 2), (8, 4), (8, 8)]
PARTS = [(4, 2), (8, 2), (8, 4)]
WITHOUT_SOME = [(4, 4), (8, 4), (8, 8)]  # groups of more lanes than hold a sequence


def by_default(chosen: Sequence[tuple[int, int]], every: Sequence[tuple[int, int]]) -> list:
    """Parameters `every`, each of which is compiled for long; only `chosen` are no matrix."""
    marks = [() if group in chosen else pytest.mark.matrix for group in every]
    return [pytest.param(*group, marks=mark) for group, mark in zip(every, marks)]


COMPILED = [(8, 4)]  # of the programs whose text is read; several tests read the same ones
pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


@dataclass
class Case:
    """Sequences whose blocks are on random lanes of a random group; the last sequences decode.
    group_size: lanes of a group. holders: lanes of the group that hold a sequence; 0: any. rows:
    (slot, start, length, lane) of decodes and of prefill rows."""

    lanes: int
    group_size: int
    cached: list[int]
    new: list[int]
    seed: int
    holders: int = 0
    owner: list[np.ndarray] = field(init=False)  # lane of each block
    rows: tuple[list, list] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.owner = []
        decodes = []
        prefills = []
        for slot, (cached, new) in enumerate(zip(self.cached, self.new)):
            first = int(rng.integers(0, self.lanes)) // self.group_size * self.group_size
            last = first + self.group_size
            lanes = np.arange(first, last)
            if self.holders:
                lanes = rng.permutation(lanes)[: self.holders]
            self.owner.append(lanes[rng.integers(0, len(lanes), -(-(cached + new) // C))])
            if new == 1 and len(decodes) < DECODES:
                decodes.append((slot, cached, 1, int(rng.integers(first, last))))
                continue
            at = cached
            while at < cached + new:  # rows that end where the lane changes
                lane = self.owner[slot][at // C]
                stop = at
                while (
                    stop < cached + new
                    and stop - at < WIDTH
                    and self.owner[slot][stop // C] == lane
                ):
                    stop += 1
                prefills.append((slot, at, stop - at, int(lane)))
                at = stop
        full = [sum(row[3] == lane for row in prefills) > ROWS for lane in range(self.lanes)]
        self.rows = decodes, [] if any(full) else prefills  # which is rare

    @property
    def room(self) -> float:
        """The least share of a lane's rows for which `visit` must have room per pair of lanes."""
        need = 0.0
        for some, most in zip(self.rows, (DECODES, ROWS)):
            pairs = Counter(
                (lane, other)
                for slot, _, _, lane in some
                for other in set(self.owner[slot].tolist()) - {lane}
            )
            need = max(need, max(pairs.values(), default=0) / most)
        return next(room for room in strategies.ROOMS if room >= need)


@st.composite
def cases(draw, lanes: int, group_size: int, holders: int = 0):
    count = draw(st.integers(1, SLOTS))
    new = draw(st.lists(st.sampled_from([0, 1, 1, 2, 7, 16, 19]), min_size=count, max_size=count))
    cached = draw(st.lists(st.integers(0, 60), min_size=count, max_size=count))
    return Case(lanes, group_size, cached, new, draw(st.integers(0, 1000)), holders)


def sinks_of(lanes: int) -> np.ndarray:
    return np.random.default_rng(lanes).standard_normal(HEADS[lanes]).astype(np.float32)


def decodes_beside(strategy: str) -> str:
    """An exchange of decodes beside chunks with this one: the same, if it has no settled rows."""
    return "gather" if strategies.EXCHANGES[strategy].settled else strategy


def program(
    strategy: str,
    of_decodes: str,
    lanes: LaneGroups,
    alone: bool,
    room: float,
    attend: Attend,
    everywhere,
    rows,
    pages,
    q,
    kv,
):
    """The attention of a step in one layer, on one lane; alone: of its decodes only. With a soft
    cap, it has sinks too."""
    table = everywhere[0]
    lane = lanes.index()
    groups = []
    at = 0
    parts = [(DECODES, 1, of_decodes), (ROWS, WIDTH, strategy)]
    for number, width, name in parts[:1] if alone else parts:
        mine = lanes.gather_rows(rows[0, at : at + number])
        groups.append(spread_rows(mine, lane, width, table, PAGES, C, name, apart=width == 1))
        at += number
    tokens = DECODES if alone else None
    step = Groups((), tuple(groups), table, lanes, room)
    sinks = sinks_of(jax.lax.axis_size(KVP)) if attend.softcap else None
    out, pool = attention.attention(
        q[0, :tokens], kv[0, :tokens], KVPages(pages), step, attend, sinks
    )
    return out[None], pool.kv


@functools.cache
def compiled(
    strategy: str,
    lanes: int,
    group_size: int,
    alone: bool = False,
    room: float = 1.0,
    attend: Attend = ATTEND,
    of_decodes: str = "",
):
    """of_decodes: exchange of decodes; by default that of chunks, or `decodes_beside` it."""
    of_decodes = of_decodes or (strategy if alone else decodes_beside(strategy))
    mesh = Mesh(np.array(jax.devices()[:lanes]).reshape(lanes, 1), (KVP, TP))
    lane = PartitionSpec(KVP)
    groups = LaneGroups(group_size)
    f = functools.partial(program, strategy, of_decodes, groups, alone, room, attend)
    return jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=(lane,) * 5, out_specs=(lane, lane), check_vma=False),
        donate_argnums=(2,),
    )


def inputs(case: Case):
    """Table [lanes, 2, SLOTS, W], rows [lanes, n, 3 + group_size], pages, q, kv of all lanes; all
    keys and values by slot; a token's place."""
    rng = np.random.default_rng([case.seed, 1])
    K, G = HEADS[case.lanes]
    table = rng.integers(0, PAGES, (case.lanes, 2, SLOTS, 24)).astype(np.int32)
    pages = np.full((case.lanes, PAGES, K, 2, C, H), np.nan, np.float32)
    free = [iter(rng.permutation(PAGES).tolist()) for _ in range(case.lanes)]
    held = np.zeros((SLOTS, case.lanes), np.int32)
    truth = []
    pages_of = {}
    for slot, owner in enumerate(case.owner):
        x = rng.standard_normal((case.cached[slot] + case.new[slot], K, 2, H)).astype(np.float32)
        truth.append(x)
        for block, lane in enumerate(owner.tolist()):
            page = pages_of[slot, block] = next(free[lane])
            table[lane, :, slot, held[slot, lane]] = page, block
            held[slot, lane] += 1
            old = x[block * C : min((block + 1) * C, case.cached[slot])]
            pages[lane, page, :, :, : len(old)] = old.transpose(1, 2, 0, 3)
    rows = np.zeros((case.lanes, DECODES + ROWS, 3 + case.group_size), np.int32)
    tokens = DECODES + ROWS * WIDTH
    q = rng.standard_normal((case.lanes, tokens, K, G, H)).astype(np.float32)
    kv = np.full((case.lanes, tokens, K, 2, H), np.nan, np.float32)
    places = []
    used = np.zeros((2, case.lanes), int)
    for group, (some, width) in enumerate(zip(case.rows, (1, WIDTH))):
        for slot, start, length, lane in some:
            row = group * DECODES + used[group, lane]
            at = group * DECODES + used[group, lane] * width
            used[group, lane] += 1
            first = lane - lane % case.group_size
            rows[lane, row] = slot, start, length, *held[slot, first : first + case.group_size]
            kv[lane, at : at + length] = truth[slot][start : start + length]
            places += [(slot, start + i, lane, at + i) for i in range(length)]
    return (table, rows, pages, q, kv), truth, places, pages_of


def dense(q: np.ndarray, x: np.ndarray, attend: Attend, sinks: np.ndarray) -> np.ndarray:
    """Dense attention of q [K, G, H] over keys and values x [S, K, 2, H]."""
    scores = np.einsum("kgh,skh->kgs", q.astype(np.float64) * attend.scale, x[:, :, 0])
    sink = 0.0
    if attend.softcap:
        scores = attend.softcap * np.tanh(scores / attend.softcap)
        sink = np.exp(sinks)[..., None]
    weights = np.exp(scores)
    return np.einsum("kgs,skh->kgh", weights / (weights.sum(-1, keepdims=True) + sink), x[:, :, 1])


def assert_dense(
    case: Case,
    strategy: str,
    alone: bool = False,
    room: float = 1.0,
    attend: Attend = ATTEND,
    of_decodes: str = "",
) -> None:
    arguments, truth, places, pages_of = inputs(case)
    run = compiled(strategy, case.lanes, case.group_size, alone, room, attend, of_decodes)
    out, pages = map(np.asarray, run(*arguments))
    for slot, position, lane, token in places:
        np.testing.assert_allclose(
            out[lane, token],
            dense(
                arguments[3][lane, token],
                truth[slot][: position + 1],
                attend,
                sinks_of(case.lanes),
            ),
            rtol=1e-5,
            atol=1e-5,
        )
        block = position // C
        stored = pages[case.owner[slot][block], pages_of[slot, block], :, :, position % C]
        np.testing.assert_array_equal(stored, truth[slot][position])


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(exchange, "PIECE_TOKENS", 3 * C)  # several of them, the last one not full


@pytest.mark.parametrize("lanes, group_size", by_default([(4, 2), (8, 8)], [ALONE, *SEVERAL]))
@pytest.mark.parametrize("strategy", EXCHANGES)
def test_every_strategy_is_dense_attention(strategy, lanes, group_size):
    @settings(max_examples=examples(12), deadline=None, database=None)
    @given(cases(lanes, group_size))
    def check(case: Case) -> None:
        assert_dense(case, strategy)

    check()


@pytest.mark.parametrize("lanes, group_size", by_default([(4, 2)], [ALONE, (4, 2), (8, 8)]))
@pytest.mark.parametrize("strategy", EXCHANGES)
def test_soft_caps_and_sinks_are_those_of_dense_attention(strategy, lanes, group_size):
    @settings(max_examples=examples(5), deadline=None, database=None)
    @given(cases(lanes, group_size))
    def check(case: Case) -> None:
        assert_dense(case, strategy, attend=CAPPED)

    check()


@pytest.mark.parametrize("lanes, group_size", by_default([(8, 8)], [ALONE, *SEVERAL]))
@pytest.mark.parametrize("strategy", ["pass_q", "visit"])
def test_decodes_alone_reach_others_wherever_their_keys_belong(strategy, lanes, group_size):
    @settings(max_examples=examples(12), deadline=None, database=None)
    @given(cases(lanes, group_size))
    def check(case: Case) -> None:
        case.rows = case.rows[0], []
        assert_dense(case, strategy, alone=True)

    check()


# exchanges of chunks, and of decodes beside them: those that `auto` chooses from, and all others
MIXED = [(chunks, "pass_q") for chunks in ("gather", "pass_q", "pass_kv")]
OTHERS = [("visit", "gather"), ("visit", "pass_q")]
OTHERS += [(chunks, "visit") for chunks in ("gather", "pass_q", "pass_kv")]
ALL_MIXED = [*MIXED, *(pytest.param(*pair, marks=pytest.mark.matrix) for pair in OTHERS)]


@pytest.mark.parametrize("lanes, group_size", by_default([(8, 4)], SEVERAL))
@pytest.mark.parametrize("strategy, of_decodes", ALL_MIXED)
def test_decodes_beside_chunks_reach_others_by_an_exchange_of_their_own(
    strategy, of_decodes, lanes, group_size
):
    @settings(max_examples=examples(12), deadline=None, database=None)
    @given(cases(lanes, group_size))
    def check(case: Case) -> None:
        assert_dense(case, strategy, of_decodes=of_decodes)

    check()


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("lanes, group_size", by_default([(8, 4)], WITHOUT_SOME))
def test_visitors_find_room_where_few_lanes_hold_a_sequence(lanes, group_size, alone):
    rooms = set()

    @settings(max_examples=examples(12), deadline=None, database=None)
    @given(cases(lanes, group_size, holders=2))
    def check(case: Case) -> None:
        if alone:
            case.rows = case.rows[0], []
        rooms.add(case.room)
        assert_dense(case, "visit", alone, case.room)

    check()
    assert min(rooms) < 1


@pytest.mark.parametrize("strategy", EXCHANGES)
def test_a_prompt_of_fewer_tokens_than_lanes_after_a_context_that_one_lane_holds(strategy):
    for cached, new in ((0, 3), (40, 2), (41, 1), (0, 1)):
        case = Case(8, 8, [cached], [new], 1)
        case.owner[0][:] = 5
        case.rows = ([], [(0, cached, new, 5)])
        assert_dense(case, strategy)


@functools.cache
def machine_code(
    strategy: str, lanes: int, group_size: int, alone: bool = False, room=1.0, of_decodes: str = ""
):
    """The compiled program, with a pool that is larger than all else."""
    arguments = inputs(Case(lanes, group_size, [40], [16], 0))[0]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments]
    shapes[2] = shapes[2].update(shape=(lanes, LARGE_POOL, *shapes[2].shape[2:]))
    step = compiled(strategy, lanes, group_size, alone, room, of_decodes=of_decodes)
    return step.lower(*shapes).compile()


def text_of(*step, **more) -> str:
    return machine_code(*step, **more).as_text()


def crossed(
    strategy: str,
    lanes: int,
    group_size: int,
    alone: bool = False,
    room: float = 1.0,
    of_decodes: str = "",
) -> dict[str, int]:
    """Bytes that a lane sends to others in the compiled program, by collective; for `pass_kv` those
    of one chunk."""
    text = text_of(strategy, lanes, group_size, alone, room, of_decodes=of_decodes)
    out = {"all-gather": 0, "all-to-all": 0, "collective-permute": 0}
    for line in text.splitlines():
        if found := re.search(
            r" = (.*?) (all-gather|all-to-all|collective-permute)(?:-start)?\((.*?)\)", line
        ):
            arrays = [
                4 * np.prod([int(n) for n in shape.split(",")])
                for shape in re.findall(r"f32\[([\d,]+)\]", found[1])
            ]
            whole = sum(arrays)  # f32 only: what says which rows there are is small
            out[found[2]] += (
                whole
                if found[2] == "collective-permute"
                else whole * (group_size - 1) // group_size
            )
    return {name: int(size) for name, size in out.items()}


@pytest.mark.parametrize("lanes, group_size", by_default(COMPILED, SEVERAL))
def test_what_crosses_lanes_is_what_the_formulas_say(lanes, group_size):
    """Compares compiled programs with the formulas of `lanes.exchange`, which are those of
    the Context Parallelism paper; all rows of a step count as new tokens."""
    K, G = HEADS[lanes]
    heads = Heads(K * G, K, H, item=4, partial=4)
    rows = ROWS * WIDTH
    new = ExchangeWork(
        group_size,
        tokens=group_size * (rows + DECODES),
        context=0,
        pairs=0,
        share=rows + DECODES,
        shard=3 * C,
        touched=0,
    )
    said = strategies.gather_traffic(new, heads)
    assert crossed("gather", lanes, group_size) == {
        "all-gather": said.gathered,
        "all-to-all": said.returned,
        "collective-permute": 0,
    }
    # of rows that are not settled
    few = strategies.gather_traffic(dataclasses.replace(new, share=DECODES), heads)
    new = dataclasses.replace(new, share=rows)
    said = strategies.pass_q_traffic(new, heads)
    assert crossed("pass_q", lanes, group_size) == {
        "all-gather": few.gathered,
        "all-to-all": few.returned + said.returned,
        "collective-permute": said.hops * said.hop,
    }
    said = strategies.pass_kv_traffic(new, heads, piece=3 * C)
    assert said.rounds == 1
    assert crossed("pass_kv", lanes, group_size) == {
        "all-gather": few.gathered,
        "all-to-all": few.returned,
        "collective-permute": said.hops * said.hop,
    }


@pytest.mark.parametrize("lanes, group_size", by_default(COMPILED, SEVERAL))
@pytest.mark.parametrize("strategy", strategies.decode_exchanges())
def test_what_crosses_lanes_for_decodes_alone_is_what_the_formulas_say(strategy, lanes, group_size):
    K, G = HEADS[lanes]
    heads = Heads(K * G, K, H, item=4, partial=4)
    said = strategies.EXCHANGES[strategy].decode_traffic(
        work_of_decodes(group_size, DECODES, 0.0), heads
    )
    assert crossed(strategy, lanes, group_size, alone=True) == {
        "all-gather": said.gathered,
        "all-to-all": said.returned + said.visiting + said.put,
        "collective-permute": said.hops * said.hop,
    }


@pytest.mark.parametrize("lanes, group_size", by_default(COMPILED, PARTS))
@pytest.mark.parametrize("strategy, of_decodes", ALL_MIXED)
def test_what_crosses_lanes_for_decodes_beside_chunks_is_the_sum(
    strategy, of_decodes, lanes, group_size
):
    """Decodes add what they send alone, also where they go with chunks."""
    sent = crossed(strategy, lanes, group_size, of_decodes=of_decodes)
    alone = crossed(of_decodes, lanes, group_size, alone=True)
    usual = crossed(strategy, lanes, group_size)
    usually = crossed(decodes_beside(strategy), lanes, group_size, alone=True)
    assert sent == {name: usual[name] - usually[name] + alone[name] for name in sent}


def test_decodes_that_go_with_chunks_round_a_ring_add_no_hop_and_no_way_home():
    count = lambda text, name: len(re.findall(rf" {name}(?:-start)?\(", text))
    joined, apart = (text_of("pass_q", 8, 4, of_decodes=name) for name in ("pass_q", "gather"))
    assert count(joined, "collective-permute") == count(apart, "collective-permute") == 3
    assert (count(joined, "all-to-all"), count(apart, "all-to-all")) == (1, 2)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("lanes, group_size", by_default(COMPILED, WITHOUT_SOME))
def test_visits_take_the_share_of_what_is_gathered_that_they_have_room_for(
    lanes, group_size, alone
):
    rows = DECODES + (not alone) * ROWS * WIDTH
    gathered = sum(crossed("gather", lanes, group_size, alone).values())
    for room in strategies.ROOMS:
        some = math.ceil(room * DECODES) + (not alone) * math.ceil(room * ROWS) * WIDTH
        sent = crossed("visit", lanes, group_size, alone, room)
        assert sent["all-to-all"] * rows == gathered * some
        assert sent["all-gather"] == sent["collective-permute"] == 0


@pytest.mark.parametrize(
    "strategy, alone",
    [("gather", False), ("pass_q", True), ("visit", False), ("visit", True)],
)
def test_pages_are_written_without_a_copy_of_the_pool(strategy, alone):
    memory = machine_code(strategy, 8, 8, alone, 0.5 if strategy == "visit" else 1.0)
    pool = LARGE_POOL * math.prod((HEADS[8][0], 2, C, H)) * 4
    assert memory.memory_analysis().alias_size_in_bytes == pool
    assert memory.memory_analysis().temp_size_in_bytes < pool / 4


@pytest.mark.parametrize("strategy, of_decodes", ALL_MIXED)
def test_pages_are_written_without_a_copy_of_the_pool_by_two_exchanges(strategy, of_decodes):
    memory = machine_code(strategy, 8, 4, of_decodes=of_decodes).memory_analysis()
    pool = LARGE_POOL * math.prod((HEADS[8][0], 2, C, H)) * 4
    assert memory.alias_size_in_bytes == pool and memory.temp_size_in_bytes < pool / 4


def test_profiles_show_the_functions_of_the_data_plane():
    text = text_of("visit", 8, 8, True, 0.5)
    for name in ("init_query", "query", "init_transfer", "put"):
        assert f"/{name}/" in text
    assert re.search(r"all-to-all.*/query/", text) and re.search(
        r"all-to-all.*/init_transfer/", text
    )


@pytest.mark.parametrize(
    "strategy, alone",
    [*((strategy, False) for strategy in EXCHANGES), ("pass_q", True), ("visit", True)],
)
@pytest.mark.parametrize("lanes, group_size", by_default(COMPILED, PARTS))
def test_nothing_leaves_a_group_and_a_ring_has_a_hop_less_than_lanes(
    strategy, alone, lanes, group_size
):
    found = collectives(text_of(strategy, lanes, group_size, alone), lanes)
    for one in found:
        # all lanes run the loop over pieces of KV equally often
        loop = one.operation == "all-reduce" and one.bytes == 4 and strategy == "pass_kv"
        assert one.groups
        for group in one.groups:
            assert loop or len({lane // group_size for lane in group}) == 1
    hops = [one for one in found if one.operation == "collective-permute"]
    for source, target in (pair for one in hops for pair in one.groups):
        assert target % group_size == (source + 1) % group_size
    wanted = {"gather": 0, "pass_q": 1, "pass_kv": 2, "visit": 0}  # blocks come with their numbers
    assert sum(one.times for one in hops) == wanted[strategy] * (group_size - 1)


@pytest.mark.parametrize(
    "strategy, alone", [("pass_q", False), ("pass_kv", False), ("pass_q", True)]
)
def test_a_hop_does_not_wait_for_the_attention_that_it_runs_beside(strategy, alone):
    """Each hop sends what the previous hop received, or what the lane had: it does not depend on
    attention."""
    text = text_of(strategy, 8, 4, alone)
    made = dict(re.findall(r"^\s*(?:ROOT )?%([\w.-]+) = (.*)$", text, re.M))
    hops = [name for name, what in made.items() if re.search(r" collective-permute\(", what)]
    sources = [re.search(r"collective-permute\(%([\w.-]+)\)", made[name])[1] for name in hops]
    assert len(hops) == 3 * {"pass_q": 1, "pass_kv": 2}[strategy]  # blocks come with their numbers
    assert sum(source in hops for source in sources) == len(hops) * 2 // 3
    # of attention's loop over keys
    assert not any("while" in made[source].split("(")[0] for source in sources)
