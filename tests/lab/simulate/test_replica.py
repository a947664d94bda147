"""The virtual replica: virtual time against time worked by hand, and what holds whatever arrives,
under every policy.

Unless said otherwise a step takes 10 ms per token and nothing else, on one stage; chunks have 64
tokens at most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxserve.api.request import Request, Slo
from jaxserve.cache import CacheManager
from jaxserve.costs.coefficients import Costs
from jaxserve.costs.predictor import Predictor
from jaxserve.lab.simulate.arrival import Arrival, to_request
from jaxserve.lab.simulate.recorder import Recorder, RequestRecord
from jaxserve.lab.simulate.replica import VirtualReplica
from jaxserve.lab.simulate.run import drive, execute, requests
from jaxserve.policies import POLICIES
from jaxserve.scheduling import Batch, Scheduler
from jaxserve.scheduling.budget import CHUNKING
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig
from tests.examples import examples

TOKEN = Costs(layers=1, linear_token=0.01)
STEP = Costs(layers=1, launch=1.0)  # a step takes a second in every stage, whatever it does
ONE = MeshConfig()
MAX_LEN = 2**30


class Watched(Scheduler):
    """Checks its invariants after every event and keeps what it issued."""

    def __init__(self, *settings, **more):
        super().__init__(*settings, **more)
        self.batches: list[Batch] = []

    def start(self, now: float) -> Batch | None:
        batch = super().start(now)
        self.check()
        self.batches += [batch] if batch else []
        return batch

    def interrupt(self, begins: float, now: float) -> Batch | None:
        batch = super().interrupt(begins, now)
        self.check()
        return batch

    def finish(self, *outcome, **more):
        events = super().finish(*outcome, **more)
        self.check()
        return events


def made(
    costs: Costs = TOKEN,
    mesh: MeshConfig = ONE,
    lookahead: int = 0,
    pages: int = 1000,
    scheduler: type[Scheduler] = Scheduler,
    prefix_caching: bool = False,
    layer_groups: int = 1,
    **settings_,
) -> VirtualReplica:
    config = SchedulerConfig(**{"chunking": "static", "chunk_tokens": 64, **settings_})
    cache = CacheConfig(16, pages, prefix_caching=prefix_caching)
    manager = CacheManager(cache, mesh.kvp, config.max_seqs)
    return VirtualReplica(
        scheduler(
            config,
            manager,
            mesh,
            MAX_LEN,
            costs=dataclasses.replace(costs, layer_groups=layer_groups),
        ),
        cache,
        mesh,
        lookahead,
    )


def record(replica: VirtualReplica, *arrivals: tuple[float, int, int] | Arrival) -> Recorder:
    """Runs arrivals, (time, prompt, output); records by number."""
    coming = [
        arrival if isinstance(arrival, Arrival) else Arrival(*arrival) for arrival in arrivals
    ]
    found = drive(replica, requests(coming, MAX_LEN, Slo()), keep_steps=True)
    found.records.sort(key=lambda record: int(record.id))
    return found


def play(
    replica: VirtualReplica, *arrivals: tuple[float, int, int] | Arrival
) -> list[RequestRecord]:
    """Records by number, of (time, prompt, output)."""
    return record(replica, *arrivals).records


def times(records: Iterable[RequestRecord]) -> list[tuple[float, float]]:
    """(first token, end), rounded to a microsecond."""
    return [(round(record.first, 6), round(record.end, 6)) for record in records]


# --- by hand


def test_a_request_alone():
    """100 tokens in chunks of 64 and 36, then two decodes."""
    found = record(made(), (2.0, 100, 3))
    (only,) = found.records
    assert times([only]) == [(3.0, 3.02)]
    assert (
        only.kind,
        only.prompt,
        only.output,
        only.cached,
        only.arrival,
        only.reason,
    ) == ("short", 100, 3, 0, 2.0, "length")
    assert (round(only.ttft, 6), round(only.tpot, 6)) == (1.0, 0.01)
    assert [(step.decodes, step.chunks) for step in found.steps] == [
        (0, ((0, 0, 64),)),
        (0, ((0, 64, 36),)),
        (1, ()),
        (1, ()),
    ]


def test_a_second_request_joins_the_step_after_it_came():
    """Steps: 64 and 36 tokens of the first; a decode and 10 tokens of the second, 0.11 s; two
    decodes; nothing of the first is left."""
    assert times(play(made(), (0.0, 100, 3), (0.7, 10, 3))) == [(1.0, 1.13), (1.11, 1.14)]


@pytest.mark.parametrize(
    "came, lookahead, second",
    [
        (0.70, 0, (1.11, 1.13)),
        (0.97, 0, (1.11, 1.13)),
        (0.70, 1, (1.11, 1.13)),
        (0.96, 1, (1.11, 1.13)),
        (0.97, 1, (1.12, 1.14)),
    ],
)
def test_a_step_ahead_is_decided_shortly_before_the_stages_are_free(came, lookahead, second):
    """The step of 0.36 s before 1.0 has its successor issued 3 ms and a tenth of it earlier, at
    0.961: who comes later joins the next."""
    assert times(play(made(lookahead=lookahead), (0.0, 100, 4), (came, 10, 2))) == [
        (1.0, 1.14),
        second,
    ]


def test_three_requests_first_come_first_served():
    """A step has room for one tile of 64 rows: 64, 64 and 22 tokens of the first, then a decode
    beside 5 of the next, twice, and one."""
    records = play(made(policy="fcfs"), (0.0, 150, 2), (0.1, 5, 3), (0.2, 5, 1))
    assert times(records) == [(1.5, 1.56), (1.56, 1.63), (1.62, 1.62)]


def test_a_replica_that_rests_begins_when_the_next_request_comes():
    found = record(made(), (0.0, 10, 1), (5.0, 10, 1))
    assert times(found.records) == [(0.1, 0.1), (5.1, 5.1)]
    assert found.busy == pytest.approx(0.2) and [step.start for step in found.steps] == [0.0, 5.0]


def test_gaps_are_the_seconds_between_the_tokens_of_a_sequence():
    found = record(made(), (0.0, 100, 3), (0.7, 10, 3))
    # the first's two, the second's two
    assert np.concatenate(found.gaps).tolist() == pytest.approx([0.11, 0.02, 0.02, 0.01])


def test_a_prefix_that_was_computed_is_not_computed_again():
    ids = (1,)
    records = play(
        made(prefix_caching=True), Arrival(0.0, 64, 1, blocks=ids), Arrival(10.0, 80, 1, blocks=ids)
    )
    assert times(records) == [(0.64, 0.64), (10.16, 10.16)] and records[1].cached == 64


def test_each_request_is_due_when_its_objective_says():
    """An objective of its own; else 2 s or, for a long prompt, 3 times its prefill alone."""
    assert [record.due for record in play(made(), (0.0, 10, 1), (1.0, 1024, 1))] == pytest.approx(
        [2.0, 1.0 + 30.72]
    )
    for ttft, due in ((17.0, 18.0), (7.0, 11.08)):  # never before it could be there alone
        (record,) = execute(made(), [Arrival(1.0, 1000, 1)], Slo(ttft=ttft)).records
        assert record.due == pytest.approx(due)


# --- stages


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_chunks_follow_each_other_through_the_stages(stages, lookahead):
    """64 chunks on P stages take 64 + P - 1 steps (Medha 3.3)."""
    found = record(made(STEP, MeshConfig(spp=stages), lookahead, chunk_tokens=8), (0.0, 512, 1))
    assert times(found.records) == [(64 + stages - 1, 64 + stages - 1)]
    assert found.busy == 64


@pytest.mark.parametrize("stages", [2, 4])
def test_decodes_run_beside_a_prefill_and_do_not_lengthen_it(stages):
    replica = made(STEP, MeshConfig(spp=stages), chunk_tokens=8)
    found = record(replica, (0.0, 8 * stages, 40), (0.5, 512, 1))
    assert found.records[1].first == stages + 64 + stages - 1
    assert sum(step.decodes for step in found.steps if step.chunks) == 64 // stages


def test_hops_are_paid_between_stages_and_overlap_with_the_next_chunk():
    replica = made(
        Costs(layers=4, launch=1.0, hop=0.5, hop_token=0.125), MeshConfig(spp=4), chunk_tokens=8
    )
    assert times(play(replica, (0.0, 32, 1))) == [(4 + 3 + 3 * 1.5, 4 + 3 + 3 * 1.5)]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_decode_alone_takes_all_stages_for_every_token(lookahead):
    """The next token needs the last one: stages do not make a lone decode faster."""
    found = record(made(STEP, MeshConfig(spp=4), lookahead), (0.0, 1, 5))
    assert times(found.records) == [(4.0, 20.0)]
    assert np.concatenate(found.gaps).tolist() == [4.0] * 4


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_with_a_sequence_per_stage_every_step_puts_out_a_token(stages):
    """Each has a token every P steps."""
    replica = made(STEP, MeshConfig(spp=stages), max_seqs=stages)
    found = record(replica, *((0.0, 64, 20) for _ in range(stages)))
    settled = np.concatenate(found.gaps[4 * stages : 12 * stages])
    assert settled.tolist() == [stages] * 8 * stages


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_a_prompt_does_not_wait_for_steps_that_a_lone_decode_was_issued_ahead(stages, lookahead):
    """Its own way through the stages, after a token's that was begun and at most one more."""
    replica = made(STEP, MeshConfig(spp=stages), lookahead)
    records = play(replica, (0.0, 1, 100), (40.5, 10, 1))
    assert records[1].ttft <= 3 * stages


