"""Who gets pages: large prompts and small ones among 128 pages of 4 tokens, unless said otherwise.

There a prompt is large from 9 tokens (3 pages) on, and 16 pages, an eighth, are those of the small
ones. Requests come first, are served first. All are added at once; a request puts out its first
token in the step that prefills the last of its prompt.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxserve.api.request import Request, Slo
from jaxserve.api.sampling import SamplingParams
from jaxserve.cache import NO_MATCH, CacheManager, PrefixMatch
from jaxserve.cache.hashes import BlockHashes
from jaxserve.costs.coefficients import Costs
from jaxserve.lab.simulate.arrival import Arrival, to_request
from jaxserve.lab.simulate.run import drive
from jaxserve.policies import POLICIES
from jaxserve.scheduling import Batch, Scheduler
from jaxserve.scheduling.batch_reader import StepResults
from jaxserve.scheduling.budget import CHUNKING
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slots import LEAVING
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig
from tests.examples import examples
from tests.lab.simulate.test_replica import Watched, made
from tests.scheduling.fakes import Replica, chunks

PAGES = 128
SIZE = 4
# pages that are left to small prompts, pages that a small prompt has at most
EIGHTH = PAGES // 8
SMALL = PAGES // 64


def cache(pages: int = PAGES, prefix_caching: bool = False, **settings) -> Replica:
    config = SchedulerConfig(**{"max_seqs": 64, "chunk_tokens": 4096, **settings})
    return Replica(config, CacheConfig(block_size=SIZE, pages=pages, prefix_caching=prefix_caching))


def ask(replica: Replica, *pages: int, steps: int = 1) -> None:
    """Requests whose prompts fill so many pages but for `steps` - 1 tokens, which they put out
    besides the last: they hold no other pages, for so many steps."""
    for need in pages:
        replica.add([need % 12] * (SIZE * need - steps + 1), max_tokens=steps, ignore_eos=True)


def entered(batch: Batch) -> list[int]:
    """Numbers of those that got their pages in this batch."""
    return batch.seq[list(batch.admitted)].tolist()


def held(replica: Replica) -> int:
    return replica.cache.counts()[2]


def holding(replica: Replica, pages: int, output: int) -> None:
    """Request 0 holds pages for its prompt, and more for what it puts out."""
    replica.add([1] * SIZE * pages, max_tokens=output, ignore_eos=True)
    assert chunks(replica.step()) == [(0, 0, SIZE * pages, "last")]


# --- large and small


def test_small_prompts_pass_a_large_one_that_waits_until_together_they_hold_an_eighth():
    """The first holds 70 pages and a 71st from the next step on; 57 are free, the second needs 60.
    Of twelve prompts of 2 pages eight pass it, which makes 16; three steps later these have ended,
    and the rest follows."""
    replica = cache()
    holding(replica, 70, output=30)
    ask(replica, 60)
    ask(replica, *[2] * 12, steps=3)
    assert entered(replica.step()) == list(range(2, 10)) and held(replica) == 71 + 16
    assert [entered(replica.step()) for _ in range(2)] == [[], []]
    assert entered(replica.step()) == list(range(10, 14))
    replica.drain()
    replica.check_answers()


def test_a_large_one_comes_in_as_soon_as_there_are_pages_however_many_small_ones_keep_coming():
    """The first ends with its 20th step. Two small ones come before every step, each for three
    steps: they would hold 12 pages."""
    replica = cache()
    holding(replica, 70, output=20)
    ask(replica, 60)
    passed = 0
    for _ in range(19):
        ask(replica, 2, 2, steps=3)
        new = entered(replica.step())
        passed += len(new)
        assert 1 not in new
    assert passed == 38
    ask(replica, 2, 2, steps=3)
    assert entered(replica.step()) == [1, 40, 41]
    replica.drain()
    replica.check_answers()


@pytest.mark.parametrize("small", [1, 2])
@pytest.mark.parametrize("need", [111, 112, 113, 120, 126, 127, 128])
def test_a_large_one_comes_in_once_those_before_it_have_ended_however_much_it_needs(need, small):
    """Six pages of small ones come before every step, each for four steps: 18 pages are held when
    the large one comes, and without it as many for ever. It waits for three steps at most, and
    small ones run beside it as soon as it does, where there are pages for any."""
    replica = cache()
    come = lambda: ask(replica, *[small] * (6 // small), steps=4)
    for _ in range(10):
        come()
        replica.step()
    ask(replica, need)
    large = max(replica.scheduler.sequences)
    assert held(replica) == 18
    for _ in range(4):
        come()
        new = entered(replica.step())
        if large in new:
            break
    assert large in new
    assert (len(new) > 1) == (PAGES - need >= small)
    replica.drain()
    replica.check_answers()


def test_a_large_one_that_is_the_last_to_come_does_not_stop_those_before_it():
    """Forty small ones are there first: they hold 80 pages, five times as many as may pass a large
    one. Others pass it only once less than an eighth is held by small ones."""
    replica = cache()
    ask(replica, *[2] * 40, steps=3)
    ask(replica, 100)
    ask(replica, *[2] * 10, steps=3)
    assert entered(replica.step()) == list(range(40)) and held(replica) == 80
    assert [entered(replica.step()) for _ in range(2)] == [[], []]
    assert entered(replica.step()) == list(range(40, 51))
    replica.drain()
    replica.check_answers()


def test_nobody_among_the_large_passes_one_that_waits():
    """The second waits for 60 pages where 57 are free, the third would need 5. Both come in when
    the first has ended, in their order."""
    replica = cache()
    holding(replica, 70, output=10)
    ask(replica, 60, 5, 3)
    for _ in range(9):
        assert entered(replica.step()) == []
    assert entered(replica.step()) == [1, 2, 3]
    replica.drain()
    replica.check_answers()


def test_nobody_among_the_small_passes_one_that_waits():
    """While the large one waits, small ones hold 15 pages: there is room for one page. The next
    small one needs two, the one after it one, and waits for its turn."""
    replica = cache()
    holding(replica, 70, output=30)
    ask(replica, 60)
    ask(replica, *[2] * 7, 1, 2, 1, steps=4)
    assert entered(replica.step()) == [2, 3, 4, 5, 6, 7, 8, 9]
    assert [entered(replica.step()) for _ in range(3)] == [[]] * 3
    assert entered(replica.step()) == [10, 11]
    replica.drain()
    replica.check_answers()


@pytest.mark.parametrize("second", [4, 2])
def test_nobody_passes_beside_a_long_prompt_either(second):
    """The first needs several steps and can have guests of 20 tokens (5 pages); it needs 40 pages,
    and the next 100. Then come one of 4 or 2 pages and twelve of 2: eight of these may pass."""
    replica = cache(chunking="adaptive", step_time=0.0064, min_chunk=4, sharing=1.0)
    ask(replica, 40, 100, second, *[2] * 12, steps=4)
    replica.now += 1.9
    first = 3 if second > SMALL else 2
    assert entered(replica.step()) == [*range(first, first + 8), 0]


def test_large_ones_leave_an_eighth_to_small_ones():
    """After one of 100 pages there are 28, of which the next large one may have 12."""
    replica = cache()
    ask(replica, 100, 13, *[2] * 8)
    assert entered(replica.step()) == [0, *range(2, 10)] and held(replica) == 0
    replica = cache()
    ask(replica, 100, 12, 3, *[2] * 8)
    assert entered(replica.step()) == [0, 1, *range(3, 11)]


def test_what_small_ones_hold_is_part_of_the_eighth_that_large_ones_leave():
    """A large one holds 60 pages, five small ones 10, and a page is kept for each of these decodes.
    Of the 52 left the next large one leaves 6: it may have 46."""
    for need, comes in ((46, True), (47, False)):
        replica = cache()
        ask(replica, 60, *[2] * 5, steps=4)
        replica.step()
        ask(replica, need)
        assert (entered(replica.step()) == [6]) == comes


def test_a_large_one_leaves_no_eighth_where_it_needs_it_itself():
    replica = cache()
    ask(replica, PAGES, 2)
    assert entered(replica.step()) == [0]
    assert entered(replica.step()) == [1]
    replica = cache()
    ask(replica, PAGES - 3, 2, 2)
    assert entered(replica.step()) == [0, 1]


# --- what is in the prefix cache

DOCUMENT = [2, 3] * (25 * SIZE)  # 50 pages


def beside(pages: int) -> Replica:
    """The document is in the cache, and nobody holds it; request 1 holds so many pages for four
    steps."""
    replica = cache(prefix_caching=True, decode_reserve=0)
    replica.add(DOCUMENT, max_tokens=1)
    replica.drain()
    ask(replica, pages, steps=4)
    replica.step()
    assert replica.cache.counts() == (PAGES - 50 - pages, 50, pages)
    return replica


OTHER = [4] * SIZE


@pytest.mark.parametrize("pages, comes", [(60, True), (61, False)])
def test_a_large_prompt_takes_pages_out_of_the_cache_and_leaves_an_eighth_to_small_ones(
    pages, comes
):
    """The document and a page more are 51 pages, 16 are left to small ones, and one is a
    decode's."""
    replica = beside(pages)
    replica.add(DOCUMENT + OTHER, max_tokens=1)
    assert (entered(replica.step()) == [2]) == comes


