"""Whatever comes in, something sensible goes out: requests made from our own schema and random
bytes on every decoder."""

import json
import threading

import grpc
import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.api.errors import RequestError
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.auth.access import presented_key
from jaxserve.server.auth.keys import parse as parse_keys
from jaxserve.server.grpc.handlers import parse
from jaxserve.server.supervisor import Background
from jaxserve.settings.schema import ServerConfig
from tests.examples import examples
from tests.server.fakes import FakeReplica, FakeTokenizer, expected
from tests.waiting import eventually

FEW = settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(max_examples=examples(2000), deadline=30_000)  # ms
CLIENT = httpx.Client(verify=False, timeout=60)  # without certificates, which take 50 ms to load


@pytest.fixture(scope="module")
def server():
    engine = FakeReplica()
    with Background(ServerConfig(grpc_port=0, port=0), lambda: (engine, FakeTokenizer())) as server:
        server.wait_ready()
        server.engine = engine
        yield server


def test_the_schema_holds_for_what_is_made_from_it(server):
    operations = [
        found.ok()
        for found in schemathesis.openapi.from_url(
            f"{server.url}/openapi.json"
        ).get_all_operations()
    ]
    assert len(operations) >= 10
    for operation in operations:

        @settings(FEW, max_examples=examples(25))
        @given(operation.as_strategy())
        def holds(case):
            response = case.call(timeout=60)
            assert response.status_code < 500, response.text[:500]
            operation.validate_response(response)  # noqa: B023

        holds()


def well(server):
    answer = CLIENT.post(f"{server.url}/v1/completions", json={"prompt": "hi", "max_tokens": 3})
    return answer.json()["choices"][0]["text"] == bytes(expected(b"hi", 3)).decode()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=10), inner, max_size=5)
    ),
    max_leaves=20,
)
FIELDS = st.sampled_from(
    [
        "prompt",
        "messages",
        "tools",
        "tool_choice",
        "logit_bias",
        "stop",
        "n",
        "max_tokens",
        "stream",
        "response_format",
        "structured_outputs",
        "stream_options",
        "chat_template_kwargs",
        "temperature",
        "seed",
        "model",
    ]
)


@FEW
@given(
    path=st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]),
    body=st.dictionaries(FIELDS, JSON, max_size=4).map(lambda d: {"prompt": "x", **d}) | JSON,
)
def test_any_json_is_answered(server, path, body):
    answer = CLIENT.post(
        f"{server.url}{path}",
        content=json.dumps(body),
        headers={"content-type": "application/json"},
    )
    assert answer.status_code in (200, 400, 404), (answer.status_code, answer.text)
    assert answer.status_code == 200 or answer.json()["error"]["message"]


@FEW
@given(st.binary(max_size=2000))
def test_any_bytes_on_the_http_port_leave_it_well(server, data):
    import socket

    with socket.create_connection(("127.0.0.1", server.server.ports["http"]), timeout=60) as there:
        there.sendall(data)
        there.shutdown(socket.SHUT_WR)
        while there.recv(65536):
            pass


@FEW
@given(st.binary(max_size=2000))
def test_any_bytes_as_a_grpc_message_are_answered(server, data):
    with grpc.insecure_channel(server.target) as channel:
        call = channel.unary_stream("/jaxserve.v1.Inference/Generate")(data, timeout=60)
        try:
            list(call)
        except grpc.RpcError as error:
            assert error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND), (
                error
            )


def test_after_all_that_nothing_is_left(server):
    eventually(lambda: not server.engine.requests and not server.server.frontend.streams)
    assert well(server) and threading.active_count() < 60


MESSAGES = [getattr(pb, name) for name in pb.DESCRIPTOR.message_types_by_name]


@MANY
@given(st.sampled_from(MESSAGES), st.binary(max_size=300))
def test_any_bytes_are_a_message_or_refused(kind, data):
    found = parse(kind, 1 << 20, data)
    assert isinstance(found, (kind, RequestError))


@MANY
@given(st.text(max_size=300))
def test_any_authorization_is_a_key_or_none(text):
    assert presented_key(text) is None or isinstance(presented_key(text), str)


@settings(max_examples=examples(300), deadline=30_000)
@given(st.text(max_size=200))
def test_any_text_is_a_key_file_or_refused(text):
    from jaxserve.settings.schema import ConfigError

    try:
        parse_keys(text, "keys.yaml")
    except ConfigError as error:
        assert "keys" in str(error)
