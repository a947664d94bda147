"""What whoever holds a `Replica` relies on, of the live engine, the virtual replica and the fake
of the server's tests alike; the fake has no pages, no steps and no counts of them."""

from __future__ import annotations

import dataclasses
import json

import pytest
from prometheus_client import generate_latest

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Accepted, Event, Finished, Progress, Token
from jaxserve.api.request import Continuation, Slo
from jaxserve.api.sampling import SamplingParams
from jaxserve.replica.protocol import Replica
from tests.replica.holders import HOLDERS, LONG, SCHEDULED, Heard, Holder


@pytest.fixture(params=sorted(HOLDERS))
def idle(request):
    """Holds a replica that is not started."""
    holder = HOLDERS[request.param]()
    yield holder
    holder.replica.close()


@pytest.fixture
def held(idle) -> Holder:
    """Holds a replica that runs."""
    idle.replica.start()
    return idle


def assert_empty(held: Holder) -> None:
    """Nothing runs or waits, and all pages can be had."""
    held.wait(lambda: not held.replica.load().running)
    load = held.replica.load()
    assert (load.running, load.waiting, load.queued_prefill_tokens) == (0, 0, 0)
    assert load.queued_prefill_seconds == pytest.approx(0, abs=1e-9)
    assert load.pages_free + load.pages_cached == load.pages_total > 0


def refused(held: Holder, id: str = "new", **fields) -> RequestError:
    """Returns the reason for which a request is refused; its sink hears nothing."""
    heard = Heard()
    with pytest.raises(RequestError) as found:
        held.replica.submit(held.request(id, **fields), heard)
    assert not heard.events
    return found.value


# --- what it is


def test_it_has_all_that_a_replica_has(idle):
    assert isinstance(idle.replica, Replica)


def test_its_info_is_frozen_and_the_same_at_all_times(held):
    before = held.replica.info
    copy = dataclasses.replace(before)
    heard = held.submit()
    held.wait_ended(heard)
    assert held.replica.info == before == copy
    with pytest.raises(dataclasses.FrozenInstanceError):
        held.replica.info.max_seqs = 1
    held.replica.close()
    assert held.replica.info == copy


def test_its_info_agrees_with_its_load(held):
    info = held.replica.info
    assert held.replica.load().pages_total == info.pages_per_lane * info.mesh.kvp
    assert info.max_seqs > 0 and info.max_queue > 0 and info.max_model_len > 1
    json.dumps(info.summary())


def test_its_clock_never_goes_back(held):
    before = held.replica.now()
    held.wait_ended(held.submit())
    assert held.replica.now() >= before


# --- the events of a request


def test_a_request_is_accepted_makes_progress_has_tokens_and_ends_in_this_order(held):
    heard = held.submit(prompt=100, tokens=5)
    held.wait_ended(heard)
    kinds = [type(event) for event in heard.events]
    order = [Accepted, Progress, Token, Finished]
    assert kinds == sorted(kinds, key=order.index)
    assert kinds.count(Accepted) == kinds.count(Finished) == 1 and kinds.count(Token) == 5
    progress = [event for event in heard.events if isinstance(event, Progress)]
    assert [event.prefilled for event in progress] == sorted(event.prefilled for event in progress)
    assert all(event.total == 100 and event.prefilled <= 100 for event in progress)
    assert heard.accepted[0].queue_position == 0


def test_an_end_says_what_was_used_and_how_long_it_took(held):
    heard = held.submit(prompt=30, tokens=7)
    held.wait_ended(heard)
    end = heard.end
    assert (end.index, end.reason, end.error) == (0, "length", None)
    assert (end.usage.prompt, end.usage.completion) == (30, 7)
    assert 0 <= end.timing.queued <= end.timing.first_token <= end.timing.total


@pytest.mark.parametrize(
    "slo, verdict",
    [
        (Slo(ttft=100.0, tpot=100.0), True),
        (Slo(ttft=1e-3, tpot=1e-4), False),
        (Slo(ttft=100.0, tpot=1e-4), False),
    ],
)
def test_an_end_says_whether_both_objectives_were_kept(held, slo, verdict):
    heard = held.submit(prompt=30, tokens=7, slo=slo)
    held.wait_ended(heard)
    assert heard.end.in_time is verdict


def test_nothing_is_said_of_what_its_caller_gave_up_in_time(held):
    heard = held.submit(tokens=LONG, slo=Slo(ttft=100.0, tpot=100.0))
    held.wait(lambda: heard.tokens)
    held.replica.cancel("r")
    held.wait_ended(heard)
    assert heard.end.in_time is None


def test_what_failed_was_not_in_time(held):
    slo = Slo(ttft=100.0, tpot=100.0)
    heard = held.submit(tokens=LONG, slo=slo, deadline=held.replica.now() + 0.05)
    held.wait_ended(heard)
    assert (heard.end.reason, heard.end.in_time) == ("deadline", False)


