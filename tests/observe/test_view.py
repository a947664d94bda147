"""What a page is told of a replica: the steps and their chunks, who runs and waits, who ended;
bounded, and little work to tell."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxserve.observe import journal, view
from jaxserve.observe.journal import Journal
from jaxserve.observe.view import Snapshot
from jaxserve.scheduling.events import EventBus, StepIssued, StepRead
from tests.scheduling.recorded import Recorded, crowd
from tests.work import calls_of

CALLS_OF_A_VIEW = 17_000  # twice those of 25 steps and of the requests that are shown


def rows(shown: dict) -> dict[str, dict]:
    """Requests that run, wait or ended, by id."""
    named = [dict(zip(shown["columns"], row)) for row in shown["requests"]] + [
        dict(zip(shown["end_columns"], r)) for r in shown["ended"]
    ]
    return {row["id"]: row for row in named}


def test_steps_are_told_with_their_chunks_and_times():
    replica = Recorded()
    replica.submit("long", 150, tokens=3)
    replica.run()
    shown = replica.view()
    number = rows(shown)["long"]["number"]
    chunks = [step["chunks"] for step in shown["steps"]]
    assert chunks == [
        [[number, [0], 0, 64, 0]],
        [[number, [0], 64, 64, 0]],
        [[number, [0], 128, 22, 0]],
        [[number, [0], 150, 1, 1]],
        [[number, [0], 151, 1, 1]],
    ]
    assert shown["names"] == {str(number): ["long", 0]}
    assert [step["decodes"] for step in shown["steps"]] == [[], [], [], [1], [1]]
    assert [step["spans"] for step in shown["steps"]] == [
        [[pytest.approx(n / 10), pytest.approx((n + 1) / 10)]] for n in range(5)
    ]
    assert all(
        step["took"] == pytest.approx(0.1) and step["predicted"] > 0 for step in shown["steps"]
    )


def test_only_steps_that_were_not_told_yet_are_told_again():
    replica = Recorded()
    replica.submit("r", 10, tokens=9)
    replica.run(3)
    first = replica.view()
    assert first["next"] == 3 and not first["more"]
    replica.run(2)
    assert [step["number"] for step in replica.view(first["next"])["steps"]] == [3, 4]
    assert replica.view(5)["steps"] == [] and replica.view(5)["next"] == 5
    assert replica.view(10**9)["next"] == 5


def test_many_steps_are_told_in_parts():
    replica = Recorded()
    replica.submit("r", 10, tokens=view.STEPS + 20)
    replica.run()
    first = replica.view()
    assert len(first["steps"]) == view.STEPS == first["next"] and first["more"]
    rest = replica.view(first["next"])
    assert [step["number"] for step in rest["steps"]] == list(
        range(view.STEPS, view.STEPS + 20)
    ) and not rest["more"]


def test_a_step_in_flight_is_told_with_when_it_should_end():
    replica = Recorded(stages=2)
    replica.submit("a", 64)
    replica.submit("b", 64)
    assert replica.issue() and replica.issue()
    first, second = replica.view()["flying"]
    (enters, leaves), (follows, ends) = first["spans"]
    assert (enters, follows) == (0, leaves) and ends == pytest.approx(2 * first["predicted"])
    assert second["spans"][0][0] == leaves and second["spans"][1][0] == pytest.approx(
        2 * first["predicted"]
    )


def test_no_stage_has_two_steps_at_once_and_the_last_one_ends_when_it_was_read():
    replica = Recorded(stages=3)
    ends = []
    for name in "abc":
        replica.submit(name, 150, tokens=5)
    dice = np.random.default_rng(0)
    while True:
        while len(replica.flights) < 3 and replica.issue():
            replica.now += 0.001
        if not replica.flights:
            break
        replica.read(float(dice.choice([0.0001, 0.01, 0.3])))
        ends.append(replica.now)
    steps = replica.view()["steps"]
    assert [step["spans"][-1][1] for step in steps] == pytest.approx(ends)
    for step in steps:
        assert step["spans"][0][0] >= step["issued"]
        assert all(start <= stop for start, stop in step["spans"])
        assert all(before[1] <= after[0] for before, after in zip(step["spans"], step["spans"][1:]))
    for before, after in zip(steps, steps[1:]):
        assert all(one[1] <= other[0] + 1e-6 for one, other in zip(before["spans"], after["spans"]))


def test_a_prompt_on_several_lanes_is_told_with_all_that_hold_it():
    replica = Recorded(lanes=3, lane_tokens=32)
    replica.submit("wide", 100)
    replica.run()
    prefills = [
        chunk for step in replica.view()["steps"] for chunk in step["chunks"] if not chunk[4]
    ]
    assert prefills[-1][1] == [0, 1, 2]
    assert [chunk[2:4] for chunk in prefills] == [[0, 64], [64, 36]]


def test_requests_are_told_with_their_state_and_objectives():
    replica = Recorded(seqs=2, chunk=32)
    replica.submit("decodes", 16, tokens=50, ttft=5.0, tpot=0.5)
    replica.run(3)
    replica.submit("prefills", 96, ttft=9.0)
    replica.run(2)
    replica.submit("waits", 32, ttft=2.0)
    found = rows(shown := replica.view())
    assert [found[id]["state"] for id in ("decodes", "prefills", "waits")] == [
        "decoding",
        "prefilling",
        "waiting",
    ]
    assert (shown["running"], shown["waiting"]) == (2, 1)
    assert found["decodes"]["ttft"] == pytest.approx(0.1) and found["decodes"][
        "tpot"
    ] == pytest.approx(0.1)
    assert (
        found["decodes"]["ttft_given"],
        found["decodes"]["tpot_given"],
        found["decodes"]["slack"],
    ) == (5.0, 0.5, None)
    assert (
        found["prefills"]["prefilled"] == 64
        and found["prefills"]["ttft"] is None
        and found["prefills"]["lane"] == 0
    )
    assert 0 < found["waits"]["slack"] < 2.0 and found["waits"]["relative_slack"] == pytest.approx(
        found["waits"]["slack"] / 2
    )


def test_who_waits_is_told_by_slack_and_those_left_out_are_counted():
    replica = Recorded(seqs=1)
    for place in range(view.WAITING + 30):
        replica.submit(str(place), 8, tokens=1, ttft=1000.0 - place)
    shown = replica.view()
    slack = [dict(zip(shown["columns"], row))["relative_slack"] for row in shown["requests"]]
    assert len(slack) == view.WAITING and slack == sorted(slack)
    assert shown["requests"][0][view.ID] == str(view.WAITING + 29)
    assert shown["left_out"] == {"running": 0, "waiting": 30, "ended": 0}


def test_who_ended_is_told_for_a_minute():
    replica = Recorded()
    replica.submit("done", 40, tokens=5, tpot=0.05)
    replica.submit("gone", 40, tokens=1000)
    replica.run(8)
    replica.scheduler.cancel("gone", replica.now)
    found = rows(replica.view())
    assert found["done"]["state"] == "length" and found["done"]["generated"] == 5
    assert found["done"]["ttft"] == pytest.approx(0.1)
    assert found["done"]["tpot"] == pytest.approx(0.1) and found["done"]["tpot_given"] == 0.05
    assert found["gone"]["state"] == "cancelled"
    assert found["done"]["number"] in {
        chunk[0] for step in replica.view()["steps"] for chunk in step["chunks"]
    }
    replica.now += journal.END_SECONDS + 1
    assert not replica.view()["ended"]


def test_one_that_ended_while_it_waited_has_no_time_to_its_first_token():
    replica = Recorded(seqs=1)
    replica.submit("runs", 8, tokens=100)
    replica.submit("waits", 8)
    replica.run(2)
    replica.scheduler.cancel("waits", replica.now)
    row = rows(replica.view())["waits"]
    assert (row["number"], row["ttft"], row["tpot"], row["state"]) == (
        journal.NO_NUMBER,
        None,
        None,
        "cancelled",
    )


def test_pages_are_told_by_lane():
    replica = Recorded(lanes=2, pages=50)
    replica.submit("a", 32, tokens=1)
    replica.submit("b", 64, tokens=1000)
    replica.run(3)
    pages = replica.view()["pages"]
    assert [sum(lane) for lane in pages] == [50, 50]
    free, cached, held = map(sum, zip(*pages))
    assert (free, cached, held) == (93, 2, 5)


def test_reads_and_copies_are_shown_by_lane():
    replica = Recorded(lanes=2, pages=50)
    replica.submit("a", 64, tokens=1000)
    replica.run(3)
    cache = replica.scheduler.cache
    shown = replica.view()
    assert (shown["reads"], shown["copied"], shown["segment"]) == ([5, 0], [0, 0], 1)
    page = cache.layouts[0].pages[0]
    cache.pages.copy(page, 1)
    assert replica.view()["copied"] == [1, 1]


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(journal, "STEPS", 50)
    monkeypatch.setattr(journal, "NAMES", 8)
    replica = Recorded()
    for place in range(40):
        replica.submit(str(place), 8, tokens=10)
    replica.run()
    assert (
        len(replica.journal.steps) == 50
        and len(replica.journal.names) == 8
        and not replica.journal.running
    )
    assert replica.journal.rows == sum(step.seq.size for step in replica.journal.steps)
    monkeypatch.setattr(journal, "ROWS", 20)
    replica.submit("last", 8, tokens=3)
    replica.run()
    assert replica.journal.rows <= 20
    replica.now += 2 * journal.SECONDS
    replica.submit("later", 8, tokens=1)
    replica.run()
    assert len(replica.journal.steps) == 1


@pytest.fixture(scope="module")
def crowded() -> Recorded:
    return crowd()


def test_a_view_of_a_crowd_is_small_and_little_work(crowded):
    since = crowded.view()["next"] - 25  # half a second of steps of 20 ms
    take = lambda: Snapshot.take(crowded.journal, crowded.scheduler, crowded.now, since).shown()
    shown = take()
    assert shown["left_out"] == {"running": 0, "waiting": 4096 - view.WAITING, "ended": 0}
    assert len(shown["steps"]) == 25 and len(json.dumps(shown)) < 200_000
    assert calls_of(take) < CALLS_OF_A_VIEW


def test_recording_a_step_is_no_more_work_for_a_crowd_than_for_one(crowded):
    alone = Recorded()
    alone.submit("alone", 16, tokens=1000)
    alone.run(1)

    def calls_to_record(replica: Recorded) -> int:
        batch = replica.scheduler.start(replica.now)
        bus = EventBus()
        Journal(1, 0.0).listen(bus)

        def record() -> None:
            bus.publish(StepIssued(batch, None, 1.0))
            bus.publish(StepRead(batch, 1.5, 0.5, comparable=True))

        return calls_of(record)

    assert calls_to_record(crowded) == calls_to_record(alone)
