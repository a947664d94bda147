"""Predicted first tokens of accepted requests, beside the times at which they come on a virtual
replica."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from jaxserve.api.events import Accepted, Event, Finished
from jaxserve.api.request import Slo
from jaxserve.cache import CacheManager
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.costs.coefficients import NOMINAL, Costs
from jaxserve.lab.simulate.arrival import Arrival, to_request
from jaxserve.lab.simulate.replica import VirtualReplica
from jaxserve.lab.simulate.run import System
from jaxserve.scheduling import Scheduler
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig

MAX_LEN = 2**30
LONG = 60_000


def made(mesh: MeshConfig = MeshConfig(), **settings) -> VirtualReplica:  # noqa: B008 (frozen)
    """Llama-3 8B on A100."""
    return System(MODELS["llama3-8b"], "a100", mesh).replica(
        SchedulerConfig(**settings), CacheConfig(pages=20_000, prefix_caching=False)
    )


def heard_and_true(
    replica: VirtualReplica, *arrivals: tuple[float, int, int]
) -> tuple[list[float], list[float]]:
    """Seconds to the first token, as predicted when a request is accepted, and as they came."""
    replica.start()
    events: list[list[Event]] = [[] for _ in arrivals]
    for number, (at, prompt, output) in enumerate(arrivals):
        replica.advance(at, through=False)
        request = to_request(Arrival(at, prompt, output), number, MAX_LEN)
        replica.submit(request, events[number].extend)
    replica.advance(math.inf)
    heard = [event.predicted_ttft for (event, *_) in events if isinstance(event, Accepted)]
    ends = [event for (*_, event) in events if isinstance(event, Finished)]
    return heard, [end.timing.first_token for end in ends]


def predicted(replica: VirtualReplica, *prompts: int, ttft: float | None = None) -> list[float]:
    """Predicts prompts that are accepted one after the other, before anything runs."""
    first = len(replica.scheduler.sequences)
    added = (
        replica.scheduler.add(to_request(Arrival(0.0, prompt, 1), number, MAX_LEN, Slo(ttft=ttft)))
        for number, prompt in enumerate(prompts, first)
    )
    return [event.predicted_ttft for (event,) in added]


def work(replica: VirtualReplica, prompt: int) -> float:
    """Seconds of its prefill alone."""
    return replica.scheduler.predictor.prefill(0, prompt, replica.scheduler.config.chunk_tokens)


# --- against the virtual replica


@pytest.mark.parametrize("chunking", ["static", "adaptive"])
@pytest.mark.parametrize("mesh", ["spp=1", "spp=2", "spp=4,tp=8", "spp=2,kvp=2", "kvp=4"])
def test_a_request_alone_has_its_first_token_when_it_was_told(mesh, chunking):
    for prompt in (600, 5000, 50_000):
        replica = made(MeshConfig.parse(mesh), chunking=chunking)
        heard, true = heard_and_true(replica, (1.0, prompt, 2))
        assert heard == pytest.approx(true, rel=0.02)


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(spp=4, tp=8)])
def test_requests_that_come_at_once_have_their_first_tokens_when_they_were_told(mesh):
    """All but for the steps that had begun when they came: one for each stage."""
    replica = made(mesh)
    heard, true = heard_and_true(
        replica, *((1.0, prompt, 1) for prompt in [3000, 500, 8000, 2000] * 3)
    )
    assert heard == pytest.approx(true, rel=0.02, abs=mesh.spp * work(replica, 512)) and true[
        -1
    ] > 20 * mesh.spp * work(replica, 512)


# --- what counts


def test_it_grows_with_what_is_ahead_by_the_work_of_that():
    replica = made(policy="fcfs")
    told = predicted(replica, 1000, 4000, 1000, 1000)
    assert told[3] == pytest.approx(told[0] + work(replica, 1000) * 2 + work(replica, 4000))
    assert all(later > sooner for sooner, later in pairwise([told[0], told[2], told[3]]))


@pytest.mark.parametrize(
    "cache",
    [
        {"placement": "striped", "lane_tokens": 64},
        {"placement": "random"},
        {"placement": "hashed", "segment_tokens": 1024},
        {"placement": "hashed", "segment_tokens": 1024, "pool_lanes": 4},
    ],
)
def test_prompts_that_all_lanes_share_wait_for_the_whole_work_before_them(cache):
    replica = System(MODELS["llama3-8b"], "a100", MeshConfig(kvp=8)).replica(
        SchedulerConfig(chunk_tokens=2048, admission="predict", ttft=100.0),
        CacheConfig(pages=20_000, prefix_caching=False, **cache),
    )
    heard, true = heard_and_true(replica, *[(0.0, 20_000, 2)] * 12)
    assert heard[6:] == pytest.approx(true[6:], rel=0.15)


@pytest.mark.parametrize("policy", ["slack", "edf"])
def test_it_does_not_grow_with_what_the_policy_ranks_behind(policy):
    (alone,) = predicted(made(policy=policy), 1000, ttft=1.0)
    replica = made(policy=policy)
    predicted(replica, *[2000] * 20, ttft=500.0)
    assert predicted(replica, 1000, ttft=1.0) == [alone]
    assert predicted(replica, 1000, ttft=1000.0)[0] > alone + 20 * work(replica, 2000)


def test_what_is_partly_prefilled_counts_with_what_is_left_of_it():
    replica = made(policy="fcfs")
    predicted(replica, 8000)
    scheduler = replica.scheduler
    before = scheduler.load().queued_prefill_seconds
    batches = [scheduler.start(0.0) for _ in range(4)]
    left = scheduler.load().queued_prefill_seconds
    assert left < 0.8 * before
    assert predicted(replica, 1000) == [
        pytest.approx(batches[-1].seconds / 2 + left + work(replica, 1000))
    ]


def test_a_longer_prompt_ahead_counts_with_no_more_than_its_share_of_common_steps():
    def beside(**settings) -> float:
        replica = made(policy="fcfs", **settings)
        return predicted(replica, LONG, 1000)[1]

    replica = made()
    own = work(replica, 1000)
    whole = work(replica, LONG)
    assert beside(chunking="adaptive", sharing=0.8) == pytest.approx(own / 0.8)
    assert beside(chunking="adaptive", sharing=1.0) == pytest.approx(own)
    assert (
        beside(chunking="adaptive", sharing=0.0)
        == beside(chunking="static")
        == pytest.approx(own + whole)
    )
    assert beside(chunking="adaptive", sharing=0.01) == pytest.approx(own + min(whole, 99 * own))
    assert predicted(made(chunking="adaptive", sharing=0.8, policy="fcfs"), 1000, LONG)[
        1
    ] == pytest.approx(own + whole)


def test_lanes_share_what_is_ahead_but_not_a_prompts_own_work():
    one, four = (predicted(made(MeshConfig(kvp=lanes)), *[1000] * 9) for lanes in (1, 4))
    assert four[0] == one[0] and four[8] - four[0] == pytest.approx((one[8] - one[0]) / 4)


@pytest.mark.parametrize("costs", [NOMINAL, Costs(layers=1)])
@pytest.mark.parametrize("policy", ["fcfs", "edf", "llf", "slack"])
@pytest.mark.parametrize("chunking", ["static", "adaptive"])
def test_where_no_costs_are_known_it_is_still_a_number(costs, policy, chunking):
    config = SchedulerConfig(policy=policy, chunking=chunking)
    cache = CacheConfig(pages=20_000, prefix_caching=False)
    mesh = MeshConfig(spp=2, kvp=2)
    manager = CacheManager(cache, mesh.kvp, config.max_seqs)
    scheduler = Scheduler(config, manager, mesh, MAX_LEN, costs=costs)
    replica = VirtualReplica(scheduler, cache, mesh)
    assert all(
        math.isfinite(seconds) and seconds >= 0 for seconds in predicted(replica, 1000, 10, 5000)
    )


def test_it_follows_what_the_predictor_has_learnt():
    told = predicted(made(), 3000, 3000)
    replica = made()
    replica.scheduler.predictor.scale = 2.0
    assert predicted(replica, 3000, 3000) == pytest.approx([2 * seconds for seconds in told])
