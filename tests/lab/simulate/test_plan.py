"""The search for a mesh: what is possible, what is best, and how much it bears. Where it can, a
formula answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.checkpoint.zoo import MODELS
from jaxserve.lab.simulate.plan import (
    CAPACITY_RUNS,
    CHUNKS,
    MIN_COARSE_REQUESTS,
    MeshPlan,
    PlanAnswer,
    PlanQuestion,
    PlanRunner,
    capacity,
    meshes,
    met,
    plans,
    search,
    simulations,
)
from jaxserve.lab.simulate.recorder import RequestRecord
from jaxserve.lab.simulate.run import Outcome, System
from jaxserve.lab.simulate.workload import parse
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig

SMALL = MODELS["llama3-8b"]
LARGE = MODELS["llama3-70b"]
SCHEDULER = SchedulerConfig(
    policy="slack", chunking="adaptive", max_seqs=128, max_queue=10**6, step_time=0.1
)
SPEC = "poisson:prompt=uniform:500:4000,output=uniform:5:40"


def question(
    shape=SMALL,
    device: str = "a100",
    qps: float | None = 2.0,
    requests: int = 40,
    spec: str = SPEC,
    **scheduler,
) -> PlanQuestion:
    return PlanQuestion(
        shape,
        device,
        dataclasses.replace(SCHEDULER, **scheduler),
        CacheConfig(block_size=256),
        lambda rate, count: parse(spec, qps=rate, requests=count),
        qps,
        requests,
    )


# --- what is possible


def test_every_way_to_use_eight_devices():
    fit, out = meshes(8, question())
    assert [(mesh.tp, mesh.spp, mesh.kvp) for mesh in fit] == [
        (1, 1, 8),
        (1, 2, 4),
        (1, 4, 2),
        (1, 8, 1),
        (2, 1, 4),
        (2, 2, 2),
        (2, 4, 1),
        (4, 1, 2),
        (4, 2, 1),
        (8, 1, 1),
    ]
    assert not out


@settings(deadline=None)
@given(st.integers(1, 64))
def test_every_mesh_uses_all_devices_and_is_named_once(count):
    fit, out = meshes(count, question())
    every = [*fit, *(mesh for mesh, _ in out)]
    assert {mesh.devices for mesh in every} == {count} and len(set(every)) == len(every)
    assert len(every) == sum(
        count % (tp * spp) == 0 for tp in range(1, count + 1) for spp in range(1, count + 1)
    )


@pytest.mark.parametrize(
    ("count", "mesh", "shape", "device", "reason"),
    [
        (16, MeshConfig(tp=16), SMALL, "a100", "more ranks than the 8 devices of a node"),
        (6, MeshConfig(tp=6), SMALL, "a100", "sums over 6 ranks were not measured on a100"),
        (
            8,
            MeshConfig(tp=8),
            dataclasses.replace(SMALL, heads=4),
            "a100",
            "8 ranks do not split 4 heads",
        ),
        (33, MeshConfig(spp=33), SMALL, "a100", "more stages than 32 layers"),
        (
            4,
            MeshConfig(kvp=4),
            LARGE,
            "h100",
            "131 GiB of weights per device leave no room for KV on h100 with spp=1,kvp=4,tp=1",
        ),
        (4, MeshConfig(kvp=2, tp=2), LARGE, "a100", None),
        (4, MeshConfig(spp=2, tp=2), LARGE, "a100", None),
    ],
)
def test_what_is_impossible_is_left_out_with_its_reason(count, mesh, shape, device, reason):
    fit, out = meshes(count, question(shape, device))
    assert dict(out).get(mesh) == reason and (mesh in fit) == (reason is None)


def test_blocks_must_fit_beside_the_weights(monkeypatch):
    tokens = {1: 511, 2: 512}  # by tp
    monkeypatch.setattr(System, "kv_tokens", lambda self, slots=0: tokens[self.mesh.tp])
    fit, out = meshes(2, question())
    assert fit == [MeshConfig(tp=2)] and {why for _, why in out} == {
        "KV of 511 tokens fits, which is less than two blocks"
    }


def test_each_mesh_is_tried_with_every_kind_of_chunks():
    found = plans([MeshConfig(tp=8), MeshConfig(spp=8)])
    assert len(found) == 2 * len(CHUNKS) and len(set(found)) == len(found)
    assert str(found[0]) == "spp=1,kvp=1,tp=8 adaptive:8192"


# --- capacity


@settings(deadline=None)
@given(limit=st.floats(0.01, 100), start=st.floats(0.01, 100))
def test_the_capacity_is_found_from_either_side(limit, start):
    """Each question halves what is left on a logarithmic scale, once there is a rate on either
    side."""
    asked: list[float] = []
    found = capacity(lambda rate: asked.append(rate) or float(rate <= limit), start, 0.9, runs=40)
    assert found <= limit and found == pytest.approx(limit, rel=1e-3) and len(asked) == 40


@pytest.mark.parametrize(
    ("shares", "expected"),
    [({1: 1, 2: 0.95, 4: 0.9, 8: 0.5}, 4), ({1: 0.1, 0.5: 0.95}, 0.5), ({1: 1, 2: 0.89}, 1)],
)
def test_the_share_that_is_asked_for_is_enough(shares, expected):
    assert capacity(lambda rate: shares.get(rate, 0), 1, 0.9, runs=6) == expected


def test_a_plan_that_bears_nothing_has_no_capacity():
    assert capacity(lambda rate: 0.0, 1.0, 0.9) == 0


# --- what is best


def record(
    first: float, end: float, output: int = 11, reason: str = "length", tpot: float = 0.1
) -> RequestRecord:
    """It came at 0 and was due at 2."""
    return RequestRecord("0", "a", 100, output, 0, 0.0, 2.0, first, end, reason, tpot)


def test_a_request_meets_both_objectives_or_it_does_not_count():
    records = [
        record(1.0, 2.0),
        record(1.0, 2.11),
        record(2.1, 2.2),
        record(1.0, 1.0, 0, "refused"),
        record(1.0, 1.5, 3, "unfinished"),
    ]
    assert met(records) == 1 / 5 and met([]) == 0
    records[1] = record(1.0, 2.11, tpot=0.112)
    assert met(records) == 2 / 5


class Formula(PlanRunner):
    """Each plan meets a share of the objectives and has a TTFT p90 that depend on its mesh, and
    bears a rate; notes what is asked."""

    def __init__(
        self,
        told: Callable[[MeshPlan, bool], tuple[float, float]],
        bears: dict[int, float],
        requests: int = 400,
    ):
        super().__init__(question(requests=requests), plans([MeshConfig(tp=8)]))
        self.told = told
        self.bears = bears
        self.asked = []

    def answer(self, plan: MeshPlan, requests: int | None = None) -> PlanAnswer:
        self.asked.append((plan.mesh.tp, requests))
        share, p90 = self.told(plan, requests is None)
        return PlanAnswer(
            plan, requests or 400, share, {"ttft": {"p90": p90} if p90 else {}}, 1, 1.0, 1.0
        )

    def met_at(self, plan: MeshPlan, qps: float) -> float:
        return float(qps <= self.bears[plan.mesh.tp])


FOUR = [MeshPlan(MeshConfig(tp=tp), "adaptive", 8192) for tp in (1, 2, 4, 8)]


def test_the_best_on_a_part_are_tried_on_all_and_only_these_get_a_capacity():
    """On a part 8 and 4 look best, on all of it 4 is better."""
    coarse = {1: (0.5, 1), 2: (0.8, 9), 4: (0.8, 3), 8: (1.0, 9)}
    full = {4: (0.9, 2), 8: (0.7, 9)}
    trial = Formula(lambda plan, all_: (full if all_ else coarse)[plan.mesh.tp], {4: 3.0, 8: 11.0})
    steps = []
    found = search(trial, FOUR, 2, steps.append)
    assert [answer.plan.mesh.tp for answer in found] == [4, 8, 2, 1]
    assert [answer.requests for answer in found] == [400, 400, 80, 80]
    assert trial.asked == [(1, 80), (2, 80), (4, 80), (8, 80), (8, None), (4, None)]
    assert found[0].capacity == pytest.approx(3.0, rel=0.1) and found[1].capacity == pytest.approx(
        11.0, rel=0.2
    )
    assert [answer.capacity for answer in found[2:]] == [None, None]
    assert len(steps) == simulations(len(FOUR), 2) == 4 + 2 * (1 + CAPACITY_RUNS)


def test_of_plans_that_meet_as_much_the_sooner_first_token_wins_and_none_at_all_comes_last():
    told = {1: (0.0, None), 2: (0.5, 3.0), 4: (0.5, 2.0), 8: (0.0, 100.0)}
    found = search(Formula(lambda plan, all_: told[plan.mesh.tp], {}), FOUR, 0)
    assert [answer.plan.mesh.tp for answer in found] == [4, 2, 8, 1]


def test_a_part_has_so_many_requests_at_least():
    trial = Formula(lambda plan, all_: (1.0, 1.0), {}, requests=50)
    search(trial, FOUR[:1], 0)
    assert trial.asked == [(1, MIN_COARSE_REQUESTS)]


# --- simulated


def test_all_plans_are_measured_by_the_objectives_of_the_one_that_prefills_soonest():
    slow = MeshPlan(MeshConfig(), "adaptive", 8192)
    fast = MeshPlan(MeshConfig(tp=8), "adaptive", 8192)
    both, alone = (
        PlanRunner(question(ttft=0.001, ttft_stretch=2.0), some) for some in ([slow, fast], [slow])
    )
    assert (
        both.objective(4000)
        == PlanRunner(both.question, [fast]).objective(4000)
        < alone.objective(4000) / 2
    )
    assert (
        both.objective(10) < both.objective(4000)
        and PlanRunner(question(ttft=30.0), [slow]).objective(4000) == 30.0
    )


def test_an_answer_is_what_a_simulation_gives():
    trial = PlanRunner(question(), FOUR)
    slow, fast = (trial.answer(plan) for plan in (FOUR[0], FOUR[3]))
    assert slow.requests == fast.requests == 40 and trial.answer(FOUR[0], 7).requests == 7
    assert fast.alone < slow.alone and fast.figures["ttft"]["p50"] < slow.figures["ttft"]["p50"]
    assert 4 * fast.kv_tokens > slow.kv_tokens and fast.weights == SMALL.weight_bytes(tp=8)
    assert fast.weights == pytest.approx(slow.weights / 8, rel=1e-3)
    lanes = trial.answer(MeshPlan(MeshConfig(kvp=4), "adaptive", 8192))
    assert lanes.weights == slow.weights
    # each lane leaves collectives a share of its memory, which one device alone does not
    assert 0.95 * 4 * slow.kv_tokens < lanes.kv_tokens < 4 * slow.kv_tokens


def test_a_prompt_that_does_not_fit_has_no_time_alone_and_meets_nothing():
    trial = PlanRunner(
        question(spec="poisson:prompt=900000,output=1", requests=2),
        [MeshPlan(MeshConfig(), "adaptive", 8192)],
    )
    found = trial.answer(MeshPlan(MeshConfig(), "adaptive", 8192))
    assert found.alone is None and found.met == 0


def test_more_per_second_meets_less():
    plan = MeshPlan(MeshConfig(tp=8), "adaptive", 8192)
    trial = PlanRunner(question(), [plan])
    assert trial.met_at(plan, 0.5) == 1 and trial.met_at(plan, 90.0) < 0.5


def test_at_a_rate_the_kind_that_fares_worst_counts(monkeypatch):
    """18 short ones in time, and one of two long ones."""
    late = record(3.0, 3.5)
    short = record(1.0, 1.5)
    long = dataclasses.replace(record(1.0, 1.5), kind="long")
    records = [short] * 18 + [long, dataclasses.replace(late, kind="long")]
    trial = PlanRunner(question(), FOUR[:1])
    plan = FOUR[0]
    monkeypatch.setattr(PlanRunner, "run", lambda *_: Outcome(records, np.empty(0), [], 0.0))
    assert trial.met_at(plan, 1.0) == 0.5 and trial.answer(plan).met == 0.95


def test_at_a_higher_rate_there_are_more_requests_so_that_they_come_for_as_long(monkeypatch):
    asked = []
    trial = PlanRunner(question(qps=2.0, requests=100), FOUR[:1])
    none = Outcome([record(1.0, 2.0)], np.empty(0), [], 0.0)
    monkeypatch.setattr(
        PlanRunner, "run", lambda self, plan, arrivals: asked.append(len(arrivals)) or none
    )
    for qps in (0.1, 1.0, 2.0, 3.0, 100.0):
        trial.met_at(FOUR[0], qps)
    assert asked == [MIN_COARSE_REQUESTS, 50, 100, 150, 400]


def test_a_search_finds_the_same_again_and_a_better_plan_than_the_worst():
    some = [MeshPlan(MeshConfig(tp=4), *chunk) for chunk in CHUNKS] + [
        MeshPlan(MeshConfig(kvp=4), *CHUNKS[0])
    ]
    asked = question(qps=6.0, tpot=0.03)
    found, again = (search(PlanRunner(asked, some), some, 1) for _ in range(2))
    assert found == again and {answer.plan for answer in found} == set(some)
    assert found[0].met >= found[-1].met and found[0].capacity > 0


def test_the_rate_is_the_workloads_own_where_none_is_given(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(
        "".join(
            f'{{"timestamp": {500 * n}, "input_length": 100, "output_length": 3}}\n'
            for n in range(9)
        )
    )
    trial = PlanRunner(question(spec=str(path), qps=None, requests=9), FOUR[:1])
    assert trial.rate == pytest.approx(9 / 4) and trial.met_at(FOUR[0], 4.0) == 1
