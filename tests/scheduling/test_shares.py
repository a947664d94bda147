"""Fair shares between tenants: who goes first, that each gets its share, and that none starves."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.api.errors import RequestError
from jaxserve.api.request import MAX_TENANT_CHARS
from jaxserve.costs.coefficients import Costs
from jaxserve.scheduling.shares import MOST_DEBT, MOST_IDLE, TenantShares
from jaxserve.settings.schema import CacheConfig, ConfigError, SchedulerConfig
from tests.examples import examples
from tests.scheduling.fakes import Replica

# a prompt of 8 tokens takes 0.08 s, a step at most 0.1 s or so
COSTS = Costs(layers=1, linear_token=0.01, decode_kv=1e-5)
CONFIG = SchedulerConfig(
    max_seqs=4, chunk_tokens=8, policy="slack", chunking="adaptive", max_queue=50
)
CACHE = CacheConfig(block_size=4, pages=64, prefix_caching=False)
NAMES = "abcd"


def replica(config: SchedulerConfig = CONFIG, cache: CacheConfig = CACHE) -> Replica:
    return Replica(config, cache, costs=COSTS)


def spend(shares: TenantShares, name: str, seconds: float, now: float = 0.0) -> None:
    """Has a tenant take a step of `seconds`."""
    number = shares.number(name)
    if len(shares) == 1:
        shares.charge_all(seconds, now)
    else:
        shares.charge(np.array([number]), np.array([seconds]), now)


def turn(shares: TenantShares, name: str) -> int:
    return int(shares.turns[shares.number(name)])


# --- the accounts


def test_time_goes_to_tenants_by_weight_and_steps_take_it_from_those_they_are_for():
    shares = TenantShares({"a": 3.0})
    for name in "ab":
        shares.begin(name, 0.0)
    spend(shares, "b", 1.0)
    assert shares.credits()["a"] == pytest.approx(0.75)
    assert shares.credits()["b"] == pytest.approx(-0.75)
    assert turn(shares, "a") == 0 < turn(shares, "b")


def test_what_tenants_used_is_counted():
    shares = TenantShares({})
    for name, seconds in (("a", 1.0), ("b", 2.0), ("a", 0.5)):
        shares.begin(name, 0.0)
        number = shares.number(name)
        shares.charge(np.array([number]), np.array([seconds]), 0.0)
    assert shares.used == {"a": 1.5, "b": 2.0}


def test_a_tenant_alone_is_in_debt_to_those_who_may_come():
    shares = TenantShares({})
    shares.begin("flood", 0.0)
    for step in range(20):
        spend(shares, "flood", 1.0, float(step))
    shares.begin("new", 20.0)
    assert turn(shares, "new") < turn(shares, "flood")


def test_a_tenant_that_was_alone_is_not_behind_another_for_long():
    """It used what no other wanted."""
    shares = TenantShares({})
    shares.begin("alone", 0.0)
    for step in range(100):
        spend(shares, "alone", 1.0, float(step))
    shares.begin("flood", 100.0)
    for step in range(3):
        spend(shares, "flood", 1.0, 100.0 + step)
    assert turn(shares, "alone") < turn(shares, "flood")


def test_debts_to_others_stay_while_a_tenant_is_alone():
    shares = TenantShares({}, most_debt=20.0)
    for name in "ab":
        shares.begin(name, 0.0)
    for step in range(20):
        spend(shares, "a", 1.0, float(step))
    shares.end("b")
    owed = shares.credits()["a"]
    for step in range(20, 40):
        spend(shares, "a", 1.0, float(step))
    assert shares.credits()["a"] == owed < -5


def test_idle_time_pays_debts_and_credit_and_debt_have_an_end():
    shares = TenantShares({}, most_credit=2.0, most_debt=5.0)
    for name in "ab":
        shares.begin(name, 0.0)
    for _ in range(100):
        spend(shares, "a", 1.0, 0.0)
    assert shares.credits()["a"] == -5.0
    shares.end("b")
    shares.end("a")
    shares.begin("a", 1000.0)
    spend(shares, "a", 0.1, 1000.0)
    assert shares.credits()["a"] == shares.most_credit == 4.0  # four of the largest steps


def test_the_less_indebted_for_its_weight_goes_first():
    shares = TenantShares({"a": 4.0, "c": 2.0})
    for name in "abc":
        shares.begin(name, 0.0)
    spend(shares, "a", 8.0)  # each pays by weight: a gets 4.6 of 8 back, b 1.1, c 2.3
    spend(shares, "b", 7.0)
    spend(shares, "c", 7.0)
    order = sorted("abc", key=lambda name: turn(shares, name))
    per_weight = {n: shares.credits()[n] / {"a": 4.0, "b": 1.0, "c": 2.0}[n] for n in "abc"}
    in_debt = [name for name in order if per_weight[name] <= 0]
    assert in_debt and in_debt == sorted(in_debt, key=lambda name: -per_weight[name])


def test_few_idle_tenants_are_remembered():
    shares = TenantShares({})
    shares.begin("stays", 0.0)
    for number in range(10 * MOST_IDLE):
        name = f"t{number}"
        shares.begin(name, float(number))
        spend(shares, name, 0.001, float(number))
        shares.end(name)
        spend(shares, "stays", 50.0, float(number))
    assert len(shares) <= MOST_IDLE + 2 and "stays" in shares


# --- settings and requests


@pytest.mark.parametrize(
    "text, message",
    [
        ("a", "a: '' is not a number of 0.001 to 1000"),
        ("a:0", "is not a number"),
        ("a:nan", "is not a number"),
        ("a:1;a:2", "a is given more than once"),
        ("a b:1", "is not a name"),
    ],
)
def test_wrong_shares_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(tenant_shares=text)


def test_shares_are_read_from_the_setting():
    assert SchedulerConfig(tenant_shares="team-a:2; b:0.5;").weights == {"team-a": 2.0, "b": 0.5}


def test_a_long_name_of_a_tenant_is_refused():
    with pytest.raises(RequestError, match=f"tenant: must be .* at most {MAX_TENANT_CHARS}"):
        replica().add([1], tenant="x" * (MAX_TENANT_CHARS + 1))


# --- one after the other on a replica


def drive(served: Replica, seconds: float, waiting: dict[str, int], tokens: int = 8) -> dict:
    """Runs steps of `seconds` predicted seconds in all; returns the seconds of each tenant.
    waiting: requests of each tenant that wait at any time."""
    got = dict.fromkeys(waiting, 0.0)
    scheduler = served.scheduler
    charge = scheduler.shares.charge

    def note(numbers, each, now):
        names = {scheduler.shares.number(name): name for name in waiting}
        for number, one in zip(numbers.tolist(), each.tolist()):
            got[names[number]] += one
        charge(numbers, each, now)

    scheduler.shares.charge = note
    end = served.now + seconds
    while served.now < end:
        for name, count in waiting.items():
            there = [one for one in scheduler.slots.queue if one.request.tenant == name]
            for _ in range(count - len(there)):
                served.add([1] * tokens, tenant=name, max_tokens=4, ignore_eos=True)
        batch = served.start()
        assert batch is not None
        served.now += batch.seconds
        served.finish()
    scheduler.shares.charge = charge
    return got


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    a=st.integers(1, 8),
    b=st.integers(1, 8),
    weight=st.sampled_from([0.5, 1.0, 3.0]),
    pages=st.sampled_from([8, 16, 64]),
    slots=st.integers(2, 5),
    policy=st.sampled_from(["fcfs", "slack"]),
)
def test_tenants_that_always_wait_get_their_shares(a, b, weight, pages, slots, policy):
    """Whatever they have waiting, seconds over weight differ by no more than credit, debt and some
    steps, however long they run."""
    config = dataclasses.replace(CONFIG, tenant_shares=f"a:{weight}", policy=policy, max_seqs=slots)
    served = replica(config, dataclasses.replace(CACHE, pages=pages))
    got = drive(served, 120.0, {"a": a, "b": b})
    difference = got["a"] / weight - got["b"]
    assert abs(difference) < (MOST_DEBT / 2 + 2) / min(weight, 1)
    served.drain(2)
    served.check_answers()


def test_without_tenants_a_flood_takes_nearly_all():
    """The same load of one tenant, by its requests: the property above can fail."""
    served = replica(dataclasses.replace(CONFIG, policy="fcfs"))
    for number in range(48):
        served.add([1] * 8, id=f"flood{number}", max_tokens=4, ignore_eos=True)
    served.add([1] * 8, id="guest", max_tokens=4, ignore_eos=True)
    order = first_tokens(served)
    assert order[-1] == "guest"


def first_tokens(served: Replica) -> list[str]:
    """Runs to the end; returns requests in the order of their first tokens."""
    order: list[str] = []
    while served.scheduler.requests.entries:
        served.start()
        if served.flight:
            served.finish()
        for id, heard in served.heard.items():
            if id not in order and any(type(event).__name__ == "Token" for event in heard):
                order.append(id)
    return order


def test_a_guest_passes_the_flood_that_came_before_it():
    served = replica(dataclasses.replace(CONFIG, policy="fcfs"))
    for number in range(48):
        served.add([1] * 8, id=f"flood{number}", tenant="flood", max_tokens=4, ignore_eos=True)
    for _ in range(3):
        served.start()
        served.finish()
    served.add([1] * 8, id="guest", tenant="guest", max_tokens=4, ignore_eos=True)
    assert first_tokens(served).index("guest") < 8


def test_a_flood_that_holds_all_slots_makes_way():
    served = replica()
    for _ in range(20):
        served.add([1] * 8, tenant="flood", max_tokens=40, ignore_eos=True)
    for _ in range(20):
        served.start()
        served.finish()
    assert served.scheduler.slots.running == 4
    guest = served.add([1] * 8, tenant="guest", max_tokens=4, ignore_eos=True)
    for _ in range(12):
        served.start()
        served.finish()
    assert any(type(event).__name__ == "Token" for event in served.heard[guest])
    assert served.scheduler.slots.preemptions
    served.drain(2)
    served.check_answers()


def test_a_flood_that_holds_all_pages_makes_way():
    config = dataclasses.replace(CONFIG, max_seqs=16, decode_reserve=0.0)
    served = replica(config, dataclasses.replace(CACHE, pages=40))
    for _ in range(20):
        served.add([1] * 16, tenant="flood", max_tokens=40, ignore_eos=True)
    for _ in range(40):
        served.start()
        served.finish()
    guest = served.add([1] * 60, tenant="guest", max_tokens=4, ignore_eos=True)
    for _ in range(30):
        served.start()
        served.finish()
    assert any(type(event).__name__ == "Token" for event in served.heard[guest])
    served.drain(2)
    served.check_answers()


def test_a_full_queue_of_one_tenant_is_open_to_another():
    served = replica(dataclasses.replace(CONFIG, max_queue=10))
    for _ in range(10):
        served.add([1] * 8, tenant="flood", max_tokens=4)
    with pytest.raises(RequestError, match="10 requests are waiting"):
        served.add([1] * 8, tenant="flood", max_tokens=4)
    for _ in range(5):
        served.add([1] * 8, tenant="guest", max_tokens=4)
    with pytest.raises(RequestError, match="15 requests are waiting"):
        served.add([1] * 8, tenant="guest", max_tokens=4)


def test_admission_refuses_the_flood_and_not_the_guest():
    config = dataclasses.replace(CONFIG, admission="predict", ttft=1.0, tpot=0.2)
    served = replica(config)
    refused = {"flood": 0, "guest": 0}
    accepted = {"flood": 0, "guest": 0}
    for step in range(300):
        for name in ("flood", "flood", "flood", *(["guest"] * (step % 8 == 0))):
            try:
                served.add([1] * 8, tenant=name, max_tokens=2, ignore_eos=True)
                accepted[name] += 1
            except RequestError:
                refused[name] += 1
        batch = served.start()
        if batch is not None:
            served.now += batch.seconds
            served.finish()
    assert refused["flood"] > accepted["flood"] > 0
    assert refused["guest"] <= 0.1 * accepted["guest"]


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from(NAMES), st.integers(1, 30), st.integers(1, 12)), max_size=60
    ),
    shares=st.sampled_from(["", "a:5;b:0.2"]),
    pages=st.sampled_from([12, 30, 64]),
    slots=st.integers(1, 5),
    ahead=st.integers(1, 2),
)
def test_nothing_starves_and_invariants_hold(arrivals, shares, pages, slots, ahead):
    """Whatever comes of whom, all that was accepted ends, with the answers it would get alone."""
    config = dataclasses.replace(CONFIG, tenant_shares=shares, max_seqs=slots)
    served = replica(config, dataclasses.replace(CACHE, pages=pages))
    for name, tokens, output in arrivals:
        served.add([1] * tokens, tenant=name, max_tokens=output)
        if len(served.flight) < ahead:
            served.start()
        if len(served.flight) == ahead:
            served.finish()
    served.drain(ahead)
    served.check_answers()
