"""KV of conversations whose next turn is expected: it outlasts newer KV of others, for as long as
next turns take to come, and makes way for whatever runs."""

from __future__ import annotations

import pytest

from jaxserve.scheduling.sessions import FIRST_SECONDS, LEAST_TURNS
from jaxserve.settings.schema import CacheConfig, SchedulerConfig
from tests.scheduling.fakes import Replica

BLOCK = 4


def replica(pages: int = 12) -> Replica:
    return Replica(
        SchedulerConfig(max_seqs=2, chunk_tokens=64), CacheConfig(block_size=BLOCK, pages=pages)
    )


def serve(replica: Replica, prompt: list[int], session: str = "", tokens: int = 1) -> int:
    """Serves a request to its end; returns the tokens of its prompt that were cached."""
    id = replica.add(prompt, session=session, max_tokens=tokens, ignore_eos=True)
    replica.drain(2)
    return next(e.usage.cached for e in replica.heard[id] if hasattr(e, "usage"))


def prompt(first: int, tokens: int = 16) -> list[int]:
    return [(first + i * (first + 1)) % 12 for i in range(tokens)]


@pytest.mark.parametrize("session, cached", [("", 0), ("agent", 16)])
def test_the_next_turn_finds_its_blocks_behind_newer_ones_of_others(session, cached):
    made = replica()
    turn = prompt(1)
    serve(made, turn, session)
    for other in range(2, 7):
        serve(made, prompt(other))
    assert serve(made, [*turn, 1, 2, 3], session) == cached


def test_blocks_are_kept_no_longer_than_most_next_turns_take():
    made = replica()
    turn = prompt(1)
    serve(made, turn, "agent")
    made.now += FIRST_SECONDS + 1
    made.scheduler.expire(made.now)
    assert not len(made.cache.sessions)
    for other in range(2, 7):
        serve(made, prompt(other))
    assert serve(made, [*turn, 1, 2, 3], "agent") == 0


def test_how_long_is_learnt_from_the_turns_that_came():
    made = replica()
    sessions = made.scheduler.requests.sessions
    assert sessions.keep_seconds == FIRST_SECONDS
    for turn in range(LEAST_TURNS + 1):
        serve(made, prompt(1), "agent")
        made.now += 2 + turn % 2
    assert 3 <= sessions.keep_seconds <= 4  # 2 or 3 s, and the steps of a turn


def test_what_runs_has_the_pages_that_are_kept():
    made = replica(pages=8)
    serve(made, prompt(1, 12), "agent")
    assert len(made.cache.sessions) == 3
    assert serve(made, prompt(2, 27), tokens=4) == 0  # all pages, at once
    assert not len(made.cache.sessions)


def test_sessions_of_one_name_are_apart_under_other_salts():
    made = replica(pages=24)
    for salt in ("a", "b"):
        made.add(prompt(1), salt=salt, session="agent", max_tokens=1, ignore_eos=True)
        made.drain(2)
    assert set(made.cache.sessions.holders()) == {("a", "agent"), ("b", "agent")}


def test_an_error_keeps_nothing():
    made = replica()
    id = made.add(prompt(1), session="agent", max_tokens=5)
    made.start()
    made.hear(made.scheduler.cancel(id, made.now))
    made.drain(2)
    assert not len(made.cache.sessions)
