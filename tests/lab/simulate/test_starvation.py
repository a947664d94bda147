"""What callers that wait for each other's answers get of a policy: whoever is late is put off, and
not for ever."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from jaxserve.lab.research.drive import virtual
from jaxserve.lab.simulate.recorder import RequestRecord
from jaxserve.lab.simulate.run import System, shape_of
from jaxserve.lab.simulate.workload import parse
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig

SYSTEM = System(shape_of("llama3-8b"), "a100", MeshConfig())
LONG = "poisson:prompt=2000:32000,output=48"
MIDDLE = "poisson:prompt=500:8000,output=48"


@functools.cache
def served(
    policy: str, mix: str, seed: int, callers: int | None, qps: float
) -> list[RequestRecord]:
    """callers: how many send the next request when theirs has ended; None: `qps` come a second."""
    scheduler = SchedulerConfig(policy=policy, chunking="adaptive", admission="queue")
    arrivals = parse(mix, qps=qps, requests=200, seed=seed)
    return virtual(SYSTEM.replica(scheduler, CacheConfig()), arrivals, callers).records


def p99(records: list[RequestRecord]) -> float:
    return float(np.percentile([record.ttft for record in records], 99))


def in_time(records: list[RequestRecord]) -> float:
    return float(np.mean([record.first <= record.due for record in records]))


matrix = functools.partial(pytest.param, marks=pytest.mark.matrix)


@pytest.mark.parametrize(
    "mix, seed, callers, qps",
    [
        (LONG, 0, 8, 1.0),
        matrix(LONG, 1, 8, 1.0),
        matrix(LONG, 2, 8, 1.0),
        matrix(LONG, 0, 4, 1.0),
        matrix(LONG, 0, 16, 1.0),
        matrix(MIDDLE, 0, 16, 1.0),
        matrix(LONG, 0, None, 0.74),  # 1.4 times the capacity
        matrix(LONG, 0, None, 1.06),
    ],
)
def test_by_slack_far_more_are_in_time_than_by_age_and_the_last_wait_little_longer(
    mix, seed, callers, qps
):
    by_age = served("fcfs", mix, seed, callers, qps)
    by_slack = served("slack", mix, seed, callers, qps)
    assert p99(by_slack) <= 1.3 * p99(by_age)
    assert in_time(by_slack) >= in_time(by_age) + 0.15
