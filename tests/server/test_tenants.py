"""Keys, limits and tenants end to end: over gRPC and over HTTP alike."""

import hashlib
import time

import grpc
import httpx
import pytest

from jaxserve.api.sampling import SamplingParams
from jaxserve.server.client import Client, ServerError
from jaxserve.server.supervisor import check_host
from jaxserve.settings.schema import ConfigError, ServerConfig
from tests.server.fakes import FakeReplica
from tests.waiting import eventually

KEYS = """
keys:
- {{name: alice, sha256: {alice}, limits: {{concurrency: 2, queued_tokens: 100}}}}
- {{name: bob, sha256: {bob}, limits: {{requests_per_minute: 2}}}}
- {{name: ops, sha256: {ops}, admin: true}}
"""
GREEDY = SamplingParams(temperature=0, max_tokens=5)
LONG = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}


@pytest.fixture
def keyed(serve, tmp_path):
    """Starts a server with keys; gives it, and how to call it over HTTP as somebody."""

    def start(engine=None, **config):
        file = tmp_path / "keys.yaml"
        file.write_text(
            KEYS.format(
                **{
                    name: hashlib.sha256(f"{name}-key".encode()).hexdigest()
                    for name in ("alice", "bob", "ops")
                }
            )
        )
        file.chmod(0o600)
        served = serve(engine, api_keys=str(file), admin_port=0, **config)

        def call(name, method, path, port="http", **rest):
            headers = (
                {"authorization": f"Bearer {name}-key", **rest.pop("headers", {})}
                if name
                else rest.pop("headers", {})
            )
            url = f"http://127.0.0.1:{served.server.server.ports[port]}{path}"
            return client.request(method, url, headers=headers, **rest)

        return served, call

    # a connection for each request; loading certificates would take 50 ms of each
    once = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(verify=False, timeout=60, limits=once) as client:
        yield start


def routes(served, app):
    """Every route of a port, with a method of it, as its own schema tells."""
    return [
        (method.upper(), path.replace("{name}", "x"))
        for path, methods in app.openapi()["paths"].items()
        for method in methods
    ]


def test_every_route_but_health_asks_for_a_key(keyed):
    from jaxserve.server.admin import operators_app
    from jaxserve.server.users_app import users_app

    served, call = keyed()
    models = served.server.server.models
    for port, app, right, wrong in (
        ("http", users_app(models, None), "alice", "ops"),
        ("admin", operators_app(models), "ops", "alice"),
    ):
        found = [*routes(served, app), ("GET", "/openapi.json"), ("GET", "/nothing")]
        assert len(found) > 5
        for method, path in found:
            if path in ("/health", "/ready"):
                assert call(None, method, path).status_code == 200
                continue
            assert_unknown(call(None, method, path, port))
            assert call(wrong, method, path, port).status_code == 403
            status = call(right, method, path, port, json={}).status_code
            if port == "http" and path.endswith("load_lora_adapter"):  # only with admin keys
                assert status == 403
                continue
            assert status not in (401, 403, 500), path
    for given in ("Bearer wrong", "Basic !", "Bearer " + "x" * 20_000):
        for port, path in (("http", "/v1/models"), ("admin", "/admin/config")):
            assert_unknown(call(None, "GET", path, port, headers={"authorization": given}))
    assert served.engine.prefill_steps <= 1  # readiness's own


def assert_unknown(answer: httpx.Response) -> None:
    assert answer.status_code == 401, answer.url
    assert answer.json()["error"]["type"] == "authentication_error"


