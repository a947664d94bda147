"""A policy that is added from outside: one object and one row of the table."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Token
from jaxserve.api.request import Request, Slo
from jaxserve.api.sampling import SamplingParams
from jaxserve.cache import CacheManager
from jaxserve.costs.coefficients import Costs
from jaxserve.policies import POLICIES, Policy
from jaxserve.scheduling import Scheduler
from jaxserve.scheduling.batch_reader import StepResults
from jaxserve.settings.options import options_of
from jaxserve.settings.schema import CacheConfig, ConfigError, MeshConfig, SchedulerConfig
from tests.replica.holders import live, virtual

SHORTEST = Policy("shortest job first", lambda view: view.work)
TOKEN = 0.01  # seconds of prefill per token


@pytest.fixture
def shortest():
    POLICIES["sjf"] = SHORTEST
    yield "sjf"
    del POLICIES["sjf"]


def made(policy: str, **settings: Any) -> Scheduler:
    config = SchedulerConfig(
        **{"policy": policy, "chunk_tokens": 100, "max_seqs": 8, "tpot": 10.0, **settings}
    )
    cache = CacheManager(CacheConfig(16, 1000, prefix_caching=False), 1, config.max_seqs)
    costs = Costs(layers=1, linear_token=TOKEN)
    return Scheduler(config, cache, MeshConfig(), 10**5, costs=costs)


def add(core: Scheduler, name: str, prompt: int, due: float | None) -> float:
    """Adds a request at second 0; returns the predicted seconds to its first token."""
    request = Request.make(
        name,
        np.ones(prompt, np.int32),
        SamplingParams.make(temperature=0, max_tokens=1, ignore_eos=True),
        vocab=10,
        max_len=10**5,
        arrival=0.0,
        slo=Slo(ttft=due),
    )
    return core.add(request, 0.0)[0].predicted_ttft


def first_tokens(core: Scheduler) -> list[str]:
    """Runs all requests; returns their ids in the order of their first tokens."""
    now = 0.0
    order = []
    while core.sequences:
        batch = core.start(now)
        now += batch.seconds
        events = core.finish(batch, StepResults(np.zeros(len(batch.slot), np.int32)), now)
        order += [id for id, event in events if isinstance(event, Token)]
    return list(dict.fromkeys(order))


def test_settings_accept_it_as_long_as_it_is_in_the_table(shortest):
    assert SchedulerConfig(policy=shortest).policy == "sjf"
    assert "sjf" in options_of(SchedulerConfig)["policy"].choices
    row = POLICIES.pop(shortest)
    with pytest.raises(ConfigError, match="sjf"):
        SchedulerConfig(policy="sjf")
    POLICIES[shortest] = row


def test_it_ranks_the_prompts_of_a_step(shortest):
    core = made(shortest, max_seqs=1)
    for name, prompt, due in (("long", 400, 1.0), ("short", 20, 9.0), ("middle", 90, 5.0)):
        add(core, name, prompt, due)
    assert first_tokens(core) == ["short", "middle", "long"]


@pytest.mark.parametrize(("policy", "accepted"), [("edf", False), ("sjf", True)])
def test_admission_accepts_a_short_prompt_that_deadlines_would_put_last(shortest, policy, accepted):
    core = made(policy, admission="stated", ttft=0.5, ttft_stretch=1)
    for number in range(5):  # 3 s of work each, and due in 3 s: nothing is promised to them
        add(core, f"long{number}", 300, None)
    if accepted:
        assert add(core, "short", 20, 10.0) == pytest.approx(0.2)
        assert first_tokens(core)[0] == "short"
    else:
        with pytest.raises(RequestError, match="too late"):
            add(core, "short", 20, 10.0)


@pytest.mark.parametrize(("policy", "accepted"), [("edf", True), ("sjf", False)])
def test_admission_refuses_a_long_prompt_that_deadlines_would_put_first(shortest, policy, accepted):
    core = made(policy, admission="predict")
    for number in range(20):
        add(core, f"short{number}", 20, 60.0)  # 0.2 s of work each
    if accepted:
        assert add(core, "long", 100, 2.0) == pytest.approx(1.0)
        assert first_tokens(core)[0] == "long"
    else:
        with pytest.raises(RequestError, match="too late"):
            add(core, "long", 100, 2.0)


@pytest.mark.parametrize("make", [virtual, live])
def test_it_runs_in_the_simulator_and_in_the_live_engine(shortest, make):
    for policy, first in (("fcfs", "long"), (shortest, "short")):
        holder = make(policy=policy)
        came: list[str] = []

        def note(name: str, events, came=came) -> None:
            came.extend(name for event in events if isinstance(event, Token))

        for name, prompt in (("long", 200), ("short", 20)):
            request = holder.request(name, prompt, tokens=3)
            holder.replica.submit(request, functools.partial(note, name))
        holder.replica.start()
        holder.wait(lambda came=came: len(came) == 6)
        assert came[0] == first
        holder.replica.close()