# --- late decisions


def compared(arrivals: list, costs: Costs, mesh: MeshConfig, **settings) -> list[Recorder]:
    """Runs arrivals without a step ahead, and with one that is decided late."""
    return [
        record(
            made(costs, mesh, lookahead, max_seqs=32, step_time=0.65, **settings),
            *arrivals,
        )
        for lookahead in (0, 1)
    ]


LATE = given(
    seed=st.integers(0, 2**16),
    gap=st.sampled_from([0.05, 0.3, 1.0, 3.0]),
    policy=st.sampled_from(sorted(POLICIES)),
    chunking=st.sampled_from(sorted(CHUNKING)),
)


@settings(max_examples=examples(40), deadline=None)
@LATE
def test_a_step_decided_late_makes_no_stage_wait(seed, gap, policy, chunking):
    """Work is not delayed by a late decision: if steps take what their tokens take, and nothing
    else, work is never longer for being split otherwise: what is done with a step ahead ends when
    it does without."""
    arrivals = mixed(np.random.default_rng(seed), 25, gap, 600)
    at_once, late = compared(arrivals, TOKEN, ONE, policy=policy, chunking=chunking)
    assert late.steps[-1].end == pytest.approx(
        at_once.steps[-1].end
    ) and late.busy == pytest.approx(at_once.busy)


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**16),
    gap=st.sampled_from([0.05, 0.3, 1.0, 3.0]),
    policy=st.sampled_from(sorted(POLICIES)),
    chunking=st.sampled_from(sorted(CHUNKING)),
    launch=st.sampled_from([0.0, 0.2]),
    stages=st.sampled_from([1, 1, 2, 4]),
)
def test_the_first_stage_rests_only_where_nobody_can_be_prefilled(
    seed, gap, policy, chunking, launch, stages
):
    """A step ahead of the stages begins when the one before has left the first stage, unless all
    that came has ended. With several stages, unless all that came has been prefilled, or the step
    waits for tokens to feed, or as many are on their way as may be."""
    arrivals = mixed(np.random.default_rng(seed), 25, gap, 600)
    _, late = compared(
        arrivals,
        Costs(layers=1, launch=launch, linear_token=0.01),
        MeshConfig(spp=stages),
        policy=policy,
        chunking=chunking,
    )
    begun = {
        int(record.id): (record.arrival, record.end if stages == 1 else None)
        for record in late.records
    }
    # when its last chunk began
    prefilled = {seq: step.start for step in late.steps for seq, _, _ in step.chunks}
    for count, (step, after) in enumerate(zip(late.steps, late.steps[1:]), 1):
        free = step.start + step.pace
        if after.start > free + 1e-9 and (stages == 1 or not after.decodes):
            waiting = [
                seq
                for seq, (arrival, end) in begun.items()
                if arrival < after.start - 1e-9
                and (prefilled[seq] if end is None else end) > free + 1e-9
            ]
            flying = sum(other.end > free + 1e-9 for other in late.steps[:count])
            assert not waiting or flying > stages, f"{waiting} wait from {free} to {after.start}"


