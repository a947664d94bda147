"""Models with recurrent states: where their checkpoints are left, and which prompts go on from
them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxserve.api.events import Finished, Token
from jaxserve.costs.coefficients import Costs
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig
from tests.scheduling.fakes import Replica

SIZE = 4
PAGES = 3  # of a checkpoint
CONFIG = SchedulerConfig(max_seqs=4, chunk_tokens=64)
CACHE = CacheConfig(block_size=SIZE, pages=400, checkpoint_tokens=1000)
ASKED = dict(max_tokens=4, ignore_eos=True)


def make(config=CONFIG, costs: Costs | None = None, lanes: int = 1, **cache) -> Replica:
    settings = {} if costs is None else {"costs": costs}
    return Replica(
        config,
        dataclasses.replace(CACHE, **cache),
        MeshConfig(kvp=lanes),
        state_pages=PAGES,
        **settings,
    )


def cached(replica: Replica, prompt: list[int], **sampling) -> int:
    """Prompt tokens that were not computed when this prompt was answered alone."""
    id = replica.add(prompt, **(ASKED | sampling))
    replica.drain()
    replica.check_answers()
    return replica.heard[id][-1].usage.cached


def some(first: int, count: int) -> list[int]:
    return [(first + 5 * number) % 12 for number in range(count)]


def test_the_second_prompt_leaves_a_checkpoint_where_it_met_the_first_and_the_third_takes_it():
    replica = make()
    system = some(1, 22)
    found = [cached(replica, system + some(tail, 9)) for tail in range(4)]
    assert found == [0, 0, 20, 20]
    assert replica.device.restored == 2


def test_a_chunk_ends_for_a_checkpoint_only_where_a_step_costs_less_than_its_tokens():
    dear = Costs(layers=1, launch=1.0, linear_token=0.01)
    replica = make(costs=dear)
    system = some(1, 40)
    assert [cached(replica, system + some(tail, 9)) for tail in range(4)] == [0] * 4
    system = some(2, 400)
    assert [cached(replica, system + some(tail, 9)) for tail in range(4)] == [0, 0, 400, 400]


def test_long_prompts_and_answers_leave_a_checkpoint_every_so_many_tokens():
    replica = make(SchedulerConfig(max_seqs=4, chunk_tokens=30), checkpoint_tokens=20)
    document = some(1, 100)
    assert cached(replica, document, max_tokens=40) == 0
    # chunks of 30 end with a full block; what is generated goes on from there
    assert cached(replica, document[:30] + some(3, 30)) == 28
    answer = [event.id for event in replica.heard["r0"] if isinstance(event, Token)]
    again = cached(replica, document + answer + some(2, 9))
    assert 120 <= again < 140 and again % SIZE == 0


def test_further_completions_go_on_from_the_prompt_of_the_first():
    replica = make()
    id = replica.add(some(1, 30), n=3, **ASKED)
    replica.drain()
    replica.check_answers()
    assert replica.device.restored == 2
    ends = [event for event in replica.heard[id] if isinstance(event, Finished)]
    assert [end.usage.cached for end in ends] == [0, 28, 28]


def test_a_preempted_sequence_goes_on_from_its_last_checkpoint():
    config = dataclasses.replace(CONFIG, decode_reserve=0.0)
    replica = make(config, pages=48, checkpoint_tokens=8)
    for first in range(3):
        replica.add(some(first, 30), max_tokens=60, ignore_eos=True)
    replica.drain()
    replica.check_answers()
    assert replica.scheduler.slots.preemptions and replica.device.restored


def test_an_evicted_part_takes_the_whole_checkpoint_with_it():
    replica = make()
    system = some(1, 22)
    assert [cached(replica, system + some(tail, 9)) for tail in range(3)] == [0, 0, 20]
    seen = replica.cache.published.seen
    key = replica.cache.block_hashes("", lambda a, b: np.array(system[a:b], np.int32))[4]
    pages = seen.checkpoint(key)
    replica.cache.pages.retract([pages[1]])
    assert not seen.checkpoint(key)
    assert cached(replica, system + some(5, 9)) == 0
    assert cached(replica, system + some(6, 9)) == 20


@pytest.mark.parametrize("lanes", [2, 4])
def test_a_sequence_runs_on_the_lane_that_has_its_state(lanes):
    replica = make(lanes=lanes)
    system = some(1, 22)
    ids = []
    for tail in range(12):
        ids.append(replica.add(system + some(tail, 9), **ASKED))
        if tail < 2:
            replica.drain()
    replica.drain()
    replica.check_answers()
    found = [replica.heard[id][-1].usage.cached for id in ids]
    assert found == [0, 0] + [20] * 10


@pytest.mark.parametrize("left", range(PAGES + 2))
def test_a_prompt_that_takes_all_pages_is_not_in_the_way_of_itself(left):
    """Where it has no room beside the checkpoint that it found, it is computed."""
    replica = make(pages=32)
    system = some(1, 22)
    assert [cached(replica, system + some(tail, 9)) for tail in range(3)] == [0, 0, 20]
    blocks = 32 - left
    prompt = system + some(5, blocks * SIZE - len(system) - ASKED["max_tokens"] + 1)
    assert cached(replica, prompt) == (20 if left >= PAGES else 0)