def test_the_last_token_and_the_end_come_in_one_call(held):
    heard = held.submit(n=2, tokens=3)
    held.wait_ended(heard, completions=2)
    for end in heard.ends:
        (call,) = [events for events in heard.calls if end in events]
        before = call[call.index(end) - 1]
        assert isinstance(before, Token) and before.index == end.index


def test_each_of_n_completions_has_its_tokens_and_one_end(held):
    heard = held.submit(n=3, tokens=6)
    held.wait_ended(heard, completions=3)
    assert len(heard.accepted) == 1
    for index in range(3):
        assert sum(isinstance(event, Token) for event in heard.of(index)) == 6
        assert isinstance(heard.of(index)[-1], Finished)
    assert sorted(end.index for end in heard.ends) == [0, 1, 2]
    assert_empty(held)


def test_a_completion_goes_on_with_the_tokens_that_another_replica_put_out(held):
    sampled = SamplingParams(seed=7, n=2, max_tokens=9, ignore_eos=True, frequency_penalty=1.0)
    request = dataclasses.replace(held.request("whole"), sampling=sampled)
    whole, rest = Heard(), Heard()
    held.replica.submit(request, whole)
    held.wait_ended(whole, completions=2)
    first = [event.id for event in whole.of(1)[:4]]
    first_token = request.arrival + whole.ends[1].timing.first_token
    going_on = Continuation({1: first}, first_token)
    held.replica.submit(dataclasses.replace(request, id="rest", continuation=going_on), rest)
    held.wait_ended(rest)
    assert [event.id for event in rest.tokens] == [event.id for event in whole.of(1)[4:-1]]
    usage = rest.end.usage
    assert (rest.end.index, usage.prompt, usage.completion) == (1, 20, 9)
    assert rest.end.timing.first_token == pytest.approx(whole.ends[1].timing.first_token, abs=0.01)
    assert_empty(held)


def test_an_embedded_prompt_ends_without_tokens(held):
    """It ends with the embedding, if the replica computes anything."""
    heard = held.submit(tokens=50, embed=True)
    held.wait_ended(heard)
    end = heard.end
    assert not heard.tokens and end.reason == "stop"
    assert (end.usage.prompt, end.usage.completion) == (20, 0)
    assert end.embedding is None or end.embedding.shape == (held.replica.info.d_model,)
    assert_empty(held)


def test_more_than_run_at_once_wait_and_all_end(held):
    count = min(held.replica.info.max_seqs + 2, held.replica.info.max_queue)
    heard = [held.submit(str(number), prompt=10 + number, tokens=8) for number in range(count)]
    held.wait_ended(*heard)
    assert [one.end.reason for one in heard] == ["length"] * count
    assert [one.end.usage.completion for one in heard] == [8] * count
    assert_empty(held)


def test_what_was_submitted_before_the_start_runs_after_it(idle):
    heard = idle.submit()
    assert [type(event) for event in heard.events] == [Accepted]
    idle.replica.start()
    idle.wait_ended(heard)
    assert heard.end.reason == "length"


# --- refusals


def test_an_id_in_use_is_refused_and_can_be_used_again_once_it_ended(held):
    first = held.submit("same", tokens=LONG)
    assert refused(held, "same").status == "ALREADY_EXISTS"
    assert held.replica.cancel("same")
    second = held.submit("same")
    held.wait_ended(first, second)
    assert (first.end.reason, second.end.reason) == ("cancelled", "length")
    assert_empty(held)


def test_a_full_queue_refuses_and_those_in_it_are_served(idle):
    count = idle.replica.info.max_queue
    heard = [idle.submit(str(number)) for number in range(count)]
    error = refused(idle)
    assert (error.status, error.reason) == ("RESOURCE_EXHAUSTED", "queue")
    idle.replica.start()
    idle.wait_ended(*heard)
    again = idle.submit("new")
    idle.wait_ended(again)
    assert {one.end.reason for one in (*heard, again)} == {"length"}
    assert_empty(idle)


def test_a_prompt_that_can_never_fit_is_refused(held):
    error = refused(held, prompt=held.replica.info.max_model_len)
    assert (error.status, error.field) == ("INVALID_ARGUMENT", "prompt")
    assert_empty(held)


# --- ends that are asked for


def test_unknown_requests_cannot_be_ended(held):
    assert held.replica.cancel("unknown") is False
    assert held.replica.stop("unknown", 0) is False
    heard = held.submit()
    held.wait_ended(heard)
    assert held.replica.cancel("r") is False and held.replica.stop("r", 0) is False
    assert len(heard.ends) == 1