BESIDE = st.lists(
    st.tuples(st.just(0.0), st.integers(1, 40), st.integers(50, 200)), min_size=1, max_size=4
)


@settings(max_examples=examples(80), deadline=None)
@given(
    beside=BESIDE,
    long=st.integers(100, 2000),
    part=st.floats(0.01, 1),
    prompt=st.integers(1, 60),
    costs=st.sampled_from(
        [
            (TOKEN, 1),
            (Costs(layers=1, launch=0.2, linear_token=0.01), 1),
            (STEP, 1),
            (STEP, 2),
            (STEP, 4),
        ]
    ),
    policy=st.sampled_from(sorted(POLICIES)),
    chunking=st.sampled_from(sorted(CHUNKING)),
)
@example(
    # when a step ahead is decided, one more of the tokens that it could wait for is on its way
    beside=[(0.0, 1, 50)] * 4,
    long=100,
    part=0.09375,
    prompt=1,
    costs=(STEP, 4),
    policy="edf",
    chunking="adaptive",
)
def test_who_comes_before_a_step_is_decided_late_hears_as_soon_as_without_a_step_ahead(
    beside, long, part, prompt, costs, policy, chunking
):
    """Who comes after that, one step later at most. By slack also others, since the order depends
    on when it is asked for; beside paced decodes too, since so does what a step may take."""
    costs, mesh = costs[0], MeshConfig(spp=costs[1])
    arrival = part * 20 * (1 if costs.linear_token else 10)
    at_once, late = compared(
        [*beside, (0.0, long, 2), (arrival, prompt, 1)],
        costs,
        mesh,
        policy=policy,
        chunking=chunking,
    )
    first, then = (
        next(record.ttft for record in found.records if record.arrival == arrival)
        for found in (at_once, late)
    )
    assert then <= first + max(step.end - step.start for step in at_once.steps + late.steps) + 1e-9
    early = Predictor(costs, mesh).early
    free = [(step.start + step.pace, early(step.pace)) for step in late.steps]
    decided = any(-1e-9 <= end - arrival <= ahead + 1e-9 for end, ahead in free)
    depends = "slack" in policy or chunking == "adaptive"
    assert decided or depends or then == pytest.approx(first)


