"""Plans of chunks: against a search that is written down as Tetris prints it, the paper's examples,
and what holds of every plan."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.tetris import model
from experiments.tetris.fig3 import occupied
from jaxserve.lanes.cdsp import (
    PLANNERS,
    CdspPlan,
    Instances,
    Latency,
    cdsp,
    fit,
    fixed,
    free_growth,
    single,
)
from jaxserve.settings.schema import ConfigError
from tests.examples import examples

K = 1024
LENGTHS = (4, 8, 16, 32, 64, 128, 256)
TABLE = {  # Tetris, Table 1: seconds; 256k tokens do not fit on one instance
    1: (0.28, 0.57, 1.29, 3.22, 9.05, 29.20),
    2: (0.16, 0.31, 0.69, 1.67, 4.61, 14.30, 50.07),
    4: (0.13, 0.20, 0.39, 0.92, 2.43, 7.32, 24.77),
    8: (0.21, 0.24, 0.31, 0.58, 1.37, 3.96, 12.81),
    16: (0.39, 0.43, 0.46, 0.53, 0.96, 2.31, 7.02),
}
POINTS = [
    (size, 0, length * K, seconds)
    for size, row in TABLE.items()
    for length, seconds in zip(LENGTHS, row)
]
FITTED = fit(POINTS)
links_of_a100s = functools.partial(model.growth, "llama3-8b")
REAL = Instances(FITTED, per_node=8, growth=free_growth)


# --- the latency model


def test_table_1_is_fitted_within_five_percent():
    errors = [
        abs(FITTED[size](history, tokens) / seconds - 1)
        for size, history, tokens, seconds in POINTS
    ]
    assert np.mean(errors) < 0.02 and max(errors) < 0.07
    for latency in FITTED.values():
        assert (
            min(latency.base, latency.token, latency.pair) >= 0
            and latency.history == 2 * latency.pair
        )


def test_a_prompt_in_two_chunks_costs_one_base_more_than_in_one():
    """The history's coefficient means that where the table has no history."""
    latency = FITTED[8]
    assert latency(0, 30_000) + latency(30_000, 50_000) == pytest.approx(
        latency(0, 80_000) + latency.base
    )


def test_true_coefficients_are_found_from_points_with_history():
    true = {2: Latency(0.02, 3e-5, 1.5e-9, 6e-10), 4: Latency(0.05, 1.5e-5, 5e-10, 3e-10)}
    grid = [
        (size, history, tokens)
        for size in true
        for history in (0, 10_000, 90_000)
        for tokens in (1000, 8000, 50_000)
    ]
    found = fit((*point, true[point[0]](*point[1:])) for point in grid)
    for size in true:
        assert (
            found[size].base,
            found[size].token,
            found[size].history,
            found[size].pair,
        ) == pytest.approx(
            (true[size].base, true[size].token, true[size].history, true[size].pair), rel=1e-6
        )


@given(
    history=st.integers(0, 200_000),
    tokens=st.integers(1, 300_000),
    size=st.sampled_from(list(TABLE)),
)
def test_tokens_is_the_inverse_of_seconds(history, tokens, size):
    latency = FITTED[size]
    assert latency.tokens(history, latency(history, tokens)) == pytest.approx(tokens, rel=1e-9)
    assert latency.tokens(history, latency.base / 2) == 0


def test_a_latency_without_a_quadratic_term_has_an_inverse_too():
    assert (
        Latency(1.0, 0.5, 0.0, 0.0).tokens(0, 2.0) == 2
        and Latency(1.0, 0.0, 0.0, 0.0).tokens(0, 2.0) == math.inf
    )


# --- the paper's examples


def exact(size: int) -> Latency:
    """The one that gives Table 1's seconds for 16k, 32k and 128k tokens exactly."""
    lengths = np.array([16 * K, 32 * K, 128 * K], float)
    seconds = [TABLE[size][LENGTHS.index(length)] for length in (16, 32, 128)]
    base, token, pair = np.linalg.solve(
        np.stack([lengths**0, lengths, lengths**2], 1), seconds
    ).tolist()
    return Latency(base, token, 2 * pair, pair)


