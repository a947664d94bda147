"""LoongServe as a baseline: its dynamic program against all partitions, and what its scheduling can
and cannot do."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.checkpoint.zoo import MODELS
from jaxserve.costs.coefficients import Costs
from jaxserve.costs.profiles import costs
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.baselines import BASELINES, compare, pool
from jaxserve.lab.simulate.loongserve import (
    LONGEST,
    PUBLISHED,
    Elasticity,
    LoongPool,
    LoongServe,
    group_prompts,
)
from jaxserve.lab.simulate.recorder import RequestRecord
from jaxserve.lab.simulate.run import System, execute
from jaxserve.lab.simulate.workload import parse
from jaxserve.lanes.rates import Link
from jaxserve.settings.schema import CacheConfig, ConfigError, MeshConfig, SchedulerConfig
from tests.examples import examples

FREE = Link(0.0, 1e30)  # nothing to send
REAL = LoongPool(4, costs("a100", MODELS["llama3-8b"], 2), 500_000, 2048.0, Link(1e-5, 1e11))
SYSTEM = System(MODELS["llama3-8b"], "a100", MeshConfig(spp=2, tp=4))


def simple(
    count: int,
    capacity: int = 10**6,
    reserved: int = 0,
    short: int = 100,
    costs: Costs | None = None,
) -> LoongPool:
    """Instances of one layer that take 10 ms per token, prefill and decode alike, and nothing
    else."""
    return LoongPool(
        count, costs or Costs(layers=1, linear_token=0.01), capacity, 0.0, FREE, reserved, short
    )


class Watched(LoongServe):
    """Notes after every event how many instances prefill and how many hold what decodes, and checks
    what is held against the memory."""

    used: list[tuple[int, int]]

    def _decode(self, now: float) -> None:
        super()._decode(now)
        self.used = [*getattr(self, "used", []), (sum(self.in_use.values()), self._decoders())]
        assert self._held() <= self.pool.count * self.pool.capacity
        assert len(self._running) + len(self._joining) <= self.max_seqs


def play(pool: LoongPool, *arrivals: tuple[float, int, int], **more) -> list[RequestRecord]:
    """Records by number, of (time, prompt, output)."""
    server = LoongServe(pool, lambda prompt: 1.0, **more)
    server.run([Arrival(*arrival) for arrival in arrivals])
    return sorted(server.recorder.records, key=lambda record: int(record.id))


def times(records: Sequence[RequestRecord]) -> list[tuple[float, float]]:
    return [(round(record.first, 6), round(record.end, 6)) for record in records]


# --- the dynamic program


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """All ways to put items into groups."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for place in range(len(rest)):
            yield [*rest[:place], [items[0], *rest[place]], *rest[place + 1 :]]


def neighbours(prompts: Sequence[int], groups: Sequence[Sequence[int]]) -> bool:
    """Returns true if no prompt's length lies within another group's."""
    spans = sorted(
        (min(prompts[i] for i in group), max(prompts[i] for i in group)) for group in groups
    )
    return all(low[1] <= high[0] for low, high in zip(spans, spans[1:]))


def divisions(instances: int, groups: int) -> Iterator[tuple[int, ...]]:
    """All ways to give each group at least one instance."""
    if not groups:
        yield ()
        return
    for first in range(1, instances - groups + 2):
        for rest in divisions(instances - first, groups - 1):
            yield (first, *rest)


def latency(
    pool: LoongPool, prompts: Sequence[int], groups: Sequence[Sequence[int]], degrees: Sequence[int]
) -> float:
    """The sum over all prompts: those of a group end together."""
    return sum(
        len(group) * pool.prefill([prompts[index] for index in group], degree)
        for group, degree in zip(groups, degrees)
    )