# --- ends


def test_every_request_ends_once_with_what_was_asked():
    arrivals = [Arrival(0.1 * n, 1 + 37 * n % 300, 1 + n % 5) for n in range(40)]
    records = play(made(max_seqs=4), *arrivals)
    assert [(r.id, r.prompt, r.output, r.arrival, r.reason) for r in records] == [
        (str(n), a.prompt, a.output, a.time, "length") for n, a in enumerate(arrivals)
    ]
    assert all(r.arrival < r.first <= r.end for r in records)


def test_what_cannot_be_served_is_refused_and_the_others_are_served():
    """The cache holds 4 pages of 16 tokens."""
    records = play(made(pages=4), (0.0, 64, 1), (0.0, 65, 1), (0.0, 60, 9), (0.5, 16, 1))
    assert [record.reason for record in records] == ["length", "refused", "refused", "length"]
    refused = records[1]
    assert (refused.output, refused.arrival, refused.first, refused.end) == (0, 0.0, 0.0, 0.0)


def test_a_full_queue_refuses():
    records = play(made(max_seqs=1, max_queue=2), *((0.0, 10, 2) for _ in range(5)))
    assert [record.reason for record in records] == ["length"] * 3 + ["refused"] * 2


def test_what_has_not_ended_by_a_moment_is_given_up():
    """At 1.015 the first has put out two tokens, the second is not begun; the third would come
    later."""
    replica = made(max_seqs=1)
    arrivals = [Arrival(at, 100, 9, "kind") for at in (0.0, 0.5, 2.0)]
    first, second = execute(replica, arrivals, until=1.015).records
    assert (first.reason, first.output, times([first])) == ("unfinished", 2, [(1.0, 1.015)])
    assert (second.reason, second.output, second.kind) == ("unfinished", 0, "kind")
    # only what a step in flight still holds
    assert not replica.scheduler.sequences or replica.scheduler.slots.running


