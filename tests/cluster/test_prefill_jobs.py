"""Members with roles: who computes a prompt, who decodes, and that no request suffers when either
of them refuses, dies or is cancelled."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Progress
from jaxserve.api.request import KvSource, Slo
from tests.cluster.fakes import BLOCK, LONG, SHORT, RoleCluster, RoleReplica, assert_right, make
from tests.waiting import eventually

WHOLE = len(LONG) // BLOCK


def source_of(fake: RoleReplica) -> KvSource | None:
    """From where the last user's request that a fake took is to fetch KV."""
    return fake.own[-1].kv_source


def job_source(cluster: RoleCluster, prefill: RoleReplica) -> KvSource:
    """The KV that a prefill job makes on a fake."""
    return KvSource(cluster.address(prefill), WHOLE, prefill.jobs[-1].id, BLOCK)


# --- where a request goes


def test_a_prompt_is_computed_where_it_is_prefilled_and_fetched_where_it_is_decoded(cluster):
    prefill, decode = make("prefill"), make("decode")
    both = cluster(prefill, decode)
    heard = both.serve(cache_salt="tenant", slo=Slo(ttft=3.0), priority=2, deadline=1e9)
    assert_right(heard)
    (job,) = prefill.jobs
    assert job.prompt.tolist() == LONG and job.sampling.max_tokens == 1
    assert job.sampling.temperature == 0 and job.sampling.n == 1 and job.guide is None
    assert (job.cache_salt, job.slo, job.priority, job.deadline) == (
        "tenant", Slo(ttft=3.0), 2, 1e9,
    )  # fmt: skip
    assert not prefill.own and not decode.jobs
    assert source_of(decode) == job_source(both, prefill)
    eventually(both.idle)


def test_a_prompt_of_few_blocks_is_computed_where_it_is_decoded(cluster):
    prefill, decode = make("prefill"), make("decode")
    heard = cluster(prefill, decode).serve(prompt=SHORT)
    assert_right(heard, SHORT)
    assert not prefill.seen and source_of(decode) is None


@pytest.mark.parametrize("fields", [{"bypass_prefix_cache": True}, {"prompt_logprobs": 0}])
def test_what_must_be_computed_anew_is_computed_where_it_is_decoded(cluster, fields):
    prefill, decode = make("prefill"), make("decode")
    assert_right(cluster(prefill, decode).serve(**fields))
    assert not prefill.seen and source_of(decode) is None


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_without_host_memory_on_both_sides_prompts_are_computed_where_they_are_decoded(
    cluster, role, caplog
):
    prefill, decode = make("prefill"), make("decode")
    (prefill if role == "prefill" else decode).host_cache_gib = 0.0
    assert_right(cluster(prefill, decode).serve())
    assert not prefill.seen and source_of(decode) is None
    assert f"has the role {role} and moves no KV" in caplog.text


@pytest.mark.parametrize(
    "layouts, sizes, computed",
    [
        (("a", "a"), (BLOCK, BLOCK), "prefill"),
        (("a", "b"), (BLOCK, BLOCK), "decode"),
        (("a", ""), (BLOCK, BLOCK), "decode"),
        (("a", "a"), (BLOCK, 2 * BLOCK), "decode"),
        (("", ""), (BLOCK, 2 * BLOCK), "prefill"),
    ],
)
def test_kv_of_other_layers_or_windows_of_other_blocks_is_not_fetched(
    cluster, layouts, sizes, computed
):
    prefill, decode = (
        make(role, block_size=size) for role, size in zip(("prefill", "decode"), sizes)
    )
    prefill.cache_layout, decode.cache_layout = layouts
    assert_right(cluster(prefill, decode).serve())
    assert bool(prefill.seen) == (computed == "prefill") == (source_of(decode) is not None)


def test_a_member_that_has_the_prefix_decodes_without_another_one(cluster):
    prefill, one, other = make("prefill"), make("decode"), make("decode")
    both = cluster(prefill, one, other)
    other.cache(LONG, WHOLE)
    for number in range(3):
        both.serve(str(number))
    assert not prefill.seen and not one.seen and len(other.own) == 3


def test_prompts_are_computed_by_the_member_that_has_most_of_them(cluster):
    one, other, decode = make("prefill"), make("prefill"), make("decode")
    both = cluster(one, other, decode)
    other.cache(LONG, 3)
    for number in range(3):
        both.serve(str(number))
    assert not one.seen and len(other.jobs) == 3


