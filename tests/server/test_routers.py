"""What routers of other people ask of a replica: rendered prompts, metrics under vLLM's names, and
parameters of KV transfers."""

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from jaxserve.observe.metric_aliases import VLLM_NAMES
from jaxserve.server.kv_tickets import write_ticket
from tests.server.fakes import FakeReplica

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
TEXT = {"prompt": "abc", "max_tokens": 3}
ROUTES = {"/v1/completions": TEXT, "/v1/chat/completions": CHAT}


# --- rendering


def test_completions_are_rendered_to_the_ids_that_the_model_gets(asked):
    body = {"prompt": ["abc", "de"], "max_tokens": 3}
    rendered = asked.post("/v1/completions/render", json=body).json()
    assert rendered == [{"token_ids": [97, 98, 99]}, {"token_ids": [100, 101]}]
    given = asked.post("/v1/completions/render", json={"prompt": [1, 2]}).json()
    assert given == [{"token_ids": [1, 2]}]


def test_chats_are_rendered_by_the_template(asked):
    rendered = asked.post("/v1/chat/completions/render", json=CHAT).json()
    assert bytes(rendered["token_ids"]).decode() == "<user>hi"
    whole = asked.post("/v1/chat/completions", json=CHAT).json()
    assert whole["usage"]["prompt_tokens"] == len(rendered["token_ids"])


@pytest.mark.parametrize("path", ROUTES)
def test_rendering_refuses_what_generating_refuses(asked, path):
    for wrong in ({"model": "other"}, {"temperature": -1}, {"n": 0}, {"stop_token_ids": [10**6]}):
        body = {**ROUTES[path], **wrong}
        rendered = asked.post(f"{path}/render", json=body)
        generated = asked.post(path, json=body)
        assert rendered.status_code == generated.status_code >= 400
        assert rendered.json()["error"]["param"] == generated.json()["error"]["param"]


@pytest.mark.parametrize("path", ROUTES)
def test_rendering_tells_of_unknown_fields_as_generating_does(asked, path):
    body = {**ROUTES[path], "unheard_of": 1}
    for answer in (asked.post(f"{path}/render", json=body), asked.post(path, json=body)):
        assert (answer.status_code, answer.headers["x-jaxserve-ignored"]) == (200, "unheard_of")


def test_a_rendered_prompt_is_cut_as_the_model_s_is(asked):
    body = {"prompt": "abcdef", "truncate_prompt_tokens": 2}
    rendered = asked.post("/v1/completions/render", json=body).json()
    assert rendered == [{"token_ids": [101, 102]}]


def test_a_long_prompt_is_rendered_whole(asked):
    rendered = asked.post("/v1/completions/render", json={"prompt": "x" * 3000}).json()
    assert rendered == [{"token_ids": [120] * 3000}]


# --- metrics


def families(client: httpx.Client, query: str = "") -> dict:
    text = client.get(f"/metrics{query}").text
    return {family.name: family for family in parse(text)}


def test_metrics_have_vllm_s_names_too_where_that_is_asked_for(http):
    found = families(http(metrics_aliases="vllm"))
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        (ours,) = found[f"jaxserve:{name}"].samples
        (alias,) = found[f"vllm:{name}"].samples
        assert alias.value == ours.value and "model_name" in alias.labels
    (alias, *_) = found["vllm:spec_decode_num_accepted_tokens_per_pos"].samples
    assert alias.labels.keys() == {"position", "model_name"}
    aliases = {name.removeprefix("vllm:") for name in found if name.startswith("vllm:")}
    assert {name.removesuffix("_created") for name in aliases} <= VLLM_NAMES
    assert len(found["vllm:time_to_first_token_seconds"].samples) == len(
        found["jaxserve:time_to_first_token_seconds"].samples
    )


def test_aliases_can_be_selected_by_name(http):
    found = families(http(metrics_aliases="vllm"), "?name[]=vllm:num_requests_waiting")
    assert set(found) == {"vllm:num_requests_waiting"}


def test_a_picker_finds_block_size_and_number_of_blocks(http):
    engine = FakeReplica()
    engine.metrics.configured(block_size=16, num_gpu_blocks=10)
    found = families(http(engine=engine, metrics_aliases="vllm"))
    for name in ("jaxserve", "vllm"):
        (sample,) = found[f"{name}:cache_config_info"].samples
        assert (sample.labels["block_size"], sample.labels["num_gpu_blocks"]) == ("16", "10")


def test_without_the_flag_there_are_no_aliases(asked):
    assert not [name for name in families(asked) if name.startswith("vllm:")]


# --- KV transfers


@pytest.mark.parametrize("path", ROUTES)
def test_parameters_that_ask_for_nothing_are_answered_with_null(asked, path):
    params = {"do_remote_decode": False, "do_remote_prefill": False, "remote_block_ids": None}
    answer = asked.post(path, json={**ROUTES[path], "kv_transfer_params": params})
    assert answer.status_code == 200 and answer.json()["kv_transfer_params"] is None
    assert "kv_transfer_params" not in asked.post(path, json=ROUTES[path]).json()


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("name", ["do_remote_decode", "do_remote_prefill"])
def test_a_leg_that_this_replica_cannot_serve_is_refused_by_name(asked, path, name):
    ticket = write_ticket(b"of a cluster", "10.0.0.1:8480", 3, 16, "id")
    params = ticket if name == "do_remote_prefill" else {name: True}
    body = {**ROUTES[path], "kv_transfer_params": params}
    answer = asked.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == f"kv_transfer_params.{name}"
    assert "not supported by this replica" in error["message"]


@pytest.mark.parametrize("path", ROUTES)
def test_parameters_have_a_limit(asked, path):
    body = {**ROUTES[path], "kv_transfer_params": {"x": "y" * 70_000}}
    answer = asked.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "kv_transfer_params"
    assert "the limit is 65536" in error["message"]