def test_what_a_run_gives_up_ends_when_the_run_does():
    (record,) = execute(made(), [Arrival(0.0, 100, 500)], until=2.0).records
    assert record.reason == "unfinished" and record.first < record.end == 2.0


def test_the_same_arrivals_give_the_same_run():
    arrivals = mixed(np.random.default_rng(3), 60, 0.3)
    one, other = (
        made(lookahead=1, policy="slack", chunking="adaptive", max_seqs=8) for _ in range(2)
    )
    first, second = record(one, *arrivals), record(other, *arrivals)
    assert first.records == second.records and first.steps == second.steps


# --- whatever arrives


def mixed(dice: np.random.Generator, count: int, gap: float, most: int = 2000) -> list[Arrival]:
    """Mostly short prompts, a tenth of them long."""
    at = np.cumsum(dice.exponential(gap, count)).tolist()
    prompts = np.where(
        dice.random(count) < 0.1, dice.integers(most // 2, most, count), dice.integers(1, 80, count)
    ).tolist()
    return [Arrival(*row) for row in zip(at, prompts, dice.integers(1, 20, count).tolist())]


MESHES = st.builds(MeshConfig, spp=st.integers(1, 4), kvp=st.integers(1, 3))


@settings(max_examples=examples(40), deadline=None)
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    chunking=st.sampled_from(sorted(CHUNKING)),
    mesh=MESHES,
    seed=st.integers(0, 2**16),
    lookahead=st.integers(0, 3),
    pages=st.integers(70, 200),
    slots=st.integers(1, 12),
    gap=st.sampled_from([0.0, 0.1, 1.0]),
    groups=st.sampled_from([1, 1, 2, 5]),
)
def test_invariants_hold_and_nothing_starves(
    policy, chunking, mesh, seed, lookahead, pages, slots, gap, groups
):
    """Under load that never ends while it lasts, with little memory: every request ends once, with
    all its tokens."""
    replica = made(
        Costs(layers=4, launch=0.001, linear_token=1e-4, pair=1e-8, kvp=1e-4, hop=1e-4),
        mesh,
        lookahead,
        pages,
        Watched,
        True,
        groups,
        policy=policy,
        chunking=chunking,
        max_seqs=slots,
        ttft=0.5,
        tpot=0.02,
        step_time=0.05,
    )
    arrivals = mixed(np.random.default_rng(seed), 25, gap, 1000)
    found = record(replica, *arrivals)
    records = found.records
    assert [(record.id, record.output, record.reason) for record in records] == [
        (str(number), arrival.output, "length") for number, arrival in enumerate(arrivals)
    ]
    assert all(record.arrival < record.first <= record.end for record in records)
    assert not replica.scheduler.sequences
    starts = [step.start for step in found.steps]
    assert starts == sorted(starts) and all(step.end > step.start for step in found.steps)


