"""Blocks that a prompt finds when it comes are there when it gets its slot."""

from __future__ import annotations

from jaxserve.api.request import Request, Slo
from jaxserve.api.sampling import SamplingParams
from jaxserve.settings.schema import CacheConfig, SchedulerConfig
from tests.scheduling.fakes import VOCAB, Replica

OLD = [1] * 9  # two full blocks
YOUNG = [2] * 9
LONG = [3] * 4


def replica(pages: int, max_seqs: int = 1) -> Replica:
    return Replica(
        SchedulerConfig(max_seqs=max_seqs, chunk_tokens=16, decode_reserve=0.0),
        CacheConfig(block_size=4, pages=pages),
    )


def run(made: Replica, prompt: list[int]) -> None:
    made.add(prompt, max_tokens=1)
    made.drain()


def cached_tokens(made: Replica, id: str) -> int:
    return made.finished(id)[0].usage.cached


def test_a_waiting_prompt_keeps_the_blocks_that_it_found():
    made = replica(pages=10)
    run(made, OLD)
    run(made, YOUNG)
    made.add(LONG, id="long", max_tokens=29, ignore_eos=True)  # 8 pages: two of the cached ones
    made.step()
    made.add([*OLD, 4], id="waits", max_tokens=1)
    assert len(made.cache.promises) == 2
    made.drain()
    assert cached_tokens(made, "waits") == 8 and made.cache.promises.given_up == 0
    assert not made.cache.promises
    made.check_answers()


def test_what_runs_gets_the_pages_of_promises_when_there_are_no_others():
    made = replica(pages=8)
    run(made, OLD)
    made.add(LONG, id="long", max_tokens=29, ignore_eos=True)  # all pages
    made.step()
    made.add([*OLD, 4], id="waits", max_tokens=1)
    assert len(made.cache.promises) == 2
    made.drain()
    assert made.cache.promises.given_up == 1 and cached_tokens(made, "waits") == 0
    assert made.scheduler.slots.preemptions == 0
    made.check_answers()


def test_a_prompt_that_is_due_later_waits_beside_what_is_promised():
    made = replica(pages=8, max_seqs=2)
    run(made, OLD)
    made.add([5] * 4, id="runs", max_tokens=3, ignore_eos=True)
    made.step()
    made.add([6] * 16, id="due later", max_tokens=1)
    made.scheduler.add(urgent(made))
    assert len(made.cache.promises) == 2
    made.step()
    assert made.scheduler.slots.running == 1
    while made.scheduler.sequences:
        made.step()
    assert cached_tokens(made, "urgent") == 8 and made.cache.promises.given_up == 0


def urgent(made: Replica) -> Request:
    sampling = SamplingParams.make(max_tokens=1)
    made.requests["urgent"] = request = Request.make(
        "urgent", [*OLD, 4], sampling, vocab=VOCAB, max_len=100, slo=Slo(ttft=0.1)
    )
    return request


def test_a_prompt_that_is_due_earlier_takes_what_is_promised_to_a_later_one():
    made = replica(pages=8, max_seqs=2)
    run(made, OLD)
    made.add([5] * 4, id="runs", max_tokens=5, ignore_eos=True)
    made.step()
    made.add([6] * 16, id="first", max_tokens=1)  # four pages, with one of those promised
    made.now += 1
    made.add([*OLD, 4], id="later", max_tokens=1)
    assert len(made.cache.promises) == 2
    made.start()
    assert made.scheduler.slots.running == 2 and made.cache.promises.given_up == 1
    made.drain()
    made.check_answers()


def test_a_prompt_that_fits_only_alone_is_not_kept_out_by_promises():
    made = replica(pages=8)
    run(made, OLD)
    made.add([6] * 29, id="whole", max_tokens=4, ignore_eos=True)  # all pages
    made.add([*OLD, 4], id="later", max_tokens=1)
    made.drain()
    made.check_answers()


def test_a_promise_ends_with_its_request():
    made = replica(pages=10)
    run(made, OLD)
    made.add(LONG, max_tokens=20, ignore_eos=True)
    made.step()
    for end in ("cancelled", "deadline"):
        deadline = made.now + 1 if end == "deadline" else None
        id = made.add([*OLD, 4], deadline=deadline, max_tokens=1)
        assert len(made.cache.promises) == 2
        if deadline is None:
            made.hear(made.scheduler.cancel(id, made.now))
        else:
            made.hear(made.scheduler.expire(deadline))
        assert not made.cache.promises and not made.cache.pages.locks


def test_requests_that_bypass_the_cache_are_promised_nothing():
    made = replica(pages=10)
    run(made, OLD)
    made.add(LONG, max_tokens=20, ignore_eos=True)
    made.step()
    made.add([*OLD, 4], bypass=True, max_tokens=1)
    assert not made.cache.promises