def test_browsers_send_the_key_as_a_password_and_pages_of_others_send_nothing(keyed, serve):
    served, call = keyed()
    basic = httpx.BasicAuth("anything", "alice-key")
    url = served.server.url
    assert httpx.get(f"{url}/v1/models", auth=basic).status_code == 200
    assert "Basic" in httpx.get(f"{url}/v1/models").headers["www-authenticate"]
    for headers, status in (
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": f"{url}0"}, 403),
        ({"origin": url}, 200),
        ({"origin": "null", "sec-fetch-site": "none"}, 200),
    ):
        answer = httpx.post(
            f"{url}/v1/completions", auth=basic, json={"prompt": "x"}, headers=headers
        )
        assert answer.status_code == status, headers
    assert (
        call(
            "alice",
            "POST",
            "/v1/completions",
            content='{"prompt": "x"}',
            headers={"content-type": "text/plain"},
        ).status_code
        == 415
    )


def test_without_keys_a_browser_is_not_led_here_under_another_name(serve):
    url = serve().server.url
    for host, status in (
        ("evil.example:80", 403),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("[", 403),
        ("127.0.0.1:80", 200),
        ("localhost", 200),
        ("LOCALHOST:80", 200),
        ("[::1]:80", 200),
        ("[::1]", 200),
    ):
        assert httpx.get(f"{url}/v1/models", headers={"host": host}).status_code == status, host
    assert (
        httpx.get(
            f"{serve(insecure=True).server.url}/v1/models", headers={"host": "any.example"}
        ).status_code
        == 200
    )


def test_limits_of_a_key_are_429_over_both_fronts_and_others_do_not_feel_them(keyed):
    served, call = keyed(FakeReplica(step_seconds=0.01))
    with (
        Client(served.target, api_key="alice-key") as alice,
        Client(served.target, api_key="bob-key") as bob,
    ):
        first, second = (
            alice.generate("hi", SamplingParams(max_tokens=4000, ignore_eos=True)) for _ in range(2)
        )
        next(first), next(second)
        answer = call("alice", "POST", "/v1/completions", json={"prompt": "x"})
        assert (answer.status_code, answer.headers["jaxserve-reject-reason"]) == (
            429,
            "concurrency",
        )
        with pytest.raises(ServerError) as error:
            alice.complete("hi", GREEDY)
        assert (error.value.status, error.value.reason) == (
            "RESOURCE_EXHAUSTED",
            "concurrency",
        ) and error.value.retry_after > 0
        began = time.monotonic()
        assert bob.complete("hi", GREEDY)
        first.close(), second.close()
        eventually(lambda: not served.engine.requests)
        assert alice.complete("hi", GREEDY)
        assert call("bob", "POST", "/v1/completions", json={"prompt": "x"}).status_code == 200
        answer = call("bob", "POST", "/tokenize", json={"prompt": "x"})
        least = 29 - (time.monotonic() - began)  # a second request a minute
        assert answer.status_code == 429 and least <= int(answer.headers["retry-after"]) <= 60
    assert call("alice", "POST", "/v1/completions", json={"prompt": "x" * 101}).status_code == 400


def test_tokens_in_the_queue_count_until_the_first_token(keyed):
    engine = FakeReplica()
    engine.paused = True
    served, call = keyed(engine)
    with httpx.stream(
        "POST",
        f"{served.server.url}/v1/completions",
        headers={"authorization": "Bearer alice-key"},
        json={**LONG, "prompt": "x" * 60, "max_tokens": 50},
        timeout=60,
    ) as answer:
        eventually(lambda: engine.requests)
        refused = call("alice", "POST", "/v1/completions", json={"prompt": "y" * 60})
        assert (refused.status_code, refused.headers["jaxserve-reject-reason"]) == (
            429,
            "queued_tokens",
        )
        engine.paused = False
        answer.read()
    assert call("alice", "POST", "/v1/completions", json={"prompt": "y" * 60}).status_code == 200