@pytest.mark.parametrize("chunking", sorted(CHUNKING))
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_long_prompt_ends_among_short_ones_that_never_stop_coming(policy, chunking):
    """5,000 tokens (50 s) under shorts of 1.5 s that come every 2 s, for 300 s."""
    replica = made(
        policy=policy, chunking=chunking, max_seqs=16, ttft=5.0, step_time=0.65, tpot=1.0
    )
    records = play(replica, (0.0, 5000, 1), *((1.0 + 2 * n, 150, 1) for n in range(150)))
    assert records[0].first < 300 and len(records) == 151


@pytest.mark.parametrize("chunking", sorted(CHUNKING))
def test_every_decode_is_part_of_every_step(chunking):
    replica = made(
        policy="slack",
        chunking=chunking,
        max_seqs=32,
        lookahead=1,
        scheduler=Watched,
        ttft=1.0,
        tpot=0.4,
    )
    found = record(replica, *mixed(np.random.default_rng(5), 80, 0.5))
    ends = np.array([step.end for step in found.steps])
    for before, after, gaps in zip(ends, ends[1:], found.gaps[1:]):
        assert gaps == pytest.approx(after - before)
    assert sum(map(len, found.gaps)) > 400


@pytest.mark.parametrize("stages", [2, 4])
def test_with_stages_every_decode_runs_in_one_of_so_many_steps(stages):
    """A batch takes a P-th of the decodes, those that have waited longest: every P-th step, and up
    to P - 1 steps later where others have ended, until those of one batch are spread over P."""
    replica = made(
        mesh=MeshConfig(spp=stages), policy="slack", max_seqs=32, lookahead=1, scheduler=Watched
    )
    play(replica, *mixed(np.random.default_rng(5), 80, 0.5))
    last: dict[int, int] = {}
    waits = []
    for batch in replica.scheduler.batches:
        for seq, feed, sample in zip(
            batch.seq.tolist(), batch.is_decode.tolist(), batch.sample.tolist()
        ):
            waits += [batch.number - last[seq]] if feed else []
            if sample:
                last[seq] = batch.number
    assert (
        len(waits) > 400
        and max(waits) <= 2 * stages - 1
        and min(waits) >= 1
        and np.mean(waits) < stages + 0.1
    )


# --- objectives


def asked(*wishes: tuple[float, int, int, float]) -> list[tuple[Request, str]]:
    """Requests of (arrival, prompt, output, seconds to the first token)."""
    ordered = sorted(wishes)
    return [
        (to_request(Arrival(*wish[:3]), number, MAX_LEN, Slo(ttft=wish[3])), "")
        for number, wish in enumerate(ordered)
    ]


def missed(replica: VirtualReplica, requests: list[tuple[Request, str]]) -> set[int]:
    """Numbers of those whose first token came after it was due."""
    records = drive(replica, requests).records
    assert len(records) == len(requests)
    return {int(record.id) for record in records if record.first > record.due + 1e-9}


# 20, 15 and 9 s of work
HOPELESS = [(0.0, 2000, 1, 10.0), (0.01, 1500, 1, 8.0), (3.0, 900, 1, 5.0)]
SHORT = [(0.2 + 1.5 * n, 50, 1, 2.5) for n in range(20)]  # half a second of work each


@pytest.mark.parametrize("sharing", [0.8, 0.95])
def test_none_is_late_for_those_that_cannot_be_in_time(sharing):
    """Shorts take a third of the time, and each could be in time; the hopeless ones are late
    without them. Where prompts share steps they take what is left, also when they have waited so
    long that they go first."""
    replica = made(
        policy="slack", chunking="adaptive", max_seqs=64, step_time=0.65, sharing=sharing
    )
    requests = asked(*HOPELESS, *SHORT)
    assert missed(replica, requests) == {
        number for number, (request, _) in enumerate(requests) if len(request.prompt) > 50
    }


def test_an_absurd_objective_does_not_go_before_everybody():
    """20 s of work, asked for in 1 ms: it has its turn once it has waited, and some that are not
    much shorter than what is left of it wait for its end."""
    requests = asked((0.0, 2000, 1, 0.001), *SHORT)
    late = missed(made(policy="slack", chunking="adaptive", max_seqs=64, step_time=0.65), requests)
    assert 0 in late and len(late) <= 3