EXACT = Instances({8: exact(8), 16: exact(16)}, per_node=8, growth=free_growth)


def two(policies: Sequence[tuple[str, float]], queues: np.ndarray) -> tuple[float, float]:
    """TTFT of 32k tokens and of 16k that come at the same moment, each by a policy and a rate."""
    found = []
    for tokens, (policy, rate) in zip((32 * K, 16 * K), policies):
        plan = PLANNERS[policy](EXACT, queues, tokens, rate)
        queues = occupied(queues, plan)
        found.append(plan.ttft)
    return found[0], found[1]


def test_sixteen_instances_for_one_request_delay_the_next_one():
    """Tetris 2.4 (2): each instance has a queue of a second."""
    queues = np.ones(16)
    assert two([("single", 0.0)] * 2, queues) == pytest.approx((1.53, 1.84))
    assert two([("fixed-8", 0.0)] * 2, queues) == pytest.approx((1.58, 1.31))
    assert two([("cdsp", 0.1)] * 2, queues) == pytest.approx((1.58, 1.31))


def test_a_first_chunk_fills_the_time_until_the_larger_group_is_free():
    """Tetris 2.4 (3): 16k tokens run on eight of sixteen instances when 128k tokens arrive."""
    running = single(EXACT, np.zeros(16), 16 * K, 0.1)
    assert (len(running.chunks[0].group), running.ttft) == (8, pytest.approx(0.31))
    queues = occupied(np.zeros(16), running)
    large = single(EXACT, queues, 128 * K, 0.0)
    small = fixed(EXACT, queues, 128 * K, 0.0, size=8)
    assert large.ttft == pytest.approx(2.31 + 0.31) and sorted(queues[list(large.chunks[0].group)])[
        7:9
    ] == [0, pytest.approx(0.31)]
    assert small.ttft - large.ttft == pytest.approx(1.34)
    plan = cdsp(EXACT, queues, 128 * K, 0.1)
    first, second = plan.chunks
    assert (len(first.group), first.start, first.end) == (8, 0, pytest.approx(0.31, abs=1e-4))
    assert first.tokens == pytest.approx(16 * K, abs=2), "what eight instances compute in 0.31 s"
    assert (len(second.group), second.start) == (16, pytest.approx(0.31))
    assert plan.ttft < large.ttft - 0.005 and plan.ttft < small.ttft - 1.34


# --- an independent search of the same plans


def longest(latency: Latency, history: int, seconds: float, most: int) -> int:
    """The most tokens, up to `most`, that take no longer than `seconds`."""
    low = 0
    high = most
    while low < high:
        middle = (low + high + 1) // 2
        if latency(history, middle) <= seconds:
            low = middle
        else:
            high = middle - 1
    return low


def grown(
    group: list[int], size: int, queues: list[float], first: list[float], instances: Instances
) -> list[int]:
    """T8; of aligned groups the one with `group` in it, at first that which is free first. first:
    the queues of the beginning, which decide ties."""
    if instances.aligned:
        aligned = [list(range(low, low + size)) for low in range(0, len(queues), size)]
        around = [members for members in aligned if set(group) <= set(members)]
        return min(around, key=lambda members: max(queues[i] for i in members))
    per_node = instances.per_node
    node = lambda i: i // per_node
    wait = lambda i: (queues[i], first[i], i)
    group = list(group)
    inside = sorted(
        (i for i in range(len(queues)) if i not in group and node(i) in {node(j) for j in group}),
        key=wait,
    )
    group += inside[: size - len(group)]
    while len(group) < size:
        need = size - len(group)
        unused = sorted({node(i) for i in range(len(queues))} - {node(i) for i in group})
        by_wait = {
            n: sorted((i for i in range(len(queues)) if node(i) == n), key=wait) for n in unused
        }
        take = min(need, per_node)
        chosen = min(unused, key=lambda n: (*wait(by_wait[n][take - 1])[:2], n))
        group += by_wait[chosen][:take]
    return group