@pytest.mark.parametrize("reason", ["cancelled", "stop"])
def test_a_cancelled_request_ends_with_the_reason_that_was_given(held, reason):
    heard = held.submit(tokens=LONG)
    held.wait(lambda: len(heard.tokens) > 2)
    assert held.replica.cancel("r", reason) is True
    held.wait_ended(heard)
    assert heard.events[-1] is heard.end and heard.end.reason == reason
    assert heard.end.usage.completion == len(heard.tokens) < LONG
    assert_empty(held)


def test_what_waits_can_be_cancelled(idle):
    heard = idle.submit(n=2)
    assert idle.replica.cancel("r") is True
    idle.replica.start()
    idle.wait_ended(heard, completions=2)
    assert [end.reason for end in heard.ends] == ["cancelled"] * 2 and not heard.tokens
    assert_empty(idle)


def test_one_completion_can_be_stopped_and_the_others_go_on(held):
    heard = held.submit(n=3, tokens=100)
    held.wait(lambda: any(isinstance(event, Token) for event in heard.of(1)))
    assert held.replica.stop("r", 1) is True
    held.wait(lambda: isinstance(heard.of(1)[-1], Finished))
    assert held.replica.stop("r", 1) is False
    held.wait_ended(heard, completions=3)
    assert {end.index: end.reason for end in heard.ends} == {0: "length", 1: "stop", 2: "length"}
    tokens = [sum(isinstance(event, Token) for event in heard.of(index)) for index in range(3)]
    assert tokens[0] == tokens[2] == 100 > tokens[1]
    assert_empty(held)


def test_a_deadline_ends_what_runs(held):
    held.wait_ended(held.submit("first"))  # a live replica has compiled what it needs
    deadline = held.replica.now() + 0.1
    heard = held.submit(tokens=LONG, deadline=deadline)
    other = held.submit("other", tokens=30)
    held.wait_ended(heard, other)
    assert (heard.end.reason, other.end.reason) == ("deadline", "length")
    assert heard.end.usage.completion == len(heard.tokens) < LONG
    assert held.replica.now() >= deadline
    assert_empty(held)


def test_a_deadline_that_has_passed_ends_what_waits(idle):
    heard = idle.submit(deadline=idle.replica.now())
    idle.replica.start()
    other = idle.submit("other")
    idle.wait_ended(heard, other)
    assert heard.end.reason == "deadline" and not heard.tokens
    assert other.end.reason == "length"


# --- sinks


@pytest.mark.parametrize("kind", [Accepted, Token, Finished])
def test_a_sink_that_raises_is_cancelled_and_nothing_else_suffers(held, kind, caplog):
    heard: list[Event] = []

    def broken(events):
        heard.extend(events)
        if any(isinstance(event, kind) for event in events):
            raise ValueError("no ear")

    good = held.submit("good", tokens=30)
    held.replica.submit(held.request("bad", prompt=25, tokens=20), broken)
    held.wait_ended(good)
    assert good.end.reason == "length" and len(good.tokens) == 30
    assert_empty(held)
    faults = [place for place, event in enumerate(heard) if isinstance(event, kind)]
    assert faults and not any(isinstance(event, kind) for event in heard[: faults[0]])
    assert sum(isinstance(event, Token) for event in heard) <= 20
    if kind is not Finished:
        assert not any(isinstance(event, Finished) for event in heard), "it hears no more"
    assert held.replica.alive
    again = held.submit("bad")
    held.wait_ended(again)
    assert again.end.reason == "length"


def test_a_sink_may_submit_and_cancel(held):
    second = Heard()
    answers = []

    def first(events):
        if any(isinstance(event, Finished) for event in events):
            held.replica.submit(held.request("second"), second)
            answers.extend([held.replica.cancel("first"), held.replica.cancel("third")])

    third = held.submit("third", tokens=LONG)
    held.replica.submit(held.request("first", prompt=30), first)
    held.wait_ended(second, third)
    assert answers == [False, True]
    assert (second.end.reason, third.end.reason) == ("length", "cancelled")
    assert_empty(held)


# --- questions