@settings(max_examples=examples(40), deadline=None)
@given(
    prompts=st.lists(
        st.sampled_from([10, 200, 3000, 40_000, 300_000]) | st.integers(1, 10**6),
        min_size=1,
        max_size=5,
    ),
    instances=st.integers(1, 4),
    pool=st.sampled_from([REAL, simple(4), dataclasses.replace(REAL, link=Link(1e-3, 1e9))]),
)
def test_the_plan_is_the_best_of_all_partitions(prompts, instances, pool):
    """The best of all partitions into groups of neighbours by length, as LoongServe's program is
    defined; of others few are better, and those by little."""
    found = group_prompts(prompts, instances, pool)
    groups = [group for group, _ in found]
    degrees = [degree for _, degree in found]
    assert sorted(index for group in groups for index in group) == list(range(len(prompts)))
    assert sum(degrees) <= instances and min(degrees) >= 1
    sums = {
        ordered: min(
            latency(pool, prompts, some, many)
            for some in partitions(range(len(prompts)))
            if len(some) <= instances and (not ordered or neighbours(prompts, some))
            for many in divisions(instances, len(some))
        )
        for ordered in (True, False)
    }
    assert latency(pool, prompts, groups, degrees) == pytest.approx(sums[True], rel=1e-9)
    assert sums[True] <= 1.1 * sums[False]


def test_a_prompt_alone_gets_all_instances_and_two_equal_ones_half_of_them():
    assert group_prompts([4000], 4, simple(4)) == [([0], 4)]
    quadratic = simple(4, costs=Costs(layers=1, pair=1e-6, chunk=0.5))
    assert sorted(group_prompts([4000, 4000], 4, quadratic)) == [([0], 2), ([1], 2)]


def test_prefill_by_hand():
    """Linear parts and attention are split over 4 instances; hops of KV are paid where attention
    does not hide them."""
    pool = LoongPool(
        4,
        Costs(layers=2, launch=1, linear_token=1, pair=0.01, chunk=3, head=5, head_token=0.5),
        10**6,
        10.0,
        Link(2.0, 100.0),
    )
    assert pool.prefill([80, 20], 1) == pytest.approx(
        1 + 2 * (100 + 2 * 3 + 0.01 * (80 * 80 + 20 * 20) / 2) + 5 + 1
    )
    ring = 3 * (2 + 10 * 100 / 4 / 100)  # 13.5 s against 14.5 s of attention
    assert ring < 6 + 8.5 and pool.prefill([80, 20], 4) == pytest.approx(
        1 + 2 * (25 + 6 + 8.5) + 5 + 1
    )
    slow = dataclasses.replace(pool, link=Link(10.0, 100.0))
    assert slow.prefill([80, 20], 4) == pytest.approx(1 + 2 * (25 + 3 * 12.5) + 5 + 1)


# --- by hand


def test_a_request_alone_is_prefilled_by_all_and_decoded_by_few():
    """400 tokens on 4 instances: 1 s; then two steps of a token each."""
    assert times(play(simple(4), (2.0, 400, 3))) == [(3.0, 3.02)]


def test_a_long_prompt_blocks_those_that_come_after_it_and_ours_does_not():
    """A million tokens on all instances, then a short prompt: nothing is interrupted."""
    arrivals = [Arrival(0.0, 10**6, 5), *(Arrival(1.0 + n, 1000, 5) for n in range(5))]
    config = SchedulerConfig(policy="slack", chunking="adaptive", chunk_tokens=8192, step_time=0.1)
    theirs = compare("loongserve", SYSTEM, config, CacheConfig(block_size=256), arrivals)
    ours = execute(SYSTEM.replica(config, CacheConfig(block_size=256)), arrivals)
    first = {
        "theirs": [r.ttft for r in theirs.records if r.prompt == 1000],
        "ours": [r.ttft for r in ours.records if r.prompt == 1000],
    }
    long = max(record.ttft for record in theirs.records)
    assert long > 60 and min(first["theirs"]) > long - 10
    assert max(first["ours"]) < 2.0


