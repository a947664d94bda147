"""Simulations check proposed tokens: the given share is right, steps are saved, and nothing changes
under load."""

from __future__ import annotations

import dataclasses

import pytest

from jaxserve.checkpoint.zoo import MODELS
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.guesses import Guesses
from jaxserve.lab.simulate.run import System, execute
from jaxserve.scheduling.events import DraftsChecked
from jaxserve.settings.schema import CacheConfig, ConfigError, MeshConfig, SchedulerConfig

SCHEDULER = SchedulerConfig(
    chunking="adaptive", policy="slack", chunk_tokens=2048, max_seqs=64, drafts="ngram"
)
CACHE = CacheConfig(block_size=64)
FEW = [Arrival(0.1 * number, 500, 300) for number in range(2)]
MANY = [Arrival(0.02 * number, 6000, 100) for number in range(60)]


def run(
    arrivals: list[Arrival], acceptance: float = 0.7, seconds: float = 0.0, **settings
) -> tuple[float, list[bool]]:
    """Seconds per token after the first, on average, and whether each proposed token was right.
    seconds: of a draft model."""
    guesses = Guesses(acceptance, 1, seconds)
    system = System(MODELS["llama3-8b"], "h100", MeshConfig(), guesses=guesses)
    replica = system.replica(dataclasses.replace(SCHEDULER, **settings), CACHE)
    right: list[bool] = []
    replica.bus.subscribe(DraftsChecked, lambda event: right.extend(event.right.tolist()))
    records = execute(replica, arrivals).records
    assert all(record.reason == "length" for record in records)
    pace = [(record.end - record.first) / (record.output - 1) for record in records]
    return sum(pace) / len(pace), right


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 1.0])
def test_as_many_are_right_as_was_said(acceptance):
    """With those before them, for so they count; the more are right, the sooner it is over."""
    plain, none = run(FEW, drafts="none")
    pace, right = run(FEW, acceptance)
    assert not none and right
    share = sum(right) / len(right)
    assert share == acceptance if acceptance in (0, 1) else 0.3 * acceptance < share < acceptance
    assert pace < plain * (1.05 - 0.8 * acceptance)


def test_a_draft_model_gains_what_its_time_leaves():
    """A token of the model takes 7 ms: those of a draft model at 1 ms are worth it, those at 7 ms
    are not, and none is made."""
    plain, _ = run(FEW, drafts="none")
    fast, right = run(FEW, 0.9, 0.001, drafts="model")
    free, _ = run(FEW, 0.9, drafts="ngram")
    slow, none = run(FEW, 0.9, 0.007, drafts="model")
    assert free < fast < 0.7 * plain
    assert sum(right) > 0.5 * len(right)
    assert slow < 1.02 * plain
    assert len(none) < 0.05 * len(right)


def test_prompts_that_wait_leave_no_time_for_proposed_tokens():
    plain, _ = run(MANY, drafts="none", tpot=0.03)
    pace, right = run(MANY, tpot=0.03)
    assert pace < 1.03 * plain
    assert len(right) < 0.5 * 60 * 100


def test_a_model_with_states_is_refused():
    model = MODELS["qwen3-next-80b-a3b"]
    with pytest.raises(ConfigError, match="drafts"):
        System(model, "h100", MeshConfig(tp=4)).replica(SCHEDULER, CACHE)


@pytest.mark.parametrize("acceptance", [-0.1, 1.1])
def test_a_probability_that_cannot_be_is_refused(acceptance):
    with pytest.raises(ConfigError, match="draft_acceptance"):
        Guesses(acceptance)
