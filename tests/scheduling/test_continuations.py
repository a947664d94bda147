"""Requests that go on with the tokens that another replica has put out."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.api.errors import RequestError
from jaxserve.api.request import Continuation, Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.settings.schema import CacheConfig, SchedulerConfig
from tests.scheduling.fakes import EOS, Replica, chunks

PROMPT = [1, 2, 3, 4, 6, 7]


class Grammar:
    """A guide that takes any tokens but EOS, and the matcher of its only completion."""

    def __init__(self) -> None:
        self.done = False
        self.pushed: list[int] = []

    def matcher(self) -> Grammar:
        return self

    def fill(self, row: np.ndarray) -> None:
        row[:] = -1

    def push(self, token: int) -> None:
        if token == EOS:
            raise RequestError("guided", "no token follows")
        self.pushed.append(token)


def request(id: str, outputs: dict[int, list[int]] | None = None, n: int = 1, **rest) -> Request:
    sampling = SamplingParams(n=n, max_tokens=9, ignore_eos=True)
    going_on = None if outputs is None else Continuation(outputs, 0.0)
    return Request(id, np.array(PROMPT, np.int32), sampling, continuation=going_on, **rest)


@pytest.fixture
def replica() -> Replica:
    config = SchedulerConfig(max_seqs=4, chunk_tokens=16, max_queue=2)
    return Replica(config, CacheConfig(block_size=4, pages=30))


def test_its_tokens_are_prefilled_behind_the_prompt(replica):
    replica.scheduler.add(request("r", {0: [8, 9, 10]}))
    assert chunks(replica.start()) == [(0, 0, 9, "last")]


def test_completions_that_have_ended_are_not_computed(replica):
    replica.scheduler.add(request("r", {1: [8], 3: []}, n=4))
    found = replica.scheduler.requests.entries["r"].alive
    assert {index: sequence.output for index, sequence in found.items()} == {1: [8], 3: []}
    replica.scheduler.check()


def test_its_grammar_follows_the_tokens_before(replica):
    grammar = Grammar()
    replica.scheduler.add(request("r", {0: [8, 9]}, guide=grammar))
    assert grammar.pushed == [8, 9]


def test_tokens_that_its_grammar_does_not_allow_are_refused(replica):
    with pytest.raises(RequestError, match="no token follows"):
        replica.scheduler.add(request("r", {0: [8, EOS]}, guide=Grammar()))
    assert not replica.scheduler.requests.entries and not replica.scheduler.sequences


def test_a_full_queue_does_not_refuse_it(replica):
    for number in range(2):
        replica.scheduler.add(request(f"{number}"))
    with pytest.raises(RequestError, match="waiting"):
        replica.scheduler.add(request("new"))
    replica.scheduler.add(request("going on", {0: [8]}))
    replica.scheduler.check()