def test_reserved_instances_keep_short_prompts_going():
    """Four instances; 1000 tokens take 2.5 s on four and 3.33 s on the three that are left."""
    wishes = (0.0, 1000, 1), (0.1, 50, 1), (0.2, 100, 1)
    assert times(play(simple(4), *wishes))[1][0] > 2.5
    long, short, limit = play(simple(4, reserved=1), *wishes)
    assert (long.first, short.first) == (pytest.approx(3.34), pytest.approx(0.6))
    assert limit.first > 3.34, "not below `short`: not for the reserved one"


def test_memory_is_given_first_come_first_served():
    """300 tokens of KV: the second does not fit beside the first, and the third, which would, does
    not overtake it."""
    first, second, third = play(simple(3, 100), (0.0, 100, 40), (0.1, 150, 20), (0.2, 10, 2))
    assert second.first > first.end and third.first > first.end
    assert play(simple(3, 100), (0.0, 100, 40), (0.2, 10, 2))[1].first < first.end


def test_what_does_not_fit_into_all_memory_is_refused():
    records = play(simple(2, 100), (0.0, 150, 50), (0.0, 150, 51), (0.1, 10, 2))
    assert [(record.reason, record.output) for record in records] == [
        ("length", 50),
        ("refused", 0),
        ("length", 2),
    ]
    assert play(simple(2, 100, reserved=1), (0.0, 101, 1))[0].reason == "refused"


def test_no_more_than_max_seqs_decode_at_once():
    server = Watched(simple(4), lambda prompt: 1.0, max_seqs=1)
    server.run([Arrival(0.0, 10, 5) for _ in range(4)])
    assert len(server.recorder.records) == 4


# --- whatever arrives

ARRIVALS = st.lists(
    st.tuples(st.floats(0, 5), st.sampled_from([1, 40, 99, 300, 1500]), st.integers(1, 30)),
    min_size=1,
    max_size=25,
)


def run(
    arrivals: list[tuple[float, int, int]], pool: LoongPool, until: float = float("inf")
) -> Watched:
    server = Watched(pool, lambda prompt: 1.0)
    server.run([Arrival(*arrival) for arrival in sorted(arrivals)], until)
    return server


@settings(max_examples=examples(40), deadline=None)
@given(
    ARRIVALS,
    st.integers(1, 4),
    st.sampled_from([500, 2000]),
    st.booleans(),
    st.none() | st.floats(0, 20),
)
def test_every_arrival_ends_once(arrivals, count, capacity, reserved, until):
    """Given up or not: who came before the end of the run has one record, with all its tokens where
    it ended by itself."""
    pool = simple(count, capacity, int(reserved and count > 1))
    arrivals = sorted(arrivals)
    server = run(arrivals, pool, float("inf") if until is None else until)
    server.give_up(1000.0)
    records = sorted(server.recorder.records, key=lambda record: int(record.id))
    assert [int(record.id) for record in records] == [
        n for n, (at, *_) in enumerate(arrivals) if until is None or at <= until
    ]
    for record, (at, prompt, output) in zip(records, arrivals):
        assert (record.arrival, record.prompt) == (at, prompt) and record.reason in (
            "length",
            "refused",
            "unfinished",
        )
        assert record.reason != "length" or (
            record.output == output and at < record.first <= record.end
        )


def test_nothing_is_left_behind():
    """Requests that were not refused end by themselves if outputs have more than one token."""
    dice = np.random.default_rng(0)
    for count in (1, 2, 4):
        arrivals = [
            (float(at), int(prompt), int(output))
            for at, prompt, output in zip(
                np.cumsum(dice.exponential(0.5, 60)),
                dice.choice([1, 40, 300, 900], 60),
                dice.integers(2, 30, 60),
            )
        ]
        server = run(arrivals, simple(count, 1000))
        assert len(server.recorder.records) == 60 and {
            record.reason for record in server.recorder.records
        } <= {
            "length",
            "refused",
        }


def test_a_request_of_one_token_leaves_room_for_the_next():
    assert [record.reason for record in play(simple(1), (0.0, 100, 1), (0.1, 100, 1))] == [
        "length"
    ] * 2