def test_requests_are_spread_over_members_that_prefill_and_that_decode(cluster):
    fakes = [make("prefill", True), make("prefill", True)]
    fakes += [make("decode", True), make("decode", True)]
    four = cluster(*fakes)
    for number in range(8):
        four.submit(str(number), prompt=[number, *LONG])
    assert [len(fake.jobs) for fake in fakes] == [4, 4, 0, 0]
    eventually(lambda: sorted(len(fake.own) for fake in fakes)[2:] == [4, 4])


def test_mixed_members_serve_whole_requests_beside_the_others(cluster):
    prefill, decode, mixed = make("prefill", True), make("decode"), make("mixed")
    three = cluster(prefill, decode, mixed)
    heard = [three.submit(str(number), prompt=[number, *LONG]) for number in range(4)]
    eventually(lambda: mixed.own)
    assert not mixed.jobs and source_of(mixed) is None
    prefill.paused = False
    eventually(lambda: all(one.ends for one in heard))
    eventually(three.idle)


# --- roles of which there is none


def test_without_members_that_prefill_those_that_decode_compute_prompts(cluster):
    decode = make("decode")
    heard = cluster(decode).serve()
    assert_right(heard)
    assert source_of(decode) is None


def test_without_members_that_decode_the_others_serve_whole_requests(cluster):
    prefill, decode = make("prefill"), make("decode")
    both = cluster(prefill, decode)
    decode.available = False
    heard = both.serve()
    assert_right(heard)
    assert not prefill.jobs and prefill.own


def test_full_members_that_decode_do_not_send_users_to_those_that_prefill(cluster):
    prefill, decode = make("prefill", True), make("decode", True, max_queue=1)
    both = cluster(prefill, decode)
    both.submit("first")
    eventually(lambda: decode.own)
    heard = both.serve("second")
    assert heard.end.error.status == "RESOURCE_EXHAUSTED" and not prefill.own
    eventually(lambda: [*prefill.requests] == ["first#prefill"])


# --- requests that wait for their prompts


def waiting(cluster, *others: RoleReplica, **settings):
    """A cluster whose first member prefills and has begun with nothing."""
    prefill = make("prefill", True)
    prefill.busy = True
    return prefill, cluster(prefill, *others, **settings)


def begin(prefill: RoleReplica, id: str = "r") -> None:
    """Has a member tell that it has computed some of a request's prompt."""
    prefill.requests[f"{id}#prefill"].sink([Progress(0, 16, len(LONG))])


def test_a_request_is_sent_to_be_decoded_once_some_of_its_prompt_is_computed(cluster):
    decode = make("decode")
    prefill, both = waiting(cluster, decode)
    heard = both.submit(slo=Slo(ttft=60.0))
    assert prefill.jobs and both.members[1].promised == len(LONG) + 5
    assert not both.members[1].requests, "it takes no slot there"
    for _ in range(3):
        both.conductor.check()
    assert not decode.seen and not heard.events
    begin(prefill)
    eventually(lambda: heard.ends)
    assert_right(heard)
    assert source_of(decode) == job_source(both, prefill)
    eventually(both.idle)


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_a_request_that_waits_for_its_prompt_ends_at_once(cluster, end):
    decode = make("decode")
    prefill, both = waiting(cluster, decode)
    heard = both.submit()
    if end == "cancel":
        assert both.conductor.cancel("r") is True
        assert heard.end.reason == "cancelled"
    else:
        both.conductor.close()
        assert heard.end.error.status == "UNAVAILABLE"
    eventually(lambda: prefill.cancelled == ["r#prefill"])
    assert not decode.seen
    eventually(both.idle)


def test_a_request_goes_on_elsewhere_when_the_member_that_was_to_prefill_is_lost(cluster):
    decode = make("decode")
    prefill, both = waiting(cluster, decode)
    heard = both.submit()
    prefill.alive = False
    eventually(lambda: heard.ends)
    assert_right(heard)
    assert source_of(decode) is None


def test_a_request_whose_deadline_comes_while_it_waits_ends_with_that_reason(cluster):
    decode = make("decode")
    prefill, both = waiting(cluster, decode)
    heard = both.submit(deadline=both.conductor.now() + 0.01)
    time.sleep(0.02)
    prefill.cancel("r#prefill", "deadline")  # as a replica does
    eventually(lambda: heard.ends)
    assert heard.end.reason == "deadline" and not decode.seen


