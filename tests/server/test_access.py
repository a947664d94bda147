"""Who may come in, and how much each key may ask for."""

import asyncio
import base64
import collections

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.api.errors import RequestError
from jaxserve.server.auth.access import Authenticator, Caller, KeyUsage
from jaxserve.server.auth.keys import Limits
from jaxserve.server.streams import abortable_ids
from jaxserve.settings.schema import ServerConfig
from tests.examples import examples
from tests.server.keyed import TWO, basic, bearer, sha
from tests.work import calls_of

NEW = 1_000_000.0  # seconds of the clock when a test begins


@pytest.mark.parametrize(
    "header",
    [
        bearer("a-key"),
        "bearer a-key",
        "BEARER   a-key ",
        basic("anybody:a-key"),
        basic(":a-key"),
    ],
)
def test_a_key_is_known_as_bearer_and_as_the_password_of_a_browser(access, header):
    caller = access.authenticate(header)
    assert (caller.name, caller.tenant, caller.limits.concurrency) == ("alice", "team-a", 2)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "a-key",
        bearer("A-key"),
        bearer("a-key2"),
        bearer("x" * 10**6),
        bearer("\ud800"),
        bearer(sha("a-key")),
        "Digest a-key",
        "Basic !!",
        "Basic " + base64.b64encode(b"\xff:a-key").decode(),
        basic("a-key"),
        basic("a-key:"),
        "Basic \u00e9",
    ],
)
def test_anything_else_is_not(access, header):
    with pytest.raises(RequestError) as error:
        access.authenticate(header)
    assert error.value.status == "UNAUTHENTICATED"
    assert "a-key" not in str(error.value)


def test_admin_keys_and_others_work_on_their_own_ports_only(access):
    assert access.authenticate(bearer("r-key"), admin=True).name == "root"
    for key, admin in (("r-key", False), ("a-key", True)):
        with pytest.raises(RequestError) as error:
            access.authenticate(bearer(key), admin=admin)
        assert error.value.status == "PERMISSION_DENIED"
    with pytest.raises(RequestError) as error:
        access.authenticate(None, admin=True)
    assert error.value.status == "UNAUTHENTICATED"


def test_without_a_key_file_everybody_is_the_caller_without_a_name():
    access = Authenticator(ServerConfig())
    for header in (None, "", bearer("whatever")):
        caller = access.authenticate(header)
        assert (caller.name, caller.tenant, caller.cache_salt("s")) == ("", "", "s")
        reservation = caller.reserve(NEW)
        reservation.add_prompt(10**9)
        reservation.close()


def test_a_file_without_keys_lets_nobody_in(key_file):
    with pytest.raises(RequestError):
        Authenticator(ServerConfig(api_keys=key_file("keys: []"))).authenticate(bearer(""))


def test_salts_of_tenants_never_meet_unless_the_server_shares_prefixes(key_file):
    text = "keys:\n" + "".join(
        f"  - {{name: {n}, sha256: {sha(n)}, tenant: {t}}}\n"
        for n, t in (("a", "t"), ("b", "t"), ("c", "u"))
    )

    def salts(share, asked):
        access = Authenticator(ServerConfig(api_keys=key_file(text), share_prefixes=share))
        return [access.authenticate(bearer(name)).cache_salt(asked) for name in "abc"]

    a, b, c = salts(False, "")
    assert (
        a == b != c
        and c != ""
        and len({*salts(False, "x"), *salts(False, "u:x"), *salts(False, "")}) == 6
    )
    assert salts(True, "x") == ["x", "x", "x"]


# --- how much


def caller_with(**limits):
    return Caller("a", "a", Limits(**limits), KeyUsage(), True)


def refusal(call, *arguments):
    with pytest.raises(RequestError) as error:
        call(*arguments)
    return error.value.status, error.value.field, error.value.retry_after


def test_as_many_requests_as_a_minute_has_may_come_at_once_and_then_one_in_each_interval():
    caller = caller_with(requests_per_minute=600)
    for _ in range(600):
        caller.reserve(NEW).close()
    status, field, wait = refusal(caller.reserve, NEW)
    assert (status, field) == (
        "RESOURCE_EXHAUSTED",
        "requests_per_minute",
    ) and wait == pytest.approx(0.1, abs=1e-3)
    caller.reserve(NEW + wait).close()
    assert refusal(caller.reserve, NEW + wait)[2] == pytest.approx(0.1, abs=1e-3)
    for _ in range(300):
        caller.reserve(NEW + wait + 30).close()
    refusal(caller.reserve, NEW + wait + 30)


def test_refused_requests_take_nothing():
    caller = caller_with(requests_per_minute=2, concurrency=1, queued_tokens=10)
    first = caller.reserve(NEW)
    first.add_prompt(5)
    assert refusal(first.add_prompt, 6) == ("RESOURCE_EXHAUSTED", "queued_tokens", 1.0)
    for _ in range(9):
        assert refusal(caller.reserve, NEW) == ("RESOURCE_EXHAUSTED", "concurrency", 1.0)
    first.close()
    caller.reserve(NEW).close()
    assert refusal(caller.reserve, NEW)[1:] == ("requests_per_minute", pytest.approx(30, abs=0.01))
    assert (caller.usage.running, caller.usage.queued_tokens) == (0, 0)


