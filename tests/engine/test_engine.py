"""The engine as its callers see it: threads, ends of all kinds, and faults that must stay where
they happen."""

from __future__ import annotations

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Accepted, Finished, Progress, Token
from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.clock import VirtualClock
from jaxserve.engine.engine import Engine
from tests.engine.harness import (
    Runner,
    assert_empty,
    fresh,
    on_its_thread,
    shared,
    threads_of_engines,
)
from tests.waiting import eventually


@pytest.fixture
def real() -> Engine:
    return shared(pages=60)


@pytest.fixture
def running(real):
    real.start()
    yield real
    real.close()
    eventually(lambda: not threads_of_engines(), 60)


class Listener:
    """A sink that can be waited for."""

    def __init__(self):
        self.events = []
        self.threads = set()
        self._ended = threading.Event()

    def __call__(self, events) -> None:
        self.events += events
        self.threads.add(threading.current_thread().name)
        if any(isinstance(event, Finished) for event in events):
            self._ended.set()

    def finished(self) -> Finished:
        assert self._ended.wait(60), "it did not end"
        return next(event for event in self.events if isinstance(event, Finished))

    @property
    def tokens(self) -> list[int]:
        return [event.id for event in self.events if isinstance(event, Token)]


def request(
    real: Engine, id: str = "r", length: int = 20, rest: dict | None = None, **fields
) -> Request:
    params = SamplingParams.make(
        **{"temperature": 0, "max_tokens": 5, "ignore_eos": True, **fields}
    )
    return Request.make(
        id,
        np.arange(3, 3 + length),
        params,
        vocab=512,
        max_len=real.info.max_model_len,
        arrival=real.clock.now(),
        **(rest or {}),
    )


def ask(
    real: Engine, id: str = "r", length: int = 20, rest: dict | None = None, **fields
) -> Listener:
    listener = Listener()
    real.submit(request(real, id, length, rest, **fields), listener)
    return listener


# --- the life of a request and of the thread


def test_a_request_is_accepted_makes_progress_speaks_and_ends_in_this_order(running):
    listener = ask(running, length=100)
    ended = listener.finished()
    kinds = [type(event) for event in listener.events]
    assert kinds == [Accepted] + [Progress] * 3 + [Token] * 5 + [Finished]
    assert [event.prefilled for event in listener.events[1:4]] == [32, 64, 96] and listener.events[
        1
    ].total == 100
    assert ended.reason == "length" and ended.usage.prompt == 100 and ended.usage.completion == 5
    assert 0 <= ended.timing.queued <= ended.timing.first_token <= ended.timing.total < 60
    assert listener.threads == {threading.current_thread().name, "engine"}
    eventually(lambda: not running.load().running, 60)
    assert_empty(running)


def test_an_idle_engine_wakes_for_each_request(running):
    first = ask(running, "a").finished()
    time.sleep(0.05)
    listener = ask(running, "b")
    assert listener.finished().usage.completion == first.usage.completion == 5