def test_a_prompt_that_would_be_late_is_computed_elsewhere_once_that_is_earlier(cluster):
    decode = make("decode")
    prefill, both = waiting(cluster, decode)
    for member in both.members:
        member.prefill_costs.scale = 10.0  # 0.001 s per token
    both.members[0].work.begin_prefill("ahead", 9.0, both.conductor.now())
    patient = both.submit("patient", slo=Slo(ttft=60.0))
    hurried = both.submit("hurried", slo=Slo(ttft=2.0))
    eventually(lambda: hurried.ends)
    assert_right(hurried)
    assert source_of(decode) is None and prefill.cancelled == ["hurried#prefill"]
    assert not patient.events and [request.id for request in decode.own] == ["hurried"]


def test_a_prompt_stays_where_it_waits_if_it_would_be_later_elsewhere(cluster):
    decode = make("decode")
    prefill, both = waiting(cluster, decode)
    both.members[1].prefill_costs.scale = 2000.0  # 0.2 s per token
    both.members[0].work.begin_prefill("ahead", 9.0, both.conductor.now())
    both.submit(slo=Slo(ttft=2.0))
    for _ in range(3):
        both.conductor.check()
    assert not decode.seen and not prefill.cancelled


# --- members that refuse and die


def test_a_full_member_that_prefills_is_passed_over(cluster):
    full, free, decode = make("prefill", True, max_queue=0), make("prefill"), make("decode")
    three = cluster(full, free, decode)
    for number in range(3):
        heard = three.serve(str(number))
        assert_right(heard)
        assert source_of(decode) == job_source(three, free)
    assert not full.seen


def test_where_all_that_prefill_refuse_the_prompt_is_computed_where_it_is_decoded(cluster):
    refusing, unreachable, decode = make("prefill", max_queue=0), make("prefill"), make("decode")
    unreachable.fault = OSError("connection reset")
    three = cluster(refusing, unreachable, decode)
    heard = three.serve()
    assert_right(heard)
    assert source_of(decode) is None
    eventually(three.idle)


def test_a_member_that_dies_while_it_prefills_leaves_the_request_where_it_is(cluster):
    prefill, decode = make("prefill", True), make("decode", True)
    both = cluster(prefill, decode)
    heard = both.submit()
    eventually(lambda: decode.own)
    prefill.die()
    eventually(lambda: not both.members[0].work.requests)
    decode.paused = False
    eventually(lambda: heard.ends)
    assert_right(heard)
    assert len(decode.own) == 1
    eventually(both.idle)


def test_a_silent_member_that_prefills_is_forgotten(cluster):
    prefill, decode = make("prefill", True), make("decode", True)
    both = cluster(prefill, decode)
    heard = both.submit()
    prefill.alive = False
    eventually(lambda: not both.members[0].work.requests)
    decode.paused = False
    eventually(lambda: heard.ends)
    assert_right(heard)


def test_a_full_member_that_decodes_is_passed_over_with_the_same_source(cluster):
    prefill = make("prefill", True)
    full, free = make("decode", max_queue=0), make("decode")
    three = cluster(prefill, full, free)
    heard = three.serve()
    assert_right(heard)
    assert len(prefill.jobs) == 1
    assert source_of(free) == job_source(three, prefill)
    eventually(three.idle)


def test_another_member_decodes_from_the_same_source_where_one_dies(cluster):
    prefill = make("prefill", True)
    decoding = [make("decode", True), make("decode", True)]
    three = cluster(prefill, *decoding)
    heard = three.submit()
    eventually(lambda: any(fake.own for fake in decoding))
    (dying,) = [fake for fake in decoding if fake.requests]
    (other,) = [fake for fake in decoding if fake is not dying]
    dying.die()
    eventually(lambda: other.own)
    assert source_of(other) == source_of(dying) and len(prefill.jobs) == 1
    other.paused = False
    eventually(lambda: heard.ends)
    assert_right(heard)
    eventually(three.idle)


def test_where_both_die_another_pair_serves(cluster):
    prefilling = [make("prefill", True), make("prefill", True)]
    decoding = [make("decode", True), make("decode", True)]
    four = cluster(*prefilling, *decoding)
    heard = four.submit()
    eventually(lambda: any(fake.own for fake in decoding))
    for fakes in (prefilling, decoding):
        next(fake for fake in fakes if fake.requests).die()
    (prefill,) = [fake for fake in prefilling if fake.alive]
    (decode,) = [fake for fake in decoding if fake.alive]
    eventually(lambda: decode.own)
    assert source_of(decode) == job_source(four, prefill)
    decode.paused = False
    eventually(lambda: heard.ends)
    assert_right(heard)
    eventually(four.idle)