def takes(instances: Instances, group: list[int], size: int, history: int, tokens: int) -> float:
    """Seconds of a chunk on `size` instances, grown out of `group`: with those in which its history
    moves to the others."""
    grows = 0 < len(group) < size
    moves = instances.growth(len(group), size, history, tokens) if grows else 0.0
    return moves + instances.latencies[size](history, tokens)


def exhaustive(
    instances: Instances,
    queues: list[float],
    first: list[float],
    group: list[int],
    sizes: list[int],
    history: int,
    left: int,
    rate: float,
) -> float:
    """Seconds of the best plan for what is left: T5 to T9, with queue times lowered after each
    chunk (Eq. 2) and nothing left out. Chunks on grown groups take what `growth` says besides."""
    largest = 0
    best = math.inf
    for size in sizes:
        wait = max(queues[i] for i in grown(group, size, queues, first, instances))
        seconds = wait + takes(instances, group, size, history, left)
        if largest == 0 or seconds < (1 - rate) * best:
            largest = size
            best = seconds
    for current in sizes:
        smaller = [size for size in instances.latencies if size < current]
        for following in sizes:
            if not current < following <= largest:
                continue
            now = grown(group, current, queues, first, instances)
            later = grown(now, following, queues, first, instances)
            wait = max(queues[i] for i in now)
            time = max(queues[i] for i in later) - wait
            count = longest(instances.latencies[current], history, time, left)
            if count and group:  # beside as many tokens the history moves
                time -= instances.growth(len(group), current, history, count)
                count = longest(instances.latencies[current], history, time, left)
            if count == left:
                continue
            count = (history + count) // instances.block * instances.block - history
            if count <= 0:
                continue
            took = takes(instances, group, current, history, count)
            if smaller and takes(instances, group, max(smaller), history, count) <= took:
                continue
            after = [
                0.0 if i in now else max(0.0, queue - (wait + took))
                for i, queue in enumerate(queues)
            ]
            useful = [size for size in sizes if following <= size <= largest]
            rest = exhaustive(
                instances, after, first, now, useful, history + count, left - count, rate
            )
            best = min(best, wait + took + rest)
    return best


def slow_links(before: int, after: int, history: float, tokens: float) -> float:
    """A tenth of what is sent, and what as many tokens do not hide of it."""
    send = 2e-5 * history * (1 / before - 1 / after)
    return send / 10 + max(send - 2e-5 * tokens / after, 0.0)


@pytest.mark.parametrize("aligned", [False, True], ids=["any", "aligned"])
@pytest.mark.parametrize(
    "growth", [free_growth, links_of_a100s, slow_links], ids=["free", "a100s", "slow"]
)
def test_the_plan_is_the_best_of_an_exhaustive_search(growth, aligned):
    chunks = []
    for seed in range(600):
        rng = np.random.default_rng(seed)
        per_node = int(rng.choice([1, 2, 4, 8]))
        nodes = int(rng.integers(1, 5))
        count = per_node * nodes
        sizes = sorted(
            rng.choice([1, 2, 4, 8, 16], int(rng.integers(1, 6)), replace=False).tolist()
        )
        most = count & -count if aligned else count
        sizes = [size for size in sizes if size <= most] or [1]
        instances = Instances(
            {size: FITTED[size] for size in sizes},
            per_node,
            int(rng.choice([1, 16, 256])),
            aligned,
            growth=growth,
        )
        queues = rng.uniform(0, 4, count) * (rng.random(count) < 0.8)
        queues = (queues.round() if seed % 3 == 0 else queues).tolist()
        tokens = int(rng.integers(1, 200_000))
        rate = float(rng.choice([0.0, 0.05, 0.3, 0.7]))
        plan = cdsp(instances, queues, tokens, rate)
        assert plan.ttft == pytest.approx(
            exhaustive(instances, queues, queues, [], sizes, 0, tokens, rate), rel=1e-9
        ), seed
        chunks.append(len(plan.chunks))
    assert np.bincount(chunks)[2:].sum() > 150, "many plans have several chunks"


