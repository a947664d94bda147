"""A step checks the number of proposed tokens that gives most tokens a second, within objectives
and without pages that others need."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxserve.costs.coefficients import NOMINAL, Costs
from jaxserve.drafts.drafter import EachAlone, Offer, Wanted
from jaxserve.drafts.lookup import Proposal
from jaxserve.scheduling.events import DraftsChecked
from jaxserve.settings.schema import CacheConfig, SchedulerConfig
from tests.scheduling.fakes import Replica, Seer

CONFIG = SchedulerConfig(max_seqs=8, drafts="ngram", draft_tokens=6)
CACHE = CacheConfig(block_size=16, pages=100)
FREE_ROWS = Costs(layers=1, launch=0.01, linear_token=1e-6)  # the weights are read once
DEAR_ROWS = Costs(layers=1, linear_token=0.01)


class Sure(Seer):
    """Proposes right tokens alone, of one grade."""

    def propose(self, count: int) -> Proposal:
        first = len(self._output)
        return Proposal(np.array(self._right[first : first + count], np.int32), 1)


def replica(costs: Costs = FREE_ROWS, cache: CacheConfig = CACHE, **settings) -> Replica:
    made = Replica(dataclasses.replace(CONFIG, **settings), cache, costs=costs)
    drafting = made.scheduler.packer.drafting
    drafting.drafter = EachAlone(1, lambda prompt, output: Sure(made, output))
    return made


def checked(made: Replica) -> list[int]:
    """Numbers of proposed tokens that steps check, from now on."""
    counts: list[int] = []
    made.scheduler.bus.subscribe(DraftsChecked, lambda event: counts.append(len(event.right)))
    return counts


def test_steps_check_many_where_rows_cost_little():
    made = replica()
    made.add([1, 2, 3], max_tokens=60, ignore_eos=True)
    counts = checked(made)
    steps = made.drain()
    assert max(counts) == 6 and steps < 25
    made.check_answers()


def test_steps_check_nothing_where_rows_cost_what_a_step_does():
    made = replica(DEAR_ROWS)
    made.add([1, 2, 3], max_tokens=60, ignore_eos=True)
    counts = checked(made)
    made.drain()
    assert not counts


def test_steps_check_what_is_likely_where_costs_are_not_known():
    made = replica(NOMINAL)
    made.add([1, 2, 3], max_tokens=60, ignore_eos=True)
    counts = checked(made)
    made.drain()
    assert counts[0] < max(counts) == 6, "it learns that all are right"


def test_rows_are_those_that_decodes_leave():
    made = replica()
    for number in range(7):
        made.add([number, 2, 3], max_tokens=40, ignore_eos=True)
    counts = checked(made)
    made.drain()
    assert set(counts[:5]) == {1}
    made.check_answers()


def test_a_step_that_takes_all_that_objectives_leave_checks_nothing():
    costs = dataclasses.replace(FREE_ROWS, linear_token=1e-3)
    rest = dict(chunking="adaptive", policy="slack", step_time=0.03, chunk_tokens=64, min_chunk=1)
    made = replica(costs, tpot=0.03, **rest)
    made.add([1, 2, 3], max_tokens=60, ignore_eos=True)
    made.step()
    made.add([1] * 200, max_tokens=2, ignore_eos=True)
    counts = checked(made)
    while made.scheduler.slots.prefilling or made.scheduler.slots.queue:
        batch = made.step()
        assert batch.seconds <= 0.031
        ends = not made.scheduler.slots.prefilling  # a rest, which leaves room
        assert ends or len(batch.drafts) <= 1
    beside = len(counts)
    made.drain()
    assert max(counts[beside:]) == 6
    made.check_answers()


def test_pages_that_others_may_need_are_not_taken():
    made = replica(cache=CacheConfig(block_size=4, pages=9))
    for number in range(2):
        made.add([number, 2, 3], max_tokens=12, ignore_eos=True)
    made.drain()
    assert made.scheduler.slots.preemptions == 0
    made.check_answers()


@pytest.mark.parametrize("tokens", [1, 2, 6])
def test_no_token_is_proposed_behind_the_last(tokens):
    made = replica(draft_tokens=6)
    made.add([1, 2, 3], max_tokens=tokens, ignore_eos=True)
    counts = checked(made)
    made.drain()
    assert sum(counts) <= max(tokens - 2, 0)
    made.check_answers()


class Reader(Sure):
    """Proposes right tokens once they are wanted, after `once` seconds for the text."""

    waits = True
    first_rates = np.ones(1)

    def __init__(self, made: Replica, once: float):
        self._made = made
        self._once = once

    def begin(self, sequence) -> Reader:
        one = Reader(self._made, self._once)
        Sure.__init__(one, self._made, sequence.output)
        return one

    def offer(self, count: int) -> Offer:
        return Offer(count, 1, once=self._once)

    def seconds(self, sequences: int, tokens: int) -> float:
        return 0.0

    def make(self, wanted: list[Wanted], seconds: float) -> list[np.ndarray]:
        return [source.propose(size).tokens for source, size in wanted]


@pytest.mark.parametrize(("tokens", "worth"), [(60, True), (12, False)])
def test_a_text_is_taken_in_where_enough_tokens_are_to_come_of_it(tokens, worth):
    made = replica()
    made.scheduler.propose_by(Reader(made, once=0.2))  # twenty steps of one token
    made.add([1, 2, 3], max_tokens=tokens, ignore_eos=True)
    counts = checked(made)
    made.drain()
    assert bool(counts) == worth
    made.check_answers()
