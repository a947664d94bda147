"""Steps that fail or hang on the devices: who hears of it, and that the engine goes on as if
nothing had been."""

from __future__ import annotations

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.api.errors import RequestError
from jaxserve.engine.engine import Engine
from jaxserve.engine.watchdog import FAULTS
from tests.engine.harness import assert_empty, on_its_thread, shared
from tests.engine.test_engine import ask
from tests.waiting import eventually

TOO_MUCH = 2**50  # bytes that no allocator has


@pytest.fixture
def running():
    real = shared(pages=60)
    real.start()
    yield real
    real.close()


def lose(real: Engine) -> None:
    """Deletes the pools that a step was given, as it does before it fails."""
    for stage in real.worker.stages.stages:
        for array in jax.tree.leaves(stage.caches):
            array.delete()


def no_memory(*args) -> None:
    jax.jit(lambda: jnp.zeros(TOO_MUCH, jnp.int8))().block_until_ready()


def once(real: Engine, monkeypatch, name: str, fault) -> None:
    """The next call of the stages' method `name` fails."""
    right = getattr(real.worker.stages, name)
    lock = threading.Lock()
    failed = []

    def call(*args):
        with lock:
            first = not failed
            failed.append(True)
        return fault(right, args) if first else right(*args)

    monkeypatch.setattr(real.worker.stages, name, call)


def at_launch(real: Engine):
    def fault(right, args):
        lose(real)
        no_memory()

    return fault


def on_the_way(real: Engine):
    """The step is issued, and fails while it runs."""

    def broken(ints: np.ndarray) -> np.ndarray:
        raise ValueError("a kernel failed")

    def fault(right, args):
        hidden = right(*args)
        ints = jax.jit(
            lambda x: jax.pure_callback(broken, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        )(hidden.ints)
        return dataclasses.replace(hidden, ints=ints)

    return fault


@pytest.mark.parametrize("name", ["step", "sample", "admit"])
def test_where_a_launch_finds_no_memory_its_requests_fail_and_the_engine_goes_on(
    running, name, monkeypatch, caplog
):
    right = ask(running, "alone").finished()
    assert right.reason == "length"
    once(running, monkeypatch, name, at_launch(running))
    ended = ask(running, "bad").finished()
    assert (
        ended.reason == "error"
        and ended.error.status == "RESOURCE_EXHAUSTED"
        and ended.error.reason == "memory"
    )
    after = ask(running, "again")
    assert (
        after.finished().reason == "length" and after.finished().usage.cached == 0 and running.alive
    )
    assert "failed" in caplog.text
    eventually(lambda: not running.load().running, 60)
    on_its_thread(running, running.scheduler.check)
    assert_empty(running)


def test_a_step_that_fails_on_the_way_ends_its_requests_and_others_begin_anew(monkeypatch):
    """Two stages, so that a batch has two of four decodes. The tokens of those that begin anew are
    those they get alone."""
    real = shared("spp=2", pages=60)
    real.start()
    try:
        kinds = [{}, dict(temperature=1.0, seed=5), dict(frequency_penalty=0.5), {}]
        alone = [
            ask(real, f"alone{i}", 20 + i, max_tokens=80, **kind) for i, kind in enumerate(kinds)
        ]
        expected = [listener.finished() and listener.tokens for listener in alone]
        listeners = [
            ask(real, f"r{i}", 20 + i, max_tokens=80, **kind) for i, kind in enumerate(kinds)
        ]
        waits = ask(real, "waits", 40)
        eventually(lambda: all(len(listener.tokens) > 3 for listener in listeners), 60)
        once(real, monkeypatch, "step", on_the_way(real))
        ends = [listener.finished() for listener in listeners]
        assert sorted(end.reason for end in ends) == ["error", "error", "length", "length"]
        for end, listener, tokens in zip(ends, listeners, expected):
            assert listener.tokens == tokens[: end.usage.completion] and len(tokens) == 80
            assert end.error is None or end.error.status == "INTERNAL"
        assert waits.finished().reason == "length" and real.alive
        eventually(lambda: not real.load().running, 60)
        on_its_thread(real, real.scheduler.check)
        assert_empty(real)
    finally:
        real.close()


def test_an_engine_whose_every_step_fails_gives_up(running, monkeypatch):
    monkeypatch.setattr(running.worker.stages, "step", no_memory)
    ends = [ask(running, str(number)).finished() for number in range(FAULTS)]
    assert [end.error.status for end in ends] == ["RESOURCE_EXHAUSTED"] * (FAULTS - 1) + [
        "INTERNAL"
    ]
    eventually(lambda: not running.alive, 60)


def watched(hang_timeout: float) -> Engine:
    real = shared(pages=60)
    return Engine(
        dataclasses.replace(real.config, hang_timeout=hang_timeout),
        real.worker,
        real.scheduler,
    )


@pytest.mark.parametrize("hangs", [False, True])
def test_others_wait_for_a_step_that_is_issued_slowly_but_not_for_one_that_hangs(
    monkeypatch, hangs
):
    monkeypatch.setattr("jaxserve.engine.engine.LOCK_WAIT", 0.1)
    real = watched(0.2 if hangs else 60)
    begun = threading.Event()
    gate = threading.Event()
    real.start()
    try:
        once(
            real,
            monkeypatch,
            "step",
            lambda right, args: (begun.set(), gate.wait(60 if hangs else 0.5), right(*args))[2],
        )
        listener = ask(real, "a")
        assert begun.wait(60)
        if hangs:
            with pytest.raises(RequestError, match="do not answer"):
                real.load()
        else:
            assert real.load().running == 1
        gate.set()
        assert listener.finished().reason == "length" and not real.load().running
    finally:
        gate.set()
        real.close()


def test_a_hung_step_can_be_told_by_others(monkeypatch):
    real = watched(0.2)
    gate = threading.Event()
    real.start()
    try:
        assert ask(real, "before").finished().reason == "length" and real.overdue() is None

        def hang(right, args):
            hidden = right(*args)
            wait = lambda x: (gate.wait(60), x)[1]
            blocked = jax.jit(
                lambda x: jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
            )(hidden.ints)
            return dataclasses.replace(hidden, ints=blocked)

        once(real, monkeypatch, "step", hang)
        listener = ask(real, "hangs")
        eventually(lambda: real.overdue() is not None, 60)
        first = real.overdue()
        eventually(lambda: real.overdue() > first, 60)
        assert real.alive and not listener.tokens
        gate.set()
        assert listener.finished().reason == "length"
        eventually(lambda: real.overdue() is None, 60)
    finally:
        gate.set()
        real.close()


def test_flushing_forgets_what_nobody_holds(running):
    first = ask(running, "a", 100)
    first.finished()
    warm = ask(running, "b", 100).finished()
    assert warm.usage.cached == 96
    eventually(lambda: not running.load().running, 60)
    cached = running.load().pages_cached
    assert running.flush_cache() == cached > 0 == running.flush_cache()
    assert running.load().pages_free == running.load().pages_total
    held = ask(running, "c", 100, max_tokens=300)
    assert (eventually(lambda: held.tokens, 60), running.flush_cache())[1] == 0
    assert ask(running, "d", 100).finished().usage.cached == 96  # what is held stays known
    running.cancel("c")
    assert held.finished().usage.cached == 0 and first.tokens == held.tokens[:5]