def test_one_tenants_ids_salts_and_aborts_are_nothing_to_another(keyed):
    engine = FakeReplica(step_seconds=0.01)
    seen = []
    submit = engine.submit
    engine.submit = lambda request, sink: (seen.append(request), submit(request, sink))
    served, call = keyed(engine)
    with (
        Client(served.target, api_key="alice-key") as alice,
        Client(served.target, api_key="bob-key") as bob,
    ):
        sampling = SamplingParams(max_tokens=4000, ignore_eos=True)
        mine = alice.generate("hi", sampling, request_id="r")
        yours = bob.generate("hi", sampling, request_id="r")
        next(mine), next(yours)
        assert [request.cache_salt for request in seen] == ["alice:", "bob:"]
        with pytest.raises(ServerError) as error:
            bob.abort("alice:r")
        assert error.value.status == "NOT_FOUND"
        assert bob.abort() == 1 and len(engine.requests) == 1 and alice.abort("r") == 1
        mine.close(), yours.close()
    eventually(lambda: not engine.requests)


def test_operators_drain_and_resume_and_abort(keyed):
    served, call = keyed(FakeReplica(step_seconds=0.01))
    with httpx.stream(
        "POST",
        f"{served.server.url}/v1/completions",
        headers={"authorization": "Bearer alice-key", "x-request-id": "r"},
        json=LONG,
        timeout=60,
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert [entry["id"] for entry in call("ops", "GET", "/admin/requests", "admin").json()] == [
            "alice:r"
        ]
        assert call("ops", "POST", "/admin/drain", "admin").json() == {
            "state": "draining",
            "requests": 1,
        }
        assert call("alice", "POST", "/v1/completions", json={"prompt": "x"}).status_code == 503
        assert call(None, "GET", "/ready").status_code == 503
        eventually(lambda: not served.client.healthy())
        with (
            pytest.raises(ServerError, match="draining"),
            Client(served.target, api_key="alice-key") as client,
        ):
            client.complete("hi", GREEDY)
        assert call("ops", "POST", "/admin/resume", "admin").json()["state"] == "serving"
        eventually(served.client.healthy)
        assert call(
            "ops", "POST", "/admin/abort", "admin", json={"request_id": "alice:r"}
        ).json() == {"aborted": 1}
        assert any("cancelled" in line for line in lines)
    assert (
        call(
            "ops", "POST", "/admin/log_level", "admin", json={"level": "DEBUG", "logger": "root"}
        ).status_code
        == 400
    )
    for path in ("/admin/flush_cache", "/reset_prefix_cache"):
        assert call("ops", "POST", path, "admin").json()["pages"] >= 0
    assert call("ops", "GET", "/admin/config", "admin").json()["server"]["drain_timeout"] == 30


def test_the_operators_port_is_not_for_everybody():
    with pytest.raises(ConfigError, match="admin_port"):
        check_host(ServerConfig(host="0.0.0.0", insecure=True, admin_port=0))
    check_host(ServerConfig(host="0.0.0.0", api_keys="x", admin_port=0))


def test_a_key_is_not_in_any_log_or_answer(keyed, caplog):
    caplog.set_level("DEBUG")
    served, call = keyed()
    answers = [
        call("alice", "POST", "/v1/completions", json={"prompt": "a secret prompt"}).text,
        call(None, "GET", "/v1/models", headers={"authorization": "Bearer not-a-key"}).text,
    ]
    with pytest.raises(ServerError) as error, Client(served.target, api_key="not-a-key") as client:
        client.complete("a secret prompt")
    assert error.value.status == grpc.StatusCode.UNAUTHENTICATED.name
    said = caplog.text + "".join(answers) + str(error.value)
    assert "alice-key" not in said and "not-a-key" not in said and "secret prompt" not in said


def test_requests_are_of_the_tenant_of_their_key(keyed):
    engine = FakeReplica()
    seen = []
    submit = engine.submit

    def note(request, sink):
        seen.append(request.tenant)
        submit(request, sink)

    engine.submit = note
    served, call = keyed(engine)
    body = {"prompt": "x", "max_tokens": 2, "tenant": "bob"}
    assert call("alice", "POST", "/v1/completions", json=body).status_code == 200
    with Client(served.target, api_key="bob-key") as client:
        client.complete("x", GREEDY)
    assert seen[-2:] == ["alice", "bob"]
