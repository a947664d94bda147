"""A router of other people has one replica compute a prompt and another one decode it: real engines
and servers, asked as vLLM's proxy and llm-d's sidecar ask them."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from unittest import mock

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from jaxserve.engine.build import build
from jaxserve.group.channel import free_port
from jaxserve.server.kv_tickets import KvTransfer, write_ticket
from jaxserve.server.peer_blocks import PeerReplicas
from jaxserve.server.replica_auth import SECRET_VARIABLE
from jaxserve.server.supervisor import Background
from jaxserve.settings.schema import (
    CacheConfig,
    EngineConfig,
    MeshConfig,
    ModelSource,
    SchedulerConfig,
    ServerConfig,
)
from tests.server.fakes import FakeTokenizer
from tests.server.http_client import HttpClient, events
from tests.waiting import eventually

SECRET = "of the tests of KV that routers pass on"
BLOCK = 16
LEASE = 300  # seconds
PATHS = ("/v1/completions", "/v1/chat/completions")
# what vLLM's proxy and llm-d's sidecar put into a prefill request
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
fresh = itertools.count()  # for prompts that no test has had before


class Replica:
    """A server with a real engine behind it. `client`: of its HTTP port."""

    def __init__(self, stack: contextlib.ExitStack):
        peers = PeerReplicas(SECRET.encode())
        config = EngineConfig(
            ModelSource(model="random:tiny", max_model_len=512, dtype="float32"),
            MeshConfig(),
            CacheConfig(pages=96, block_size=BLOCK, host_cache_gib=0.02),
            SchedulerConfig(max_seqs=4, chunk_tokens=32),
        )
        self.engine = build(config, progress=False, warm_up=False, peers=peers)
        ports = ServerConfig(port=0, grpc_port=0, replica_port=0, kv_lease=LEASE)
        opened = Background(ports, lambda: (self.engine, FakeTokenizer()), peers)
        self.server = stack.enter_context(opened)
        self.server.wait_ready()
        self.client = stack.enter_context(HttpClient(self))
        self.client.timeout = 60

    @property
    def address(self) -> str:
        return self.server.server.address("replica")

    def tickets(self) -> dict[str, float]:
        """Tickets by what became of them."""
        found = {family.name: family for family in parse(self.client.get("/metrics").text)}
        samples = found["jaxserve:kv_tickets"].samples
        return {one.labels["outcome"]: one.value for one in samples if one.name.endswith("_total")}


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Replica, Replica]]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {SECRET_VARIABLE: SECRET}))
        yield Replica(stack), Replica(stack)


def body_of(path: str, length: int = 150) -> dict:
    text = (f"{next(fresh)} " + "abcdefg" * length)[:length]
    asked = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    if "chat" in path:
        return {"messages": [{"role": "user", "content": text}], **asked}
    return {"prompt": text, **asked}


def prefilled(replica: Replica, path: str, body: dict) -> dict:
    """Returns the `kv_transfer_params` that a router gets for a prompt."""
    leg = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": PREFILL}
    leg.pop("stream_options", None)
    answer = replica.client.post(path, json=leg)
    assert answer.status_code == 200, answer.text
    return answer.json()["kv_transfer_params"]


def decoded(replica: Replica, path: str, body: dict, params: dict | None) -> tuple[list[int], int]:
    """Returns the tokens of an answer, and how many of the prompt's were not computed."""
    answer = replica.client.post(path, json={**body, "kv_transfer_params": params})
    assert answer.status_code == 200, answer.text
    content = answer.json()
    cached = content["usage"]["prompt_tokens_details"]["cached_tokens"]
    return content["choices"][0]["token_ids"], cached


def alone(replica: Replica, path: str, body: dict) -> list[int]:
    """Returns the tokens that one replica computes by itself."""
    return decoded(replica, path, {**body, "bypass_prefix_cache": True}, None)[0]