def test_many_threads_submit_and_cancel_at_once(running):
    listeners: dict[str, Listener] = {}

    def caller(number: int) -> None:
        rng = np.random.default_rng(number)
        for i in range(15):
            id = f"{number}-{i}"
            listeners[id] = ask(
                running,
                id,
                int(rng.integers(1, 80)),
                max_tokens=int(rng.integers(1, 30)),
                n=int(rng.integers(1, 3)),
            )
            if rng.random() < 0.5:
                time.sleep(rng.random() * 0.01)
                running.cancel(id)

    threads = [threading.Thread(target=caller, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reasons = {listener.finished().reason for listener in listeners.values()}
    assert len(listeners) == 60 and reasons == {"length", "cancelled"}
    eventually(lambda: not running.load().running, 60)
    on_its_thread(running, running.scheduler.check)
    assert_empty(running)


def test_closing_ends_what_runs_and_refuses_what_comes(running):
    listeners = [ask(running, str(i), max_tokens=480) for i in range(6)]  # two of them wait
    eventually(lambda: listeners[0].tokens, 60)
    running.close()
    for listener in listeners:
        ended = listener.finished()
        assert ended.reason == "error" and ended.error.status == "UNAVAILABLE"
    with pytest.raises(RequestError, match="not running") as refused:
        ask(running)
    assert refused.value.status == "UNAVAILABLE"
    assert running.alive and not running.cancel("0")
    running.close()


def test_an_engine_that_never_started_can_be_closed(real):
    listener = ask(real)
    real.close()
    assert listener.finished().error.status == "UNAVAILABLE"


@pytest.mark.parametrize(
    "place, name",
    [("worker", "execute"), ("worker", "wait"), ("scheduler", "start"), ("scheduler", "finish")],
)
def test_a_loop_that_fails_ends_all_requests_and_says_so(real, place, name, monkeypatch, caplog):
    def fail(*args):
        raise RuntimeError("the device is gone")

    real.start()
    listeners = [ask(real, "a", max_tokens=480), ask(real, "b", max_tokens=480)]
    eventually(lambda: all(listener.tokens for listener in listeners), 60)
    monkeypatch.setattr(getattr(real, place), name, fail)
    for listener in listeners:
        ended = listener.finished()
        assert (
            ended.reason == "error"
            and ended.error.status == "INTERNAL"
            and ended.usage.completion == len(listener.tokens)
        )
    eventually(lambda: not threads_of_engines(), 60)
    assert not real.alive and "the device is gone" in caplog.text
    with pytest.raises(RequestError, match="not running"):
        ask(real)
    real.close()


# --- refusals and ends


def test_an_id_in_use_is_refused_and_can_be_used_again_once_it_ended(real):
    first = ask(real, max_tokens=480)
    with pytest.raises(RequestError, match="in use") as refused:
        ask(real)
    assert refused.value.status == "ALREADY_EXISTS"
    for _ in range(6):
        real.step()
    assert real.cancel("r") and len(real.steps.in_flight)  # its last batch is still on its way
    second = ask(real, length=30)
    while real.step():
        real.scheduler.check()
    assert first.finished().reason == "cancelled" and second.finished().reason == "length"
    assert len(second.tokens) == 5 and [type(event) for event in second.events].count(Accepted) == 1
    assert_empty(real)


def test_cancelling_what_is_unknown_or_has_ended_says_so(real):
    listener = ask(real)
    assert not real.cancel("other")
    assert real.cancel("r") and not real.cancel("r")
    assert listener.finished().reason == "cancelled" and listener.finished().usage.completion == 0
    assert not real.step()
    assert_empty(real)


def test_one_completion_can_be_stopped_and_the_others_go_on(real):
    runner = Runner(real)
    id = runner.submit(range(3, 40), n=3, max_tokens=20, ignore_eos=True, temperature=1.0)
    while sum(isinstance(event, Token) and event.index == 1 for event in runner.events[id]) < 3:
        real.step()
    assert real.stop(id, 1)
    said = len(
        [event for event in runner.events[id] if isinstance(event, Token) and event.index == 1]
    )
    assert not real.stop(id, 1)
    assert sum(isinstance(event, Finished) for event in runner.events[id]) == 1
    runner.run()
    assert runner.completion(id, 1).finished.reason == "stop" and len(runner.ids(id, 1)) == said
    assert [len(runner.ids(id, index)) for index in (0, 2)] == [20, 20]
    assert_empty(real)


def test_a_full_queue_refuses(real):
    object.__setattr__(real.scheduler.config, "max_queue", 2)
    try:
        ask(real, "a"), ask(real, "b")
        with pytest.raises(RequestError) as refused:
            ask(real, "c")
        assert refused.value.status == "RESOURCE_EXHAUSTED"
        assert "c" not in real.registry
    finally:
        object.__setattr__(real.scheduler.config, "max_queue", 4096)


def test_a_deadline_ends_those_that_run_and_those_that_wait(real):
    real.clock = clock = VirtualClock(100.0)
    running = [ask(real, str(i), max_tokens=480, rest=dict(deadline=105.0 + i)) for i in range(4)]
    waiting = ask(real, "w", rest=dict(deadline=105.5))
    other = ask(real, "o")
    while not running[3].tokens:
        real.step()
    assert real.load().waiting == 2
    clock.advance(105.6)
    for _ in range(3):
        real.step()
        real.scheduler.check()
    assert running[0].finished().reason == "deadline" and running[0].tokens
    assert waiting.finished().reason == "deadline" and not waiting.tokens
    assert not any(isinstance(event, Finished) for event in running[1].events)
    clock.advance(200.0)
    while real.step():
        real.scheduler.check()
    assert [listener.finished().reason for listener in running] == ["deadline"] * 4
    assert other.finished().reason == "length"
    assert_empty(real)


# --- faults that stay where they happen


@pytest.mark.parametrize("kind", [Accepted, Progress, Token, Finished])
def test_a_sink_that_raises_ends_its_own_request_and_no_other(running, kind, caplog):
    heard = []

    def broken(events):
        heard.append(events)
        if any(isinstance(event, kind) for event in events):
            raise ValueError("no ear")

    good = ask(running, "good", length=100, max_tokens=50)
    running.submit(
        request(running, "bad", length=100, n=2, rest=dict(cache_salt="of its own")), broken
    )
    assert good.finished().reason == "length" and len(good.tokens) == 50
    eventually(lambda: "bad" not in running.registry, 60)
    assert (
        any(isinstance(event, kind) for event in heard[-1])
        and "the sink of request 'bad' failed" in caplog.text
    )
    assert ask(running, "bad").finished().reason == "length"
    assert running.alive


def test_a_sink_may_submit_and_cancel(real):
    second = Listener()

    def first(events):
        if any(isinstance(event, Finished) for event in events):
            real.submit(request(real, "second"), second)
            assert not real.cancel("first") and not real.cancel("twin") and real.cancel("third")

    third = ask(real, "third", max_tokens=480)
    real.submit(request(real, "first", max_tokens=6), first)  # starts a step before its twin
    twin = ask(real, "twin")
    while real.step():
        real.scheduler.check()
    assert (second.finished().reason, twin.finished().reason, third.finished().reason) == (
        "length",
        "length",
        "cancelled",
    )
    assert_empty(real)


@pytest.mark.parametrize(
    "fields",
    [{}, dict(temperature=1.0, seed=1, top_p=0.9), dict(logprobs=2), dict(n=2, temperature=1.0)],
    ids=str,
)
def test_logits_that_are_not_finite_end_their_request_and_no_other(real, fields):
    good = ask(real, "good", 40, max_tokens=40, **fields)
    bad = ask(real, "bad", 20, max_tokens=40, rest=dict(cache_salt="shares no page"))
    while not (len(good.tokens) > 3 and len(bad.tokens) > 3):
        real.step()
    slot = next(
        sequence.slot for sequence in real.scheduler.sequences.values() if sequence.id == "bad"
    )
    stage = real.worker.stages.stages[0]
    page = real.scheduler.cache.layouts[slot].pages[0]
    stage.caches[0] = jax.tree.map(lambda pool: pool.at[0, page].set(jnp.nan), stage.caches[0])
    while real.step():
        real.scheduler.check()
    ended = bad.finished()
    assert (
        ended.reason == "error"
        and ended.error.status == "INTERNAL"
        and "finite" in str(ended.error)
    )
    assert len(bad.tokens) == ended.usage.completion < 40 and min(bad.tokens) >= 0
    assert good.finished().reason == "length"
    again = ask(real, "bad", 20, max_tokens=40, rest=dict(cache_salt="shares no page"))
    while real.step():
        real.scheduler.check()
    # nothing of it was kept
    assert again.finished().reason == "length" and again.finished().usage.cached == 0
    assert_empty(real)
    stage.caches[0] = jax.tree.map(jnp.zeros_like, stage.caches[0])


def test_pages_that_held_what_is_not_finite_do_no_harm_to_their_next_holder(real):
    right = ask(real, "a", 100, max_tokens=20)
    while real.step():
        pass
    stage = real.worker.stages.stages[0]
    clean = list(stage.caches)
    stage.caches = jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), clean)
    again = fresh(real, "grow")
    listener = ask(again, "b", 100, max_tokens=20)
    while again.step():
        pass
    assert listener.tokens == right.tokens and len(right.tokens) == 20
    stage.caches = jax.tree.map(jnp.zeros_like, clean)