def test_a_request_with_tokens_goes_on_where_its_member_dies(cluster):
    prefill = make("prefill")
    decoding = [make("decode", step_seconds=0.01), make("decode", step_seconds=0.01)]
    three = cluster(prefill, *decoding)
    heard = three.submit(tokens=50)
    eventually(lambda: len(heard.tokens) > 2)
    next(fake for fake in decoding if fake.requests).die()
    eventually(lambda: heard.ends)
    assert_right(heard, tokens=50)
    eventually(three.idle)


# --- the end of jobs


def test_a_job_ends_with_its_requests_first_token(cluster):
    prefill, decode = make("prefill", True), make("decode", step_seconds=0.005)
    both = cluster(prefill, decode)
    heard = both.submit(tokens=2000)
    eventually(lambda: heard.tokens)
    eventually(lambda: prefill.cancelled == ["r#prefill"])
    assert not heard.ends
    both.conductor.cancel("r")
    eventually(both.idle)


def test_a_cancelled_requests_job_is_cancelled(cluster):
    prefill, decode = make("prefill", True), make("decode", True)
    both = cluster(prefill, decode)
    heard = both.submit()
    eventually(lambda: decode.own and both.members[1].work.requests)
    assert both.conductor.cancel("r") is True
    eventually(lambda: heard.ends)
    assert heard.end.reason == "cancelled"
    eventually(lambda: prefill.cancelled == ["r#prefill"])
    assert decode.cancelled == ["r"]
    eventually(both.idle)


class Slow(RoleReplica):
    """A fake that takes a request only when it is let."""

    def __init__(self, role: str):
        super().__init__(role)
        self.let = threading.Event()
        self.asked = threading.Event()

    def submit(self, request, sink) -> None:
        self.asked.set()
        assert self.let.wait(60)
        super().submit(request, sink)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_request_can_be_cancelled_on_its_way_to_a_member(cluster, role):
    slow = Slow(role)
    slow.paused = True
    other = make("decode" if role == "prefill" else "prefill", True)
    both = cluster(slow, other)
    heard = []
    caller = threading.Thread(target=lambda: heard.append(both.submit()))
    caller.start()
    assert slow.asked.wait(60)
    assert both.conductor.cancel("r", "stop") is True
    slow.let.set()
    caller.join(60)
    eventually(lambda: heard and heard[0].ends)
    assert heard[0].end.reason == "stop" and not heard[0].tokens
    eventually(both.idle)


def test_closing_ends_requests_and_jobs(cluster):
    prefill, decode = make("prefill", True), make("decode", True)
    both = cluster(prefill, decode)
    heard = both.submit()
    both.conductor.close()
    assert heard.end.error.status == "UNAVAILABLE"
    assert not prefill.requests and not decode.requests


# --- all of it at random moments

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "submit", "cancel", "die", "hang", "wake", "wait"]),
        st.integers(0, 7),
    ),
    min_size=5,
    max_size=40,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS)
def test_whatever_dies_and_is_cancelled_every_request_ends_once_and_nothing_is_left(steps):
    fakes = [make(role, step_seconds=0.001, chunk=50) for role in ("prefill", "decode")]
    fakes += [make(role, step_seconds=0.001, chunk=50) for role in ("prefill", "decode", "mixed")]
    all_of = RoleCluster(*fakes)
    all_of.conductor.start()
    heard = {}
    try:
        for number, (step, choice) in enumerate(steps):
            fake = fakes[choice % len(fakes)]
            if step == "submit":
                prompt = [number, *LONG[: 20 * choice]]
                try:
                    heard[str(number)] = prompt, all_of.submit(str(number), prompt)
                except RequestError as error:
                    assert error.status == "UNAVAILABLE"
            elif step == "cancel" and heard:
                all_of.conductor.cancel(list(heard)[choice % len(heard)])
            elif step == "die":
                fake.die()
            elif step in ("hang", "wake"):
                fake.paused = step == "hang"
            else:
                time.sleep(0.0005 * choice)
        for fake in fakes:
            fake.paused = False
        eventually(lambda: all(one.ends for _, one in heard.values()))
        for prompt, one in heard.values():
            assert len(one.ends) == 1 and one.events[-1] is one.end
            if one.end.reason == "length":
                assert_right(one, prompt)
            else:
                assert one.end.reason in ("cancelled", "error")
        eventually(all_of.idle)
    finally:
        all_of.conductor.close()