@pytest.mark.parametrize("path", PATHS)
def test_a_prompt_s_kv_is_fetched_where_the_router_s_ticket_says(pair, path):
    prefill, decode = pair
    body = body_of(path)
    before = prefill.tickets()["issued"], decode.tickets()["fetched"]
    ticket = prefilled(prefill, path, body)
    assert ticket["do_remote_prefill"] and not ticket["do_remote_decode"]
    host, _, port = prefill.address.partition(":")
    assert (ticket["remote_host"], ticket["remote_port"]) == (host, int(port))
    tokens, cached = decoded(decode, path, body, ticket)
    assert tokens == alone(prefill, path, body)
    assert cached == 150 // BLOCK * BLOCK
    assert (prefill.tickets()["issued"], decode.tickets()["fetched"]) == (
        before[0] + 1,
        before[1] + 1,
    )


def _tokens(chunks: list[dict]) -> list[int]:
    choices = [choice for one in chunks for choice in one["choices"]]
    return [id for choice in choices for id in choice.get("token_ids", ())]


@pytest.mark.parametrize("path", PATHS)
def test_the_decode_leg_can_be_streamed(pair, path):
    prefill, decode = pair
    body = {**body_of(path), "stream_options": {"include_usage": True}}
    ticket = prefilled(prefill, path, body)
    chunks, last = events(decode.client, path, {**body, "kv_transfer_params": ticket})
    assert last == "[DONE]"
    tokens = _tokens(chunks)
    del body["stream_options"]
    assert tokens == alone(prefill, path, body)
    cached = chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == 150 // BLOCK * BLOCK


@pytest.mark.parametrize("path", PATHS)
def test_a_streamed_prefill_leg_has_its_ticket_in_the_chunk_that_ends(pair, path):
    prefill, decode = pair
    body = body_of(path)
    leg = {**body, "max_tokens": 1, "kv_transfer_params": PREFILL}
    chunks, _ = events(prefill.client, path, leg)
    (ticket,) = [one["kv_transfer_params"] for one in chunks if "kv_transfer_params" in one]
    assert decoded(decode, path, body, ticket)[1] == 150 // BLOCK * BLOCK


def test_a_prompt_without_a_full_block_has_no_ticket(pair):
    body = body_of(PATHS[0], BLOCK - 1)
    assert prefilled(pair[0], PATHS[0], body) is None
    assert decoded(pair[1], PATHS[0], body, None)[0] == alone(pair[0], PATHS[0], body)


