"""Step times that are drawn around their prediction: what schedulers and planners know, what the
online correction learns, and that nothing changes without noise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxserve.checkpoint.zoo import MODELS
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.baselines import compare
from jaxserve.lab.simulate.noise import REPEATED, SERVED, Noise
from jaxserve.lab.simulate.recorder import Outcome
from jaxserve.lab.simulate.run import System, execute
from jaxserve.lab.simulate.tetris import DrawnQueues, PrefillInstances, constant
from jaxserve.lanes.cdsp import PLANNERS, Instances, Latency, free_growth
from jaxserve.settings.schema import CacheConfig, ConfigError, MeshConfig, SchedulerConfig

ARRIVALS = [Arrival(0.2 * number, 3000 + 500 * number, 20) for number in range(8)]
SCHEDULER = SchedulerConfig(chunking="adaptive", chunk_tokens=2048, max_seqs=16)
CACHE = CacheConfig(block_size=64)
# One token takes a second on one instance; a group of two pays a second more.
SIMPLE = Instances(
    {1: Latency(0.0, 1.0, 0.0, 0.0), 2: Latency(1.0, 0.5, 0.0, 0.0)}, per_node=2, growth=free_growth
)


def system(noise: Noise = Noise()) -> System:  # noqa: B008 (frozen)
    return System(MODELS["llama3-8b"], "a100", MeshConfig(tp=4, spp=2), noise=noise)


def served(noise: Noise) -> Outcome:
    return execute(system(noise).replica(SCHEDULER, CACHE), ARRIVALS, keep_steps=True)


def loongserve(noise: Noise) -> Outcome:
    return compare("loongserve", system(noise), SCHEDULER, CACHE, ARRIVALS)


def test_factors_are_lognormal_with_the_prediction_as_their_mean():
    draw = Noise(0.3, seed=1).draws()
    factors = np.array([draw() for _ in range(20_000)])
    assert factors.mean() == pytest.approx(1.0, abs=0.01)
    assert np.log(factors).std() == pytest.approx(0.3, abs=0.01)


def test_draws_are_the_seeds_and_servers_have_their_own():
    first = lambda noise: [draw() for draw in [noise.draws()] for _ in range(5)]
    assert first(Noise(0.1, 3)) == first(Noise(0.1, 3)) != first(Noise(0.1, 4))
    servers = [first(Noise(0.1, 3).of(number)) for number in (0, 1)]
    assert servers[0] != servers[1]
    assert servers[0] != first(Noise(0.1, 4).of(0))


@pytest.mark.parametrize("sigma", [-0.1, 1.5, float("nan")])
def test_a_spread_that_cannot_be_is_refused(sigma):
    with pytest.raises(ConfigError, match="noise"):
        Noise(sigma)


@pytest.mark.parametrize("run", [served, loongserve])
def test_without_noise_the_seed_changes_nothing_and_with_it_every_seed_differs(run):
    ends = lambda noise: [record.end for record in run(noise).records]
    assert ends(Noise()) == ends(Noise(seed=5))
    assert ends(Noise(0.2, 1)) == ends(Noise(0.2, 1))
    assert ends(Noise()) != ends(Noise(0.2, 1)) != ends(Noise(0.2, 2))


def test_the_scheduler_predicts_the_same_and_the_correction_sees_what_was_drawn():
    """Two replicas decide their first step alike, whatever it then takes."""
    replicas = [system(noise).replica(SCHEDULER, CACHE) for noise in (Noise(), Noise(0.5, 1))]
    outcomes = [execute(replica, ARRIVALS, keep_steps=True) for replica in replicas]
    first = [outcome.steps[0] for outcome in outcomes]
    assert first[0].chunks == first[1].chunks and first[0].pace != first[1].pace
    exact, corrected = (replica.scheduler.predictor.scale for replica in replicas)
    assert exact == 1.0 and corrected != 1.0


def test_steps_take_what_was_predicted_at_first_whatever_is_learnt_of_them():
    """Else what the correction learns of draws would become what steps take, and be learnt
    again."""
    alone = System(MODELS["llama3-8b"], "a100", MeshConfig())
    noises = (Noise(0.5, 1), Noise())
    replica, exact = (replace(alone, noise=noise).replica(SCHEDULER, CACHE) for noise in noises)
    arrivals = [Arrival(0.0, 200, 4000)]
    noisy, plain = (execute(one, arrivals, keep_steps=True) for one in (replica, exact))
    assert len(noisy.steps) > 3000
    assert noisy.records[0].end == pytest.approx(plain.records[0].end, rel=0.05)
    # the correction goes by logarithms, whose mean is 0.125 below 0
    assert 0.6 < replica.scheduler.predictor.scale < 1.2


def test_measured_spreads_are_in_order():
    assert 0 < REPEATED < SERVED < 0.5


# --- prefill instances


def instances(policy: str, noise: Noise = Noise()) -> PrefillInstances:  # noqa: B008 (frozen)
    return PrefillInstances(SIMPLE, 2, PLANNERS[policy], constant(0.0), noise=noise)


def test_drawn_queues_of_no_spread_are_as_planned():
    """The clock that draws agrees with the one that plans where the factor is 1."""
    arrivals = [Arrival(0.7 * number, 2 + number % 5, 1) for number in range(30)]
    for policy in ("cdsp", "single", "fixed-1"):
        planned = instances(policy).run(arrivals)
        drawn = instances(policy, Noise(1e-9)).run(arrivals)
        assert drawn.ttft == pytest.approx(planned.ttft, rel=1e-6)
        assert drawn.idle == pytest.approx(planned.idle, abs=1e-6)
        assert drawn.several == planned.several


def test_a_planner_knows_what_has_ended_and_predicts_the_rest():
    queues = DrawnQueues(2, Noise(0.5, seed=1))
    plan = PLANNERS["fixed-1"](SIMPLE, queues.seconds(0.0), 10, 0.0)
    run = queues.give(plan, 0.0)
    assert run.ttft != pytest.approx(10.0, rel=0.01)
    busy = plan.chunks[0].group[0]
    half = min(run.ttft, 10.0) / 2
    assert queues.seconds(half)[busy] == pytest.approx(10.0 - half)
    late = run.ttft - 1e-6
    assert queues.seconds(late)[busy] == pytest.approx(max(10.0 - late, 0.0))
    assert queues.seconds(run.ttft)[busy] == 0.0


def test_a_group_waits_for_the_slowest_of_what_was_drawn():
    """One token on each of two instances, then a prompt on both."""
    arrivals = [Arrival(0.0, 1, 1), Arrival(0.0, 1, 1), Arrival(0.0, 40, 1)]
    assert instances("single").run(arrivals).idle == 0
    drawn = [instances("single", Noise(0.3, seed)).run(arrivals).idle for seed in range(3)]
    assert min(drawn) > 0


def test_plans_of_several_chunks_are_counted():
    arrivals = [Arrival(0.0, 2, 1), Arrival(0.0, 100, 1)]
    assert instances("cdsp").run(arrivals).several == 1
    assert instances("single").run(arrivals).several == 0
