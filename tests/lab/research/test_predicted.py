"""Frames of what is predicted: exchanges, plans of lanes, deployments."""

from __future__ import annotations

import pytest

from jaxserve.lab.research import predicted
from jaxserve.lab.simulate import workload
from jaxserve.lab.simulate.plan import PlanQuestion
from jaxserve.lab.simulate.run import System, shape_of
from jaxserve.lanes.exchange import EXCHANGES
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig

SHAPE = shape_of("llama3-8b")


def test_the_fastest_exchange_is_chosen_and_kv_goes_round_where_all_is_new():
    chooser = predicted.exchange_chooser(System(SHAPE, "h100", MeshConfig(kvp=4, tp=8)))
    found = predicted.exchanges(chooser, [2000, 200_000], [0.01, 1.0])
    seconds = found[list(EXCHANGES)]
    assert list(found["strategy"]) == list(seconds.idxmin(axis=1))
    assert set(found[found["new"] == 1.0]["strategy"]) == {"pass_kv"}
    assert found[found["new"] < 1.0]["strategy"].iloc[0] == "gather"


@pytest.fixture(scope="module")
def lanes():
    return predicted.lanes(System(SHAPE, "h100", MeshConfig(kvp=4)), 500_000, block=64)


def test_a_plan_begins_on_each_lane_when_its_queue_has_ended(lanes):
    queues = [0.0, 1.0, 2.0, 3.0]
    plan = predicted.planned(lanes, queues, 300_000, rate=0.1)
    chunks = plan[plan["kind"] == "prefill"]
    assert chunks["tokens"].sum() == 300_000 and chunks["first"].iloc[0] == 0
    assert len(chunks) > 1 and chunks["degree"].is_monotonic_increasing
    for chunk in chunks.itertuples():
        assert all(queues[lane] <= chunk.begin + 1e-9 for lane in chunk.lanes)
    waits = plan[plan["kind"] == predicted.QUEUED]
    assert list(waits["end"]) == queues[1:]


def test_longer_prompts_get_more_lanes_and_busy_lanes_fewer(lanes):
    found = predicted.degrees(lanes, 4, [1000, 400_000], [0.0, 1.0], rate=0.1, draws=5)
    degree = found.set_index(["prompt", "load"])["degree"]
    assert degree[400_000, 0.0] == 4 > degree[1000, 1.0]
    assert (found["ttft"] <= found["ttft_single"] * (1 + 1e-9)).all()


def test_a_stream_has_a_row_per_rate_and_per_fixed_size(lanes):
    arrivals = workload.parse("poisson:prompt=20000,output=1", qps=1, requests=10)
    found = predicted.streams(lanes, 4, arrivals, [0.1, 0.5])
    assert list(found["policy"]) == ["cdsp", "cdsp", "fixed-1", "fixed-2", "fixed-4"]
    assert (found["ttft"] > 0).all()


def test_a_deployment_has_as_many_replicas_as_bear_the_rate():
    spec = "poisson:prompt=4000,output=8"
    question = PlanQuestion(
        SHAPE,
        "h100",
        SchedulerConfig(policy="slack", ttft=1.0, tpot=0.05),
        CacheConfig(block_size=64),
        lambda qps, requests: workload.parse(spec, qps=qps, requests=requests),
        qps=40.0,
        requests=10,
    )
    found = predicted.deployments(question, [1, 2], best=1, chunks=[("adaptive", 8192)])
    assert list(found["gpus"]) == [1, 2, 2, 2]
    known = found.dropna(subset="capacity")
    assert list(known["gpus"]) == [1, 2]
    for row in known.itertuples():
        assert (row.replicas - 1) * row.capacity < 40.0 <= row.replicas * row.capacity
        assert row.total_gpus == row.replicas * row.gpus