# --- what holds of every plan


@st.composite
def cases(draw) -> tuple[Instances, list[float], int, float]:
    per_node = draw(st.sampled_from([1, 2, 4, 8]))
    count = per_node * draw(st.integers(1, 4))
    sizes = draw(
        st.sets(st.sampled_from([1, 2, 4, 8, 16]), min_size=1).filter(
            lambda sizes: min(sizes) <= count
        )
    )
    queues = draw(
        st.lists(st.floats(0, 10) | st.sampled_from([0.0, 1.0]), min_size=count, max_size=count)
    )
    instances = Instances(
        {size: FITTED[size] for size in sizes},
        per_node,
        draw(st.sampled_from([1, 16, 512])),
        growth=draw(st.sampled_from([free_growth, slow_links])),
    )
    return instances, queues, draw(st.integers(1, 300_000)), draw(st.floats(0, 0.75))


def replayed(plan: CdspPlan, instances: Instances, queues: Sequence[float]) -> float:
    """The end of the last chunk if each begins as soon as all of its group can."""
    free = list(queues)
    done = 0.0
    history = 0
    before: tuple[int, ...] = ()
    for chunk in plan.chunks:
        start = max(done, *(free[i] for i in chunk.group))
        done = start + takes(instances, list(before), len(chunk.group), history, chunk.tokens)
        before = chunk.group
        history += chunk.tokens
        for i in chunk.group:
            free[i] = done
    assert occupied(queues, plan) == pytest.approx(free)
    return done


@settings(max_examples=examples(300), deadline=None)
@given(case=cases(), policy=st.sampled_from(["cdsp", "single"]))
def test_a_plan_is_whole_and_takes_as_long_as_it_says(case, policy):
    instances, queues, tokens, rate = case
    plan = PLANNERS[policy](instances, queues, tokens, rate)
    history = 0
    for before, chunk in zip((None, *plan.chunks), plan.chunks):
        assert chunk.history == history and chunk.tokens > 0 and chunk.end > chunk.start
        assert len(set(chunk.group)) == len(chunk.group) and len(chunk.group) in instances.latencies
        assert set(chunk.group) <= set(range(len(queues)))
        if before:
            assert (
                set(before.group) < set(chunk.group)
                and chunk.start >= before.end
                and chunk.history % instances.block == 0
            )
        history += chunk.tokens
    assert history == tokens
    assert plan.ttft == pytest.approx(replayed(plan, instances, queues), rel=1e-9)


@settings(max_examples=examples(100), deadline=None)
@given(case=cases())
def test_chunks_are_never_worse_than_one(case):
    assert cdsp(*case).ttft <= single(*case).ttft


# --- groups


def group_of(queues: Sequence[float], size: int, per_node: int) -> tuple[int, ...]:
    instances = Instances({size: FITTED[size]}, per_node, growth=free_growth)
    return single(instances, queues, 1000, 0.0).chunks[0].group


def test_a_group_that_fits_into_a_node_stays_in_one():
    """The node whose second queue is shortest, not the two shortest queues of all."""
    assert group_of([0.0, 3.0, 1.0, 2.0], 2, per_node=2) == (2, 3)


def test_a_larger_group_takes_the_nodes_that_are_free_first_whole():
    assert group_of([0.0, 5.0, 1.0, 2.0, 3.0, 3.0], 4, per_node=2) == (2, 3, 4, 5)


def test_a_group_grows_within_its_nodes_first():
    """The first chunk is on instances 0 and 1; the larger group takes 2 and 3 although 4 and 5 are
    free sooner."""
    plan = cdsp(
        Instances({2: FITTED[2], 4: FITTED[4]}, per_node=4, growth=free_growth),
        [0.0, 0.0, 2.0, 2.0, 0.5, 0.5, 9.0, 9.0],
        200_000,
        0.0,
    )
    assert [chunk.group for chunk in plan.chunks] == [(0, 1), (0, 1, 2, 3)]