@settings(max_examples=examples(40), deadline=None)
@given(ARRIVALS, st.integers(2, 4))
def test_prefills_never_have_more_instances_than_there_are(arrivals, count):
    server = run(arrivals, simple(count, 5000))
    assert max(prefilling for prefilling, _ in server.used) <= count
    assert server.in_use == {True: 0, False: 0}


# --- on a system's devices


def test_a_pool_is_made_of_the_systems_devices():
    made = pool(SYSTEM, tp=2, reserved=0.25)
    assert (made.count, made.reserved, made.kv_bytes) == (4, 1, 2 * 2 * 4 * 128)
    assert made.capacity == dataclasses.replace(SYSTEM, mesh=MeshConfig(tp=2)).kv_tokens()
    assert made.costs == costs("a100", SYSTEM.shape, 2)
    with pytest.raises(ConfigError, match="mesh: 3 devices do not make instances of 2"):
        pool(dataclasses.replace(SYSTEM, mesh=MeshConfig(spp=3)), tp=2, reserved=0.0)


@pytest.mark.parametrize("name", BASELINES)
def test_every_baseline_serves_the_same_arrivals(name):
    arrivals = parse("poisson:mix=medha-5", qps=0.5, requests=12, seed=1)
    config = SchedulerConfig(max_seqs=64, max_queue=1000)
    cache = CacheConfig(block_size=256)
    outcome = compare(name, SYSTEM, config, cache, arrivals)
    assert sorted((int(r.id), r.prompt, r.output) for r in outcome.records) == [
        (n, a.prompt, a.output) for n, a in enumerate(arrivals)
    ]
    assert outcome.records == compare(name, SYSTEM, config, cache, arrivals).records


def test_an_unknown_baseline_is_named():
    with pytest.raises(ConfigError, match="baseline: 'vllm' is not one of sarathi-512"):
        compare("vllm", SYSTEM, SchedulerConfig(), CacheConfig(), [Arrival(0.0, 1, 1)])


def test_instances_that_decodes_borrow_from_a_prefill_are_busy_once():
    """Both prefill 3990 tokens for 19.95 s; then one has a prefill of 10 s while 1000 decodes of 10
    ms soon take the KV of both."""
    server = LoongServe(simple(2, capacity=4000), lambda prompt: 1.0)
    server.run([Arrival(0.0, 3990, 1001), Arrival(20.0, 1000, 1)])
    assert max(record.end for record in server.recorder.records) == pytest.approx(30, rel=0.01)
    assert server.recorder.busy == pytest.approx(30, rel=0.01)


# --- what elasticity takes


def elastic(made: LoongPool, **costs) -> LoongPool:
    return dataclasses.replace(made, elasticity=Elasticity(**costs))


def test_steps_on_several_instances_take_what_elasticity_costs():
    """400 tokens take 1 s on 4 instances and 4 s on one; a decode step of 2 takes 10 ms on two."""
    made = elastic(simple(4), step=0.5, hop=0.25, scale_down=0.1, scale_up=0.2)
    assert made.prefill([400], 4) == pytest.approx(1.1 + 3 * 0.25 + 0.5)
    assert made.prefill([400], 1) == pytest.approx(4.5)
    assert made.decode(2, 10, 2) == pytest.approx(0.012 + 0.5)
    assert made.decode(1, 10, 1) == pytest.approx(0.01 + 0.5)


def test_groups_are_smaller_where_each_instance_costs_time():
    """20 tokens: 50 ms on four instances if they are free, and 200 ms on one."""
    assert group_prompts([20], 4, simple(4)) == [([0], 4)]
    assert group_prompts([20], 4, elastic(simple(4), hop=1.0)) == [([0], 1)]


def test_a_prefill_has_no_more_instances_than_it_may():
    limited = dataclasses.replace(simple(4), most=2)
    assert group_prompts([4000], 4, limited) == [([0], 2)]
    assert sorted(degree for _, degree in group_prompts([4000, 4000], 4, limited)) == [2, 2]


