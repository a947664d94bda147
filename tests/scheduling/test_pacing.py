"""Decodes keep their mean time per token, and their limit on gaps, beside prompts, whatever steps
take; and prompts get on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.costs.coefficients import Costs
from jaxserve.costs.predictor import Predictor
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.noise import Noise
from jaxserve.lab.simulate.recorder import RequestRecord
from jaxserve.lab.simulate.replica import Pipeline, VirtualReplica
from jaxserve.lab.simulate.run import execute
from jaxserve.lanes.groups import ChunkPlace
from jaxserve.lanes.load import LaneLoad
from jaxserve.scheduling.budget import StepBudget
from jaxserve.scheduling.pacing import StepSpread, StepTarget
from jaxserve.settings.schema import MeshConfig
from tests.examples import examples
from tests.lab.simulate.test_replica import made

# a stage takes 10 ms a step and 1 ms for each token of a chunk, after any history
STEP = Costs(layers=1, launch=0.01, linear_token=0.001)


def replica(
    mesh: MeshConfig = MeshConfig(),  # noqa: B008 (frozen)
    noise: Noise = Noise(),  # noqa: B008 (frozen)
    costs: Costs = STEP,
    lookahead: int = 1,
    pages: int = 4000,
    **fields,
) -> VirtualReplica:
    """Adaptive chunks of up to 512 tokens, in rows of 8; 0.1 s per token."""
    made_of = {
        "chunking": "adaptive",
        "policy": "slack",
        "chunk_tokens": 512,
        "min_chunk": 8,
        "max_seqs": 32,
        "tpot": 0.1,
        "step_time": 1.0,
        **fields,
    }
    virtual = made(costs, mesh, lookahead, pages, **made_of)
    virtual._pipeline = Pipeline(virtual.scheduler.predictor, mesh.spp, made_of["max_seqs"], noise)
    return virtual


def traffic(seed: int, requests: int, gap: float, outputs: tuple[int, int]) -> list[Arrival]:
    """One prompt of 4,000 tokens in ten, the others of up to 80."""
    dice = np.random.default_rng(seed)
    at = np.cumsum(dice.exponential(gap, requests))
    prompts = np.where(dice.random(requests) < 0.1, 4000, dice.integers(1, 80, requests))
    output = dice.integers(*outputs, requests)
    return [Arrival(*row) for row in zip(at.tolist(), prompts.tolist(), output.tolist())]


def late(records: list[RequestRecord], tpot: float = 0.1) -> list[RequestRecord]:
    """The completions whose mean time per token is above the objective."""
    return [each for each in records if each.output > 1 and each.tpot > tpot * (1 + 1e-9)]


@settings(max_examples=examples(30), deadline=None)
@given(
    mesh=st.builds(MeshConfig, spp=st.integers(1, 4), kvp=st.integers(1, 2)),
    seed=st.integers(0, 2**16),
    lookahead=st.integers(0, 2),
    gap=st.sampled_from([0.05, 0.3, 2.0]),
    tpot=st.sampled_from([0.1, 0.2, 0.5]),
)
def test_where_steps_take_what_is_predicted_every_completion_keeps_its_pace(
    mesh, seed, lookahead, gap, tpot
):
    """At the most 32 decodes take 42 ms in a stage, so they fit. On one stage also completions of
    two tokens; with more, one that joins may miss its turn in the first round."""
    arrivals = traffic(seed, 60, gap, (2, 40) if mesh.spp == 1 else (20, 60))
    virtual = replica(mesh, lookahead=lookahead, tpot=tpot * mesh.spp)
    records = execute(virtual, arrivals).records
    assert len(records) == 60 and all(each.reason == "length" for each in records)
    assert not late(records, tpot * mesh.spp)


@settings(max_examples=examples(15), deadline=None)
@given(
    seed=st.integers(0, 2**16), gap=st.sampled_from([0.1, 0.2, 0.4]), spp=st.sampled_from([1, 2])
)
def test_what_is_accepted_keeps_both_objectives(seed, gap, spp):
    """Under up to four times what the replica can do; some are refused, none is late, and each
    ends."""
    virtual = replica(MeshConfig(spp=spp), tpot=0.1 * spp, admission="predict", ttft=2.0)
    records = execute(virtual, traffic(seed, 150, gap, (20, 60))).records
    accepted = [each for each in records if each.reason != "refused"]
    assert len(accepted) > 20 and all(each.reason == "length" for each in accepted)
    missed = [each for each in accepted if not each.in_time]
    assert len(missed) <= 0.03 * len(accepted), missed


def beside_a_long_prompt(mesh: MeshConfig, noise: Noise) -> list[RequestRecord]:
    """What ends in 150 s of short prompts beside one that is prefilled all the time."""
    virtual = replica(mesh, noise, tpot=0.1 * mesh.spp, pages=70_000, max_seqs=64)
    dice = np.random.default_rng(1)
    at = np.cumsum(dice.exponential(0.5, 300)).tolist()
    shorts = [Arrival(time, 40, int(dice.integers(20, 60))) for time in at]
    records = execute(virtual, [Arrival(0.0, 10**6, 2), *shorts], until=150).records
    return [each for each in records if each.reason == "length"]


@pytest.mark.parametrize(
    "mesh", [MeshConfig(), MeshConfig(spp=2), MeshConfig(spp=4), MeshConfig(kvp=2)], ids=str
)
@pytest.mark.parametrize("sigma", [0.134, 0.3])
def test_where_steps_vary_all_but_a_few_keep_it_and_no_time_is_given_away(mesh, sigma):
    records = beside_a_long_prompt(mesh, Noise(sigma, 1))
    tpot = 0.1 * mesh.spp
    assert len(records) > 250 and len(late(records, tpot)) <= 0.01 * len(records)
    assert np.median([each.tpot for each in records]) > (0.8 if sigma < 0.2 else 0.65) * tpot


def test_without_a_margin_many_of_them_would_be_late(monkeypatch):
    """What the test above is for."""
    monkeypatch.setattr(StepSpread, "high", StepSpread.mean)
    records = beside_a_long_prompt(MeshConfig(), Noise(0.134, 1))
    assert len(late(records)) > 0.03 * len(records)


@pytest.mark.parametrize("spp", [1, 2])
def test_where_the_least_chunk_takes_longer_than_a_token_may_decodes_save_for_it(spp):
    """256 tokens, 0.27 s, for 0.1 s per token: the prompt gets what decodes leave, in some
    steps."""
    virtual = replica(MeshConfig(spp=spp), tpot=0.1 * spp, min_chunk=256, chunk_tokens=256)
    arrivals = [Arrival(0.0, 8, 400), Arrival(1.0, 32_768, 2)]
    decode, prompt = sorted(execute(virtual, arrivals).records, key=lambda each: int(each.id))
    assert 0.8 * 0.1 * spp < decode.tpot <= 0.1 * spp
    # the prompt's 33 s, at 0.09 s in each 0.1; a lone chunk passes two stages one after the other
    assert 33 < prompt.ttft < 1.2 * spp * 33 / 0.9


@pytest.mark.parametrize("tbt", [0.06, 0.15])
def test_gaps_keep_their_limit_at_its_quantile(tbt):
    arrivals = traffic(2, 300, 0.3, (50, 200))
    gaps = execute(replica(noise=Noise(0.134, 3), tbt=tbt), arrivals).gaps
    assert np.percentile(gaps, 99) <= tbt
    assert np.percentile(gaps, 99) > 0.7 * tbt


def test_a_class_has_a_limit_on_gaps_of_its_own_and_so_has_a_request():
    config = replica(tbt=0.3, classes="chat:tbt=0.2").scheduler.config
    assert config.objectives["chat"].tbt == 0.2 and config.objectives[None].tbt == 0.3


def test_debts_end_and_prompts_get_on():
    """A step that takes half a minute makes all late. What they owe is forgiven but for some
    tokens, so a long prompt waits no longer than it takes to repay these."""
    virtual = replica()
    draw = iter([1.0] * 20 + [200.0])
    virtual._pipeline._draw = lambda: next(draw, 1.0)
    arrivals = [Arrival(0.0, 8, 600), Arrival(0.1, 4000, 2), Arrival(50.0, 2000, 2)]
    records = execute(virtual, arrivals).records
    assert max(each.ttft for each in records if each.prompt == 2000) < 12
    assert all(each.reason == "length" for each in records)


@pytest.mark.parametrize("read, worth", [(0.0, 64), (0.02, 128), (0.08, 256)])
def test_it_is_worth_waiting_for_chunks_that_take_less_time_per_token(read, worth):
    """Where each chunk takes some time whatever its size, one of twice the tokens in half as many
    steps is quicker; where none does, it only makes gaps uneven."""
    costs = Costs(layers=1, launch=0.01, linear_token=0.001, chunk=read)
    lanes = [LaneLoad(1, 100, 100, samples=1)]
    paced = StepTarget(0.1, 0.1, 0.1, 0.4, 0.1)
    budget = StepBudget(Predictor(costs, MeshConfig()), lanes, 512, 8, 0.1, 0.1, paced, 0.5)
    assert budget.worthwhile(ChunkPlace(0), 1000, 64, 512) == worth
    assert budget.worthwhile(ChunkPlace(0), 1000, 64, 100) == 64  # there is no more of it
    assert budget.worthwhile(ChunkPlace(0), 1000, 300, 600) == 300  # decodes may not wait so long


def test_a_prompt_that_is_alone_takes_hardly_longer_than_in_the_largest_chunks():
    """Each chunk takes 50 ms before its first token: in steps of `step_time`, 0.1 s, that would be
    half of the time."""
    costs = Costs(layers=1, launch=0.001, linear_token=0.001, chunk=0.05)
    seconds = {}
    for chunking in ("adaptive", "static"):
        virtual = replica(costs=costs, chunking=chunking, step_time=0.1)
        (record,) = execute(virtual, [Arrival(0.0, 8000, 2)]).records
        seconds[chunking] = record.ttft
    assert seconds["adaptive"] < 1.15 * seconds["static"]


@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 2**16), sigma=st.sampled_from([0.05, 0.134, 0.3]))
def test_the_spread_of_steps_is_learnt(seed, sigma):
    """The share of steps that take longer than `high` says is what it is meant to be, or less."""
    draw = Noise(sigma, seed).draws()
    spread = StepSpread()
    over = 0
    for step in range(4000):
        seconds = 0.1 * draw()
        over += step >= 1000 and seconds > 0.1 * spread.high(0.1)
        spread.learn(0.1, seconds)
    assert over <= 0.012 * 3000
    assert spread.mean(0.1) == pytest.approx(1, abs=0.15)
    assert spread.high(0.1) < np.exp(4.5 * sigma)