@pytest.mark.parametrize("aligned", [False, True], ids=["any", "aligned"])
def test_a_group_grows_as_long_as_moves_of_history_take_less_than_it_saves(aligned):
    """Two of four instances are free in two seconds: a chunk before then saves some of that, unless
    what it computes takes longer to move."""
    queues = [0.0, 0.0, 2.0, 2.0]

    def plan(seconds: float) -> CdspPlan:
        growth = lambda before, after, history, tokens: seconds
        sizes = {2: FITTED[2], 4: FITTED[4]}
        instances = Instances(sizes, 4, aligned=aligned, growth=growth)
        return cdsp(instances, queues, 200_000, 0.0)

    free = plan(0.0)
    whole = single(Instances({4: FITTED[4]}, 4, growth=free_growth), queues, 200_000, 0.0)
    saved = whole.ttft - free.ttft
    assert [chunk.group for chunk in free.chunks] == [(0, 1), (0, 1, 2, 3)] and saved > 0
    slower = plan(0.9 * saved)
    assert [chunk.group for chunk in slower.chunks] == [(0, 1), (0, 1, 2, 3)]
    assert slower.ttft == pytest.approx(free.ttft + 0.9 * saved)
    assert [chunk.exposed for chunk in slower.chunks] == [0, pytest.approx(0.9 * saved)]
    assert plan(1.1 * saved).chunks == whole.chunks


def test_a_larger_group_must_save_more_than_the_rate():
    """32k tokens, idle: 3.2, 1.7, 0.9, 0.6 and 0.5 seconds on 1, 2, 4, 8 and 16 instances."""
    sizes = {
        rate: len(single(REAL, np.zeros(16), 32 * K, rate).chunks[0].group)
        for rate in (0.0, 0.2, 0.4)
    }
    assert sizes == {0.0: 16, 0.2: 8, 0.4: 4}


def test_a_fixed_group_is_the_one_that_is_free_first():
    plan = fixed(REAL, [0.5] * 8 + [0.1] * 7 + [0.2], 16 * K, 0.0, size=8)
    assert plan.chunks[0].group == tuple(range(8, 16)) and plan.chunks[0].start == 0.2


# --- errors

made = functools.partial(Instances, growth=free_growth)


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: made({3: FITTED[2]}, 8), "latencies: group sizes must be powers of two"),
        (lambda: made({}, 8), "latencies"),
        (lambda: made(FITTED, 0), "per_node: must be at least 1"),
        (lambda: made(FITTED, 8, 0), "block: must be at least 1"),
        (lambda: cdsp(REAL, [0.0] * 12, 10, 0.1), "queues: .* nodes of 8"),
        (lambda: cdsp(REAL, [], 10, 0.1), "queues"),
        (lambda: cdsp(REAL, [0.0] * 7 + [-1.0], 10, 0.1), "queues: .* not below 0"),
        (lambda: cdsp(REAL, [math.nan] * 8, 10, 0.1), "queues"),
        (
            lambda: cdsp(made({16: FITTED[16]}, 8), [0.0] * 8, 10, 0.1),
            "queues: 8 instances are fewer",
        ),
        (lambda: cdsp(REAL, [0.0] * 8, 0, 0.1), "tokens: must be at least 1, not 0"),
        (lambda: single(REAL, [0.0] * 8, 1, 1.0), "rate"),
        (lambda: fixed(REAL, [0.0] * 8, 1, 0.0, size=16), "size: 16"),
        (lambda: fit([(1, 0, 10, 0.0)]), "points"),
        (lambda: fit([(1, 0, 10, 1.0), (1, 0, 20, 2.0)]), "points: group size 1 has fewer"),
    ],
)
def test_what_is_wrong_is_named(make, said):
    with pytest.raises(ConfigError, match=said):
        make()