@pytest.mark.parametrize("policy", ["fcfs", "edf", "llf"])
def test_other_policies_let_the_hopeless_block_the_rest(policy):
    assert (
        len(missed(made(policy=policy, max_seqs=64), asked(*HOPELESS, *SHORT))) > len(HOPELESS) + 3
    )


def test_a_long_one_with_time_does_not_make_a_short_one_late_and_is_in_time_itself():
    """20 s of work in 60 s; shorts take a half of the time."""
    wishes = [(0.0, 2000, 1, 60.0), *((0.1 + n, 50, 1, 1.7) for n in range(50))]
    assert (
        missed(
            made(policy="slack", chunking="adaptive", max_seqs=64, step_time=0.65), asked(*wishes)
        )
        == set()
    )
    assert missed(made(policy="fcfs", max_seqs=64), asked(*wishes))


def test_of_two_that_have_time_the_one_with_less_of_its_share_left_goes_first():
    """Both need 10 s. The second came later with an earlier deadline; first come, first served
    would make it late."""
    wishes = (0.0, 1000, 1, 40.0), (1.0, 1000, 1, 12.0)
    assert missed(made(policy="slack", step_time=0.65), asked(*wishes)) == set()
    assert missed(made(policy="fcfs"), asked(*wishes)) == {1}


QUADRATIC = Costs(layers=2, launch=0.002, linear_token=2e-5, pair=2e-9, decode_seq=1e-3)


@pytest.mark.parametrize("tpot", [0.03, 0.06, 0.1])
@pytest.mark.parametrize("stages", [1, 2])
def test_adaptive_chunks_keep_every_gap_within_the_objective(tpot, stages):
    """A decode whose gaps are limited has each token within that, whatever is prefilled beside it;
    the later a chunk, the more it attends to. With stages one token is late, by half of the time at
    most: the one that was on its way when the prompt came."""
    replica = made(
        QUADRATIC,
        MeshConfig(spp=stages),
        pages=4000,
        chunking="adaptive",
        chunk_tokens=4096,
        tpot=tpot,
        tbt=tpot,
        max_seqs=8,
    )
    found = record(replica, (0.0, 10, 400), (0.5, 16_000, 2))
    short, long = found.records
    assert long.first < short.end, "both at once"
    gaps = np.concatenate(found.gaps)
    late = gaps[gaps > tpot * (1.02 if stages > 1 else 1 + 1e-9)]
    assert len(late) <= stages - 1 and gaps.max() <= 1.5 * tpot and (gaps > 0.9 * tpot).any()
    lengths = [length for step in found.steps for seq, _, length in step.chunks if seq == 1]
    assert lengths[0] > 1.5 * lengths[-2]


def test_a_fixed_chunk_blocks_decodes_for_as_long_as_it_takes():
    """The longest is the fourth chunk's: 4096 tokens after 3 * 4096 others, in two layers."""
    replica = made(QUADRATIC, pages=4000, chunking="static", chunk_tokens=4096, tpot=0.03)
    found = record(replica, (0.0, 10, 400), (0.5, 4 * 4096, 2))
    fourth = 0.002 + 2 * (2e-5 * 4097 + 2e-9 * (3.5 * 4096) * 4096 + 1e-3)
    assert np.concatenate(found.gaps).max() == pytest.approx(fourth) and fourth > 10 * 0.03


def test_where_not_even_a_tile_fits_the_prompt_still_goes_on():
    """A step takes twice the objective with nothing in it: chunks are one tile."""
    replica = made(Costs(layers=1, launch=0.2), chunking="adaptive", tpot=0.1)
    found = record(replica, (0.0, 10, 30), (0.1, 640, 1))
    assert found.records[1].reason == "length" and {
        length for step in found.steps for seq, _, length in step.chunks if seq == 1
    } == {64}
