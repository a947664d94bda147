"""A live engine that is asked for more than it can do."""

from __future__ import annotations

import contextlib
import dataclasses
import time

import numpy as np
import pytest

from jaxserve.api.errors import RequestError
from jaxserve.cache import CacheManager
from jaxserve.costs.coefficients import Costs
from jaxserve.engine.engine import Engine
from jaxserve.scheduling import Scheduler
from jaxserve.settings.schema import SchedulerConfig
from tests.engine.harness import assert_empty, shared
from tests.engine.test_engine import ask
from tests.waiting import eventually, tried

LONG = 480
SHORT = 16


@pytest.fixture(scope="module")
def built() -> Engine:
    real = shared()
    real.worker.warm_up(lambda name: None, ("greedy",))
    return real


def guarded(built: Engine, **settings) -> Engine:
    """An engine that predicts, on the same devices, with costs as it has just shown them; first
    tokens are due after 20 long prompts at least."""
    plain = Engine(built.config, built.worker, built.scheduler)
    plain.start()
    for id in ("warm", "timed"):
        ask(plain, id, LONG, max_tokens=2, rest=dict(bypass_prefix_cache=True)).finished()
    began = time.monotonic()
    ask(plain, "again", LONG, max_tokens=2, rest=dict(bypass_prefix_cache=True)).finished()
    seconds = time.monotonic() - began
    eventually(lambda: not plain.load().running, 60)
    plain.close()
    objectives = {
        "ttft": max(0.5, 20 * seconds),
        "tpot": max(0.05, seconds),
        "step_time": max(0.05, seconds),
    }
    config = SchedulerConfig(
        **{
            "policy": "slack",
            "chunking": "adaptive",
            "admission": "predict",
            "max_seqs": 4,
            "chunk_tokens": 32,
            **objectives,
            **settings,
        }
    )
    cache = CacheManager(dataclasses.replace(built.config.cache, prefix_caching=False), 1, 4)
    scheduler = Scheduler(
        config,
        cache,
        built.config.mesh,
        built.info.max_model_len,
        costs=Costs(layers=1, launch=seconds * 32 / LONG),
    )
    real = Engine(dataclasses.replace(built.config, scheduler=config), built.worker, scheduler)
    real.start()
    return real


@tried(3)
def test_one_who_sends_the_longest_prompts_takes_nothing_from_others(built):
    real = guarded(built)
    due = real.config.scheduler.ttft
    accepted = []
    refused = []
    short = []
    try:
        while len(refused) < 30:
            try:
                accepted.append(ask(real, f"long{len(accepted)}", LONG, max_tokens=2))
            except RequestError as error:
                refused.append(error)
            assert len(accepted) < 1000, "far more than there is time for"
        for number in range(30):
            began = time.monotonic()
            with contextlib.suppress(RequestError):
                short.append(
                    ask(real, f"short{number}", SHORT, max_tokens=2).finished().timing.first_token
                )
            time.sleep(max(0.0, began + due / 30 - time.monotonic()))
        assert {error.status for error in refused} == {"RESOURCE_EXHAUSTED"}
        assert all(error.reason == "ttft" and error.retry_after > 0 for error in refused)
        assert accepted and len(short) >= 24 and np.percentile(short, 99) <= due
        firsts = [listener.finished().timing.first_token for listener in accepted]
        assert np.mean(np.array(firsts) <= 2 * due) >= 0.9
        eventually(lambda: not real.load().running, 60)
        assert_empty(real)
    finally:
        real.close()


def test_a_deadline_that_comes_before_its_turn_costs_no_prefill(built):
    real = guarded(built, admission="queue")
    computed = []
    start = real.scheduler.start

    def counting(now):
        batch = start(now)
        computed.append(0 if batch is None else batch.tokens.size)
        return batch

    real.scheduler.start = counting
    try:
        running = [ask(real, f"r{number}", 10, max_tokens=400) for number in range(4)]
        eventually(lambda: all(listener.tokens for listener in running), 60)
        late = ask(real, "late", 100, rest=dict(deadline=real.clock.now() + 0.05))
        assert late.finished().reason == "deadline" and not late.tokens
        assert sum(computed) == 4 * 10
    finally:
        real.close()