def test_prompt_tokens_count_until_the_first_token():
    caller = caller_with(queued_tokens=100)
    first, second, third = (caller.reserve(NEW) for _ in range(3))
    first.add_prompt(60)
    assert refusal(second.add_prompt, 41) == ("RESOURCE_EXHAUSTED", "queued_tokens", 1.0)
    second.add_prompt(40)
    first.prompt_done()
    third.add_prompt(60)
    third.close()
    assert refusal(first.add_prompt, 101) == ("INVALID_ARGUMENT", "queued_tokens", None)
    second.close()
    second.add_prompt(10**9)  # the prompt was read after its caller had gone
    first.close()
    assert (caller.usage.running, caller.usage.queued_tokens) == (0, 0)


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "add_prompt", "prompt_done", "close", "wait"]),
        st.integers(0, 60),
    ),
    max_size=150,
)


@settings(max_examples=examples(150), deadline=None)
@given(MOVES, st.integers(1, 20), st.integers(1, 5), st.integers(1, 100))
def test_limits_hold_and_counts_return_to_zero_whatever_happens(
    moves, per_minute, concurrency, tokens
):
    caller = caller_with(
        requests_per_minute=per_minute, concurrency=concurrency, queued_tokens=tokens
    )
    now = NEW
    reservations = []
    waiting = collections.defaultdict(int)
    began = []
    for move, number in moves:
        reservation = reservations[number % len(reservations)] if reservations else None
        try:
            if move == "wait":
                now += number / 4
            elif move == "reserve":
                reservations.append(caller.reserve(now))
                began.append(now)
            elif reservation and move == "add_prompt":
                reservation.add_prompt(number)
                waiting[reservation] += number
            elif reservation:
                getattr(reservation, move)()
                waiting[reservation] = 0
                if move == "close":
                    reservations.remove(reservation)
                    reservation.close()
        except RequestError as error:
            assert error.status in ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT")
        assert caller.usage.running == len(reservations) <= concurrency
        assert caller.usage.queued_tokens == sum(waiting.values()) <= tokens
        minute = [at for at in began if at > now - 60]
        assert len(minute) <= 2 * per_minute
    for reservation in reservations:
        reservation.close()
    assert (caller.usage.running, caller.usage.queued_tokens) == (0, 0)


def test_a_caller_reaches_its_own_requests_only(access):
    class Stream:
        def __init__(self, caller, id):
            self.caller = caller
            self.names = {id, "trace"}

    alice = access.authenticate(bearer("a-key"))
    other = caller_with()
    callers = (alice, other, access.authenticate(bearer("a-key")))
    streams = {caller.scoped_id(id): Stream(caller, id) for id, caller in zip("123", callers)}
    own_ids = [alice.scoped_id("1"), alice.scoped_id("3")]
    assert (
        abortable_ids(alice, streams, None) == own_ids
        and abortable_ids(alice, streams, "3") == own_ids[1:]
        and abortable_ids(alice, streams, "trace") == own_ids
        and alice.own_id(own_ids[0]) == "1"
    )
    refusals = {refusal(abortable_ids, alice, streams, id) for id in ("2", "4")}
    assert refusals == {("NOT_FOUND", "request_id", None)}


def test_what_a_key_has_running_outlives_a_change_of_the_file(key_file, access):
    reservations = [access.authenticate(bearer("a-key")).reserve(NEW) for _ in range(2)]
    key_file(TWO.replace("concurrency: 2", "concurrency: 3"))
    asyncio.run(access.refresh())
    reservations.append(access.authenticate(bearer("a-key")).reserve(NEW))
    with pytest.raises(RequestError, match="3 requests of this key run"):
        access.authenticate(bearer("a-key")).reserve(NEW)
    key_file("keys: []")
    asyncio.run(access.refresh())
    key_file(TWO)
    asyncio.run(access.refresh())
    reservations.pop().close()
    with pytest.raises(RequestError, match="2 requests of this key run"):
        access.authenticate(bearer("a-key")).reserve(NEW)
    reservations.pop().close()
    access.authenticate(bearer("a-key")).reserve(NEW)


def test_finding_a_key_is_no_more_work_among_many(key_file):
    """No limit on attempts is needed to keep this cheap."""

    def calls_among(count: int) -> int:
        keys = (f"- {{name: k{i}, sha256: {sha(str(i))}}}\n" for i in range(count))
        access = Authenticator(ServerConfig(api_keys=key_file("keys:\n" + "".join(keys))))
        return calls_of(lambda: access.authenticate(bearer(str(count - 1))))

    assert calls_among(1000) == calls_among(2)