def test_kv_is_brought_to_host_memory_for_the_lease_before_anybody_fetches_it(pair):
    prefill, _ = pair
    host = prefill.engine.worker.lower_tiers.host
    retained = []
    submit = prefill.engine.submit
    with mock.patch.object(prefill.engine, "submit") as watched:
        watched.side_effect = lambda request, sink: (
            retained.append(request.cache_retention),
            submit(request, sink),
        )
        before = set(host.keys())
        prefilled(prefill, PATHS[0], body_of(PATHS[0]))
    assert retained == [LEASE]
    eventually(lambda: len(set(host.keys()) - before) == 150 // BLOCK)
    eventually(lambda: not prefill.engine.scheduler.cache.stores.wanted)


# --- tickets by which nothing can be fetched


FOREIGN = {
    "vllm's": dict(remote_engine_id="0b5ef4a2-6a5c-4f5c", remote_block_ids=[3, 4, 5]),
    "another host": dict(remote_host="192.0.2.1"),
    "another port": dict(remote_port=1),
    "more blocks": dict(remote_block_ids=[0, 200]),
    "no block": dict(remote_block_ids=[]),
}


@pytest.mark.parametrize("fields", FOREIGN.values(), ids=FOREIGN)
def test_no_address_is_asked_that_no_replica_of_the_cluster_has_written(pair, fields):
    prefill, decode = pair
    body = body_of(PATHS[0])
    ticket = prefilled(prefill, PATHS[0], body)
    before = decode.tickets()["foreign"]
    tokens, cached = decoded(decode, PATHS[0], body, {**ticket, **fields})
    assert (tokens, cached) == (alone(prefill, PATHS[0], body), 0)
    assert decode.tickets()["foreign"] == before + 1


def test_a_ticket_of_another_cluster_is_foreign():
    params = write_ticket(b"of another cluster", "10.0.0.1:8480", 3, BLOCK, "id")
    ticket = KvTransfer.read(params).ticket
    assert ticket.written_with(b"of another cluster")
    assert not ticket.written_with(SECRET.encode())


@pytest.mark.parametrize("wrong", ["nothing computed", "another prompt's", "unreachable"])
def test_what_a_ticket_does_not_bring_is_computed(pair, wrong):
    prefill, decode = pair
    body = body_of(PATHS[0])
    if wrong == "another prompt's":
        ticket = prefilled(prefill, PATHS[0], body_of(PATHS[0]))
    else:
        gone = f"127.0.0.1:{free_port('127.0.0.1')}"
        address = gone if wrong == "unreachable" else prefill.address
        ticket = write_ticket(SECRET.encode(), address, 9, BLOCK, "id")
    before = decode.tickets()["computed"]
    tokens, cached = decoded(decode, PATHS[0], body, ticket)
    assert (tokens, cached) == (alone(prefill, PATHS[0], body), 0)
    assert decode.tickets()["computed"] == before + 1


RIGHT = write_ticket(SECRET.encode(), "10.0.0.1:8480", 3, BLOCK, "id")
MALFORMED = [
    ({"do_remote_decode": 1}, "do_remote_decode"),
    ({"do_remote_prefill": "yes"}, "do_remote_prefill"),
    ({**RIGHT, "do_remote_decode": True}, "do_remote_prefill"),
    ({"do_remote_prefill": True}, "remote_engine_id"),
    ({**RIGHT, "remote_engine_id": 7}, "remote_engine_id"),
    ({**RIGHT, "remote_host": ""}, "remote_host"),
    ({**RIGHT, "remote_host": "x" * 600}, "remote_host"),
    ({**RIGHT, "remote_port": "8480"}, "remote_port"),
    ({**RIGHT, "remote_port": True}, "remote_port"),
    ({**RIGHT, "remote_port": 1 << 16}, "remote_port"),
    ({**RIGHT, "remote_block_ids": 3}, "remote_block_ids"),
    ({**RIGHT, "remote_request_id": 3}, "remote_request_id"),
]


@pytest.mark.parametrize("params, field", MALFORMED)
def test_a_malformed_ticket_is_refused_by_its_field(asked, params, field):
    for path in PATHS:
        answer = asked.post(path, json={**body_of(path), "kv_transfer_params": params})
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert error["param"] == f"kv_transfer_params.{field}"


def test_a_ticket_is_for_one_prompt(asked):
    body = {"prompt": ["abc", "de"], "max_tokens": 1, "kv_transfer_params": PREFILL}
    answer = asked.post(PATHS[0], json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "kv_transfer_params.do_remote_decode"


# --- other people's code

PROXY = os.environ.get("JAXSERVE_VLLM_PROXY")  # vLLM's toy_proxy_server.py


@pytest.mark.skipif(PROXY is None, reason="JAXSERVE_VLLM_PROXY does not name vLLM's proxy")
@pytest.mark.matrix
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_vllm_s_own_proxy_passes_kv_on(pair, path, stream):
    prefill, decode = pair
    port = free_port("127.0.0.1")
    urls = [replica.server.url.rpartition(":")[2] for replica in pair]
    process = subprocess.Popen(
        [
            sys.executable, PROXY, f"--port={port}",
            "--prefiller-host=127.0.0.1", f"--prefiller-port={urls[0]}",
            "--decoder-host=127.0.0.1", f"--decoder-port={urls[1]}",
        ]
    )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            eventually(lambda: _answers(client))
            body = body_of(path)
            before = decode.tickets()["fetched"]
            if stream:
                chunks, _ = events(client, path, body)
                tokens = _tokens(chunks)
            else:
                tokens = client.post(path, json=body).json()["choices"][0]["token_ids"]
            assert tokens == alone(prefill, path, body)
            assert decode.tickets()["fetched"] == before + 1
    finally:
        process.terminate()
        process.wait()


def _answers(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return client.get("/healthcheck").status_code == 200
    return False
