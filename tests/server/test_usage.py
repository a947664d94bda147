"""What callers have used: by key, tenant and model, on the operators' port."""

from __future__ import annotations

import httpx
import pytest

from jaxserve.server.auth.access import Caller
from jaxserve.server.auth.keys import Limits
from jaxserve.server.request_log import Outcome
from jaxserve.server.usage import MAX_ROWS, UsageTable
from tests.server.fakes import FakeReplica
from tests.server.keyed import TWO


@pytest.fixture
def keyed(serve, key_file):
    return serve(FakeReplica(), admin_port=0, api_keys=key_file(TWO))


def ask(served, **body) -> int:
    return httpx.post(
        f"{served.server.url}/v1/completions",
        json={"prompt": "abcd", "max_tokens": 5, **body},
        headers={"authorization": "Bearer a-key"},
    ).status_code


def used(served) -> list[dict]:
    admin = f"http://127.0.0.1:{served.server.server.ports['admin']}"
    answer = httpx.get(f"{admin}/admin/usage", headers={"authorization": "Bearer r-key"})
    assert answer.status_code == 200 and answer.json()["since"] > 1e9
    return answer.json()["usage"]


def test_requests_and_tokens_are_summed_by_key_tenant_and_model(keyed):
    assert used(keyed) == []  # the readiness check is not counted
    assert [ask(keyed), ask(keyed, n=2), ask(keyed, max_tokens=-1)] == [200, 200, 400]
    assert ask(keyed, model="unknown") == 404
    (row,) = used(keyed)
    assert row == {
        "key": "alice",
        "tenant": "team-a",
        "model": keyed.engine.info.served_name,
        "requests": 2,
        "prompt_tokens": 8,
        "cached_tokens": row["cached_tokens"],
        "completion_tokens": 15,
    }


def test_users_do_not_see_what_others_used(keyed):
    admin = f"http://127.0.0.1:{keyed.server.server.ports['admin']}"
    for url, key, status in ((admin, "a-key", 403), (keyed.server.url, "a-key", 404)):
        answer = httpx.get(f"{url}/admin/usage", headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == status


def test_rows_are_bounded():
    table = UsageTable()
    caller = Caller("a", "t", Limits(), None, False)
    for number in range(MAX_ROWS + 10):
        table.count(caller, f"m{number}", 1, Outcome(output_tokens=1))
    rows = table.rows()
    assert len(rows) == MAX_ROWS + 1
    assert rows[0]["key"] == "*" and rows[0]["requests"] == 10