def test_a_ring_that_leaves_a_node_takes_the_link_between_nodes():
    between = dataclasses.replace(REAL, node=2, between=Link(1.0, 1e9))
    assert between.prefill([4000], 2) == REAL.prefill([4000], 2)
    assert between.prefill([4000], 4) > REAL.prefill([4000], 4) + 30, "a second in each layer"


def test_kv_moves_over_both_links_to_an_instance_anywhere():
    """2 bytes a token and layer: 400 bytes for 100 tokens; one other instance is in the node, at
    100 bytes a second, and two are not, at 10."""
    made = dataclasses.replace(
        simple(4), kv_bytes=2.0, costs=Costs(layers=2), link=Link(0.0, 100.0)
    )
    made = dataclasses.replace(made, node=2, between=Link(0.0, 10.0))
    assert elastic(made, moves=1.0).move(100) == pytest.approx((4 + 2 * 40) / 3)
    assert made.move(100) == 0.0


def test_decodes_wait_for_an_instance_where_they_cannot_borrow_one():
    """A request decodes on two instances, and soon needs a third for its KV, while the other two
    prefill for 4 s."""
    longest = []
    for own in (False, True):
        server = LoongServe(elastic(simple(4, capacity=2000), own=own), lambda prompt: 1.0)
        server.run([Arrival(0.0, 3990, 60), Arrival(9.98, 800, 1)])
        assert len(server.recorder.records) == 2
        longest.append(max(float(gaps.max(initial=0.0)) for gaps in server.recorder.gaps))
    assert longest == [pytest.approx(0.01), pytest.approx(3.9, abs=0.1)]


def test_prefills_that_begin_together_are_waited_for():
    """A long prompt takes all four instances for 25 s; the short ones behind it begin at its end,
    all at once. One that comes while they run begins only if it ends before them."""
    made = elastic(simple(4), together=LONGEST)
    long, *short = play(made, (0.0, 10_000, 1), (1.0, 400, 1), (2.0, 400, 1))
    assert long.first == pytest.approx(25.0)
    assert [record.first for record in short] == [pytest.approx(27.0)] * 2


def test_prefills_wait_for_decode_steps():
    """The first begins at once; the second, which comes at the first token, after five steps of 10
    ms."""
    made = elastic(simple(4), together=LONGEST, wait=5)
    first, second = play(made, (0.0, 400, 50), (1.0, 40, 1))
    assert first.first == pytest.approx(1.0)
    assert second.first == pytest.approx(1.05 + 40 * 0.01 / 3, abs=0.011)


def test_a_long_prompt_is_passed_a_few_times_and_then_goes_alone():
    """Short prompts that come all the time do not keep a long one waiting for ever."""
    made = elastic(simple(1), together=LONGEST)
    wishes = [(0.0, 100, 1), (0.5, 100, 1), (0.6, 1000, 1)]
    wishes += [(0.7 + 0.9 * n, 100, 1) for n in range(40)]
    records = play(made, *wishes)
    assert records[2].reason == "length"
    assert records[2].first < max(record.first for record in records[3:])


@settings(max_examples=examples(40), deadline=None)
@given(ARRIVALS, st.integers(1, 4), st.sampled_from([1500, 4000]), st.booleans())
def test_every_arrival_ends_with_what_elasticity_takes(arrivals, count, capacity, reserved):
    """None waits for ever for an instance, for others to end, or for its KV to move."""
    made = simple(count, capacity, int(reserved and count > 2))
    made = dataclasses.replace(made, elasticity=PUBLISHED, node=2, between=Link(1e-3, 1e6))
    server = run(arrivals, made)
    assert sorted(int(record.id) for record in server.recorder.records) == list(
        range(len(arrivals))
    )
    assert {record.reason for record in server.recorder.records} <= {"length", "refused"}
    assert server.in_use == {True: 0, False: 0}