@pytest.mark.parametrize(
    "prompt, bypass, comes",
    [
        (DOCUMENT + OTHER, False, True),
        (DOCUMENT + OTHER, True, False),
        (OTHER + DOCUMENT, False, False),
        (DOCUMENT + OTHER * 3, False, False),
    ],
)
def test_a_large_prompt_that_takes_few_pages_need_not_leave_any(prompt, bypass, comes):
    """Another one holds the document: 16 pages can be had, and two are for decodes."""
    replica = beside(60)
    replica.add(DOCUMENT + [5] * SIZE, max_tokens=4, ignore_eos=True)
    replica.step()
    replica.add(prompt, bypass=bypass, max_tokens=1)
    assert (entered(replica.step()) == [3]) == comes
    replica.drain()
    replica.check_answers()


def test_pages_that_are_in_the_cache_are_no_room_for_others():
    """Ten pages less can be had than the document and the page that is missing take."""
    replica = beside(78)
    replica.add(DOCUMENT + [4] * SIZE, max_tokens=1)
    assert [entered(replica.step()) for _ in range(4)] == [[], [], [], [2]]
    assert replica.finished("r2")[0].usage.cached == len(DOCUMENT)


def test_a_large_prompt_waits_behind_a_large_one_though_it_is_in_the_cache():
    """Without the large one before it, it would come at once."""
    replica = beside(67)
    ask(replica, 90)
    replica.add(DOCUMENT + [4] * SIZE, max_tokens=1)
    ask(replica, 2)
    assert entered(replica.step()) == [4]
    assert [entered(replica.step()) for _ in range(2)] == [[], []]
    assert entered(replica.step()) == [2]
    replica.drain()
    replica.check_answers()


