"""Thousands of requests that are cancelled at random points leave everything as it was."""

from __future__ import annotations

import functools
import gc
import os
import random
import threading
from collections import Counter

import jax
import numpy as np
import pytest

from jaxserve.api.events import Accepted, Finished, Progress, Token
from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.engine.engine import Engine
from tests.engine.harness import assert_empty, shared

WARM = 500  # requests after which nothing grows any more
KINDS = [
    SamplingParams.make(**{"max_tokens": 300, "ignore_eos": True, "temperature": 0, **fields})
    for fields in ({}, {}, dict(temperature=1.0, seed=1), dict(n=2), dict(frequency_penalty=0.5))
]


class Traffic:
    """Requests that come at random, and go at random: while they wait, in the middle of their
    prompt, while they speak."""

    def __init__(self, real: Engine):
        self.real = real
        self.rng = random.Random(0)
        self.born = 0
        self.ended = 0
        self.alive: dict[str, type] = {}  # id -> the last that was heard of it
        self.cancelled: Counter[type] = Counter()  # by what was heard last

    def hear(self, id: str, events) -> None:
        self.ended += sum(isinstance(event, Finished) for event in events)
        self.alive[id] = type(events[-1])

    def arrive(self) -> None:
        first = self.rng.choice((3, 3, *range(4, 200)))
        length = self.rng.choice((1, 5, 20, 70, 100))
        prompt = np.arange(first, first + length)  # some prefixes are shared
        self.born += 1
        id = str(self.born)
        request = Request.make(
            id, prompt, self.rng.choice(KINDS), vocab=512, max_len=self.real.info.max_model_len
        )
        self.real.submit(request, functools.partial(self.hear, id))

    def run(self, requests: int) -> None:
        """Runs until `requests` more were born and all are gone."""
        last = self.born + requests
        while self.born < last or self.alive:
            while self.born < last and len(self.alive) < 8 and self.rng.random() < 0.9:
                self.arrive()
            self.real.step()
            for id in [id for id in self.alive if self.rng.random() < 0.15]:
                self.cancelled[self.alive[id]] += self.real.cancel(id)
                del self.alive[id]
            if self.born % 50 == 0:
                self.real.scheduler.check()
        while self.real.step():
            pass
        self.real.scheduler.check()


def resident() -> int:
    """Bytes of memory this process has."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def census(real) -> tuple[int, int, int]:
    """Counts what should not grow: objects, without the bounded number that the journal keeps,
    device arrays, threads."""
    real.journal.steps.clear(), real.journal.ends.clear()
    gc.collect()
    return len(gc.get_objects()), len(jax.live_arrays()), threading.active_count()


@pytest.mark.parametrize("requests", [300, pytest.param(10_000, marks=pytest.mark.matrix)])
def test_thousands_of_cancelled_requests_leave_nothing_behind(requests):
    real = shared(pages=80)
    traffic = Traffic(real)
    traffic.run(WARM)
    assert_empty(real)
    before = census(real)
    memory = resident()
    traffic.run(requests)
    assert_empty(real)
    after = census(real)
    growth = resident() - memory
    assert traffic.born == requests + WARM <= traffic.ended  # some had two completions
    assert min(traffic.cancelled[kind] for kind in (Accepted, Progress, Token)) > requests / 50, (
        traffic.cancelled
    )
    assert traffic.cancelled.total() > 0.95 * traffic.born
    assert not real.scheduler.sequences and len(real.scheduler.slots.free) == 4
    assert after[0] - before[0] < 2000, f"objects: {before[0]}, then {after[0]}"
    assert after[1] <= before[1] and after[2] <= before[2], (
        f"device arrays and threads: {before[1:]}, then {after[1:]}"
    )
    assert growth < 64 * 2**20
    listener = []
    real.submit(
        Request.make(
            "last", np.arange(3, 60), KINDS[0], vocab=512, max_len=real.info.max_model_len
        ),
        listener.extend,
    )
    while real.step():
        pass
    assert listener[-1].reason == "length" and listener[-1].usage.completion == 300