@pytest.mark.parametrize("idle", sorted(SCHEDULED), indirect=True)
def test_load_counts_what_waits_and_what_runs(idle):
    total = idle.replica.info.max_seqs + 2
    heard = [idle.submit(str(number), tokens=LONG // 2) for number in range(total)]
    load = idle.replica.load()
    assert (load.running, load.waiting) == (0, total)
    assert load.queued_prefill_tokens == 20 * total and load.queued_prefill_seconds > 0
    idle.replica.start()
    idle.wait(lambda: all(one.tokens for one in heard[: total - 2]))
    load = idle.replica.load()
    assert (load.running, load.waiting) == (total - 2, 2)
    assert load.pages_free < load.pages_total
    idle.wait_ended(*heard)
    assert_empty(idle)


def test_no_step_is_overdue_where_all_goes_well(held):
    held.wait_ended(held.submit())
    assert held.replica.overdue() is None


def test_a_posted_command_runs_before_the_next_step_and_may_submit(held):
    heard = Heard()
    request = held.request()
    held.replica.post(lambda: held.replica.submit(request, heard))
    held.wait_ended(heard)
    assert heard.end.reason == "length"
    held.replica.close()
    ran = []
    held.replica.post(lambda: ran.append(1))
    assert ran == [1], "at once where nothing runs any more"


def test_a_view_names_model_mesh_and_whether_it_lives(held):
    shown = held.replica.view()
    info = held.replica.info
    assert (shown["model"], shown["mesh"], shown["alive"]) == (info.model, str(info.mesh), True)


@pytest.mark.parametrize("idle", sorted(SCHEDULED), indirect=True)
def test_a_view_is_plain_data_and_goes_on_where_the_last_one_ended(held):
    heard = held.submit("shown", tokens=LONG)
    held.wait(lambda: len(heard.tokens) > 3)
    first = held.replica.view()
    json.dumps(first, allow_nan=False)
    assert first["running"] == 1 and first["waiting"] == 0
    assert "shown" in [dict(zip(first["columns"], row))["id"] for row in first["requests"]]
    before = len(heard.tokens)
    held.wait(lambda: len(heard.tokens) > before + 3)
    second = held.replica.view(first["next"])
    numbers = [step["number"] for step in second["steps"]]
    assert numbers and numbers[0] == first["next"]
    held.replica.cancel("shown")
    assert_empty(held)
    last = held.replica.view()
    assert last["running"] == 0
    ended = [dict(zip(last["end_columns"], row)) for row in last["ended"]]
    assert [(row["id"], row["state"]) for row in ended] == [("shown", "cancelled")]


def test_metrics_count_what_was_refused_before_it_came(held):
    held.replica.count_rejected("concurrency")
    text = generate_latest(held.replica.metrics_registry).decode()
    assert 'jaxserve:early_rejections_total{reason="concurrency"} 1.0' in text


@pytest.mark.parametrize("idle", sorted(SCHEDULED), indirect=True)
def test_metrics_count_what_ended(held):
    held.wait_ended(held.submit(tokens=9))
    text = generate_latest(held.replica.metrics_registry).decode()
    assert 'jaxserve:request_success_total{finished_reason="length"} 1.0' in text
    assert "jaxserve:generation_tokens_total 9.0" in text
    assert "jaxserve:num_requests_waiting 0.0" in text


def test_a_flushed_cache_knows_no_prefix(held):
    prompt = 2 * held.replica.info.block_size + 3
    held.wait_ended(held.submit("first", prompt=prompt))
    assert_empty(held)
    cached = held.replica.load().pages_cached
    assert held.replica.flush_cache() == cached
    assert held.replica.load().pages_cached == 0
    again = held.submit("again", prompt=prompt)
    held.wait_ended(again)
    assert again.end.usage.cached == 0


# --- the end


def test_a_drained_replica_ends_what_it_has_and_takes_no_more(held):
    heard = [held.submit(str(number), tokens=20) for number in range(6)]
    held.replica.drain()
    assert refused(held).status == "UNAVAILABLE"
    held.wait_ended(*heard)
    assert [one.end.reason for one in heard] == ["length"] * 6
    assert refused(held).status == "UNAVAILABLE"
    assert held.replica.alive
    assert_empty(held)


def test_closing_ends_what_runs_and_what_waits_and_refuses_what_comes(held):
    heard = [held.submit(str(number), tokens=LONG) for number in range(6)]
    held.wait(lambda: bool(heard[0].tokens))
    held.replica.close()
    for one in heard:
        assert one.end.reason == "error" and one.end.error.status == "UNAVAILABLE"
        assert one.end.usage.completion == len(one.tokens)
    assert refused(held).status == "UNAVAILABLE"
    assert held.replica.cancel("0") is False
    held.replica.close()


def test_what_was_never_started_can_be_closed(idle):
    heard = idle.submit(n=2)
    idle.replica.close()
    assert [end.reason for end in heard.ends] == ["error"] * 2
    assert {end.error.status for end in heard.ends} == {"UNAVAILABLE"}


# --- what is cached


@pytest.mark.parametrize("idle", sorted(SCHEDULED), indirect=True)
def test_a_listener_hears_which_blocks_are_stored_and_lost(held):
    keys: set[bytes] = set()

    class Listener:
        def stored(self, blocks):
            keys.update(blocks.keys)

        def removed(self, lost, medium):
            keys.difference_update(lost)

        def cleared(self, medium):
            keys.clear()

    replica = held.replica
    replica.post(lambda: replica.block_events.subscribe(Listener()))
    size = replica.info.block_size
    held.wait_ended(held.submit(prompt=3 * size, tokens=2))
    assert len(keys) == 3
    assert replica.flush_cache() == 3 and not keys