def test_those_that_share_a_prefix_hold_its_pages_once():
    """Sixteen chats over one prefix of 16 pages, each with a page of its own, hold 32 of 128 pages:
    none of them has to wait."""
    replica = cache(prefix_caching=True)
    prefix = [1] * (16 * SIZE)
    for chat in range(16):
        replica.add([*prefix, chat % 12, chat // 12], max_tokens=3, ignore_eos=True)
        if not chat:
            replica.step()
    assert entered(replica.step()) == list(range(1, 16)) and held(replica) == 32


def test_chats_over_a_prefix_pass_a_large_one_until_the_pages_they_hold_are_an_eighth():
    """The prefix takes a page, and each of the chats one of its own: while a large one waits,
    fifteen of them hold 16."""
    replica = cache(prefix_caching=True)
    holding(replica, 70, output=30)
    prefix = [2] * SIZE
    replica.add([*prefix, 3], max_tokens=3, ignore_eos=True)
    replica.step()
    ask(replica, 60)
    for chat in range(20):
        replica.add([*prefix, 4 + chat % 8, chat // 8], max_tokens=3, ignore_eos=True)
    assert entered(replica.step()) == list(range(3, 17)) and held(replica) == 71 + 16


# --- what was promised


def leaving(scheduler: Scheduler) -> list[int]:
    """Phases of those that have to leave, as they do."""
    seen = []
    withdraw = scheduler.slots.withdraw

    def watched(sequence: Sequence, phase: int) -> None:
        seen.extend([int(scheduler.slots.phase[sequence.slot])] if phase == LEAVING else [])
        withdraw(sequence, phase)

    scheduler.slots.withdraw = watched
    return seen


def test_what_was_promised_to_a_prompt_is_not_given_to_the_next():
    """The first needs 100 pages and gets 16 in every step; small ones have 28 in the meantime, and
    none has to leave."""
    replica = cache(chunk_tokens=64, min_chunk=8)
    left = leaving(replica.scheduler)
    ask(replica, 100, 20, *[2] * 20, steps=2)
    for _ in range(6):
        replica.step()
    ask(replica, 28)
    replica.drain()
    replica.check_answers()
    assert not left


SIZES = st.one_of(st.integers(1, SMALL), st.integers(1, 20), st.integers(20, 110), st.just(PAGES))
STREAM = st.lists(
    st.lists(st.tuples(SIZES, st.integers(1, 4)), max_size=4), min_size=1, max_size=25
)


@settings(max_examples=examples(200), deadline=None)
@given(
    stream=STREAM,
    spp=st.integers(1, 2),
    kvp=st.integers(1, 2),
    chunk=st.sampled_from([16, 100, 4096]),
    slots=st.sampled_from([3, 40]),
)
def test_whatever_comes_the_small_pass_within_their_eighth_and_nobody_else_passes(
    stream, spp, kvp, chunk, slots
):
    """Requests of so many pages, for so many steps, come before every step. None has to leave
    again, and in the end all have come in."""
    config = SchedulerConfig(max_seqs=slots, chunk_tokens=chunk, min_chunk=1)
    manager = CacheManager(CacheConfig(SIZE, PAGES // kvp, prefix_caching=False), kvp, slots)
    scheduler = Scheduler(config, manager, MeshConfig(spp, kvp), 1000)
    left = leaving(scheduler)
    flight = []
    coming = list(stream)
    ids = map(str, itertools.count())
    steps = 0
    pages = lambda sequence: scheduler.cache.blocks(sequence.prefill_len)
    while coming or scheduler.sequences or flight:
        for need, count in coming.pop(0) if coming else ():
            sampling = SamplingParams(max_tokens=count, ignore_eos=True)
            scheduler.add(
                Request(
                    next(ids),
                    np.zeros(SIZE * need - count + 1, np.int32),
                    sampling,
                    arrival=float(steps),
                )
            )
        batch = scheduler.start(float(steps))
        scheduler.check()
        if batch is not None:
            flight.append(batch)
            waiting = list(scheduler.slots.queue)
            small = sum(
                pages(sequence)
                for sequence in scheduler.slots.by_slot.values()
                if pages(sequence) <= SMALL
            )
            for sequence in (scheduler.sequences[number] for number in entered(batch)):
                passed = [other for other in waiting if other.number < sequence.number]
                assert not passed or (
                    pages(sequence) <= SMALL < min(map(pages, passed)) and small <= EIGHTH
                )
        if batch is None or len(flight) > spp:
            assert flight or not scheduler.sequences, "stuck"
            for oldest in [flight.pop(0)] if flight else []:
                tokens = np.zeros(len(oldest.slot), np.int32)
                scheduler.finish(oldest, StepResults(tokens), float(steps))
                scheduler.check()
        steps += 1
    assert not left and scheduler.cache.counts() == (PAGES, 0, 0)


# --- in time

# a step takes a tenth of a second in every stage, whatever it does
STEP = Costs(layers=1, launch=0.1)
ONE = MeshConfig()


def among(need: int, policy: str, mesh: MeshConfig = ONE) -> float:
    """Seconds until the first token of a large prompt that comes at 2.005 s and is due 3 s later,
    among small ones that come for half a minute and are due in 2 s. There are 64 pages of 16
    tokens, and 14 at a time are held by twenty small ones a second (with two stages: ten), of a
    page each, for 7 tokens."""
    replica = made(
        STEP, mesh, 1, 64 // mesh.kvp, Watched, policy=policy, max_seqs=64, chunk_tokens=1024
    )
    large = 2.005, 16 * need, 1
    wishes = sorted([large, *((n * mesh.spp / 20, 10, 7) for n in range(600 // mesh.spp))])
    requests = (
        (to_request(Arrival(*wish), number, 10_000, Slo(ttft=3.0 if wish == large else 2.0)), "")
        for number, wish in enumerate(wishes)
    )
    records = drive(replica, requests).records
    assert [record.reason for record in records] == ["length"] * len(wishes)
    (found,) = (record for record in records if record.prompt == 16 * need)
    return found.ttft


@pytest.mark.parametrize(
    "need, mesh",
    [
        (64, ONE),
        *(
            pytest.param(need, mesh, marks=pytest.mark.matrix)
            for need, mesh in ((56, ONE), (64, MeshConfig(spp=2)), (64, MeshConfig(kvp=2)))
        ),
    ],
)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_stream_of_small_ones_keeps_a_large_one_out(policy, need, mesh):
    """First a step ends. Once nobody goes before it, those that run end in 7 steps, and it is
    prefilled in one. With deadlines those that come in the second after it go before it, and with
    relative slack; by slack, those that wait for it do as long as it is in time: the line is short,
    so that its patience has ended by then."""
    turns = {"fcfs": 0.0, "edf": 1.0, "llf": 1.0, "relative-slack": 1.0, "slack": 3.0}
    turn = turns[policy]
    assert among(need, policy, mesh) <= turn + 0.9 * mesh.spp


def test_by_slack_a_large_one_is_in_time_among_few_small_ones():
    assert among(56, "slack") <= 3.0


# --- what is remembered of who did not fit


class Forgetful(CacheManager):
    """Looks up every block anew."""

    def match(self, hashes: BlockHashes, blocks: int, last: PrefixMatch = NO_MATCH) -> PrefixMatch:
        return super().match(hashes, blocks)


def same(one: Batch, other: Batch) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in Batch.__slots__)


ASK = st.tuples(
    st.just("ask"),
    st.one_of(st.integers(1, 10), st.integers(1, 100), st.integers(100, 500)),
    st.integers(1, 12),
    st.integers(0, 2),
)
PLAY = st.lists(
    st.one_of(
        ASK, ASK, st.tuples(st.just("step")), st.tuples(st.just("cancel"), st.integers(0, 100))
    ),
    max_size=60,
)
SETTINGS = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(sorted(POLICIES)),
        "chunking": st.sampled_from(sorted(CHUNKING)),
        "chunk_tokens": st.sampled_from([64, 256, 4096]),
    }
)


def twins(mesh: MeshConfig, prefix_caching: bool, **fields) -> list[Scheduler]:
    """Two schedulers of which the second remembers of nobody which of its blocks are cached."""
    config = SchedulerConfig(**{"max_seqs": 12, "step_time": 0.05, **fields})
    settings = CacheConfig(SIZE, PAGES // mesh.kvp, prefix_caching=prefix_caching)
    return [
        Scheduler(config, kind(settings, mesh.kvp, 12), mesh, 1000)
        for kind in (CacheManager, Forgetful)
    ]


def compare(schedulers: list[Scheduler], play: list[tuple]) -> None:
    """Both make the same batches."""
    now = 0.0
    flight = []
    alive = []

    def step():
        nonlocal now
        one, other = batches = [scheduler.start(now) for scheduler in schedulers]
        assert (one is None) == (other is None) and (one is None or same(one, other))
        flight.extend([batches] if one else [])
        if flight and (one is None or len(flight) > schedulers[0].predictor.mesh.spp):
            for scheduler, batch in zip(schedulers, flight.pop(0)):
                scheduler.finish(batch, StepResults(np.zeros(len(batch.slot), int)), now)
                scheduler.check()
        now += 0.01

    for what, *how in play:
        if what == "ask":
            length, output, prefix = how
            tokens = np.full(length, len(alive), np.int32)
            tokens[: length * prefix // 2] = 10_000 + prefix
            for scheduler in schedulers:
                scheduler.add(
                    Request(
                        f"{len(alive)}",
                        tokens,
                        SamplingParams(max_tokens=output, ignore_eos=True),
                        arrival=now,
                    )
                )
            alive.append(f"{len(alive)}")
        elif what == "step":
            step()
        elif alive and (id := alive[how[0] % len(alive)]) in schedulers[0].requests.entries:
            for scheduler in schedulers:
                scheduler.cancel(id, now)
    count = 0
    while schedulers[0].sequences or flight:
        step()
        count += 1
        assert count < 5000, "no end"
    for scheduler in schedulers:
        assert not scheduler.sequences and scheduler.cache.counts()[2] == 0


FACTS = given(play=PLAY, spp=st.integers(1, 2), kvp=st.integers(1, 2), fields=SETTINGS)


@settings(max_examples=examples(200), deadline=None)
@FACTS
@example(play=[("ask", 193, 12, 2), ("ask", 253, 1, 2)], spp=1, kvp=1, fields={"policy": "fcfs"})
def test_what_is_remembered_of_who_did_not_fit_changes_nothing(play, spp, kvp, fields):
    compare(twins(MeshConfig(spp=spp, kvp=kvp), True, **fields), play)


def test_one_that_did_not_fit_comes_in_when_enough_of_it_is_in_the_cache():
    """Two prompts of 49 and 64 pages come at once, of which 48 are the same; one must leave 16 to
    small ones. In the next step the second has 48 pages in the cache, which the first holds, and of
    79 that can be had may use 62. It needs 16."""
    replica = cache(prefix_caching=True)
    replica.add([1] * 193, max_tokens=30, ignore_eos=True)
    replica.add([1] * 193 + [2] * 60, max_tokens=1)
    assert entered(replica.step()) == [0]
    assert entered(replica.step()) == [1]
