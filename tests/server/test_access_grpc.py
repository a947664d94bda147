"""Keys over gRPC, and what callers can make of names and of the log."""

import asyncio
import logging
import os
import subprocess
import sys
from pathlib import Path

import grpc
import psutil
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jaxserve.api.errors import RequestError
from jaxserve.api.sampling import SamplingParams
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.client import AsyncClient, Client, ServerError
from jaxserve.server.frontend_metrics import FrontendMetrics
from jaxserve.server.grpc import auth as grpc_auth
from jaxserve.server.logs import TextFormatter
from tests.server.keyed import TWO, bearer
from tests.waiting import SOON, eventually

ROOT = Path(__file__).parents[2]


def methods(target, key):
    """Every method that reflection tells of."""
    with grpc.insecure_channel(target) as channel:
        ask = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        metadata = [("authorization", bearer(key))]
        asked = lambda **fields: next(
            ask(iter([reflection_pb2.ServerReflectionRequest(**fields)]), metadata=metadata)
        )
        found = []
        for service in asked(list_services="").list_services_response.service:
            answer = asked(file_containing_symbol=service.name).file_descriptor_response
            for data in answer.file_descriptor_proto:
                file = descriptor_pb2.FileDescriptorProto.FromString(data)
                found += [
                    f"/{service.name}/{method.name}"
                    for own in file.service
                    if f"{file.package}.{own.name}" == service.name
                    for method in own.method
                ]
    return found


def code_of(channel, path, message=b"", **call):
    try:
        list(channel.unary_stream(path)(message, timeout=60, **call))
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_every_method_but_health_asks_for_a_key(serve, key_file):
    served = serve(api_keys=key_file(TWO))
    found = methods(served.target, "a-key")
    assert {
        "/jaxserve.v1.Inference/Generate",
        "/jaxserve.v1.Control/Abort",
        "/grpc.health.v1.Health/Check",
    } <= set(found)
    closed = [path for path in found if "health" not in path]
    closed += [
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/jaxserve.v1.Inference/Nothing",
        "/",
        "/x",
    ]
    wrong = ["Bearer nope", "Bearer r-key", "a-key", ""]
    for path in closed:
        assert code_of(served.channel, path) is grpc.StatusCode.UNAUTHENTICATED, path
        codes = [
            code_of(served.channel, path, metadata=[("authorization", value)]) for value in wrong
        ]
        assert (
            codes
            == [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED]
            + [grpc.StatusCode.UNAUTHENTICATED] * 2
        ), path
        twice = [("authorization", bearer("a-key"))] * 2
        assert code_of(served.channel, path, metadata=twice) is grpc.StatusCode.UNAUTHENTICATED
    assert health_pb2_grpc.HealthStub(served.channel).Check(health_pb2.HealthCheckRequest()).status
    assert not served.engine.requests and served.engine.prefill_steps == 0


def test_clients_with_a_key_are_served_until_it_is_removed(serve, key_file):
    served = serve(api_keys=key_file(TWO))
    with Client(served.target, api_key="a-key") as client:
        assert (
            client.complete("x", SamplingParams(max_tokens=1))
            and client.tokenize("ab") == [97, 98]
            and client.load()
        )

        async def main():
            async with AsyncClient(served.target, api_key="a-key") as other:
                return await other.complete(
                    "x", SamplingParams(max_tokens=1)
                ), await other.server_info()

        assert all(asyncio.run(main()))
        key_file("keys: []")

        def refused():
            try:
                client.tokenize("x")
            except ServerError as error:
                return error.status == "UNAUTHENTICATED"

        eventually(refused)


def test_handlers_know_the_caller(access):
    async def name(message, context):
        await asyncio.sleep(0.01)
        return grpc_auth.current_caller().name.encode()

    async def main():
        server = grpc.aio.server(
            interceptors=[
                grpc_auth.GrpcGuard(access, FrontendMetrics()),
                grpc_auth.GrpcGuard(access, FrontendMetrics()),
            ]
        )
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    "s", {"m": grpc.unary_unary_rpc_method_handler(name)}
                ),
            )
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/s/m")
            found = await asyncio.gather(
                *(call(b"", metadata=[("authorization", bearer("a-key"))]) for _ in range(10))
            )
        await server.stop(0)
        return found

    assert asyncio.run(asyncio.wait_for(main(), SOON)) == [b"alice"] * 10


def test_a_limit_says_when_to_come_again(serve):
    served = serve()
    served.engine.fault = RequestError(
        "requests_per_minute", "the limit of this key is 7", "RESOURCE_EXHAUSTED", 2.25
    )
    with pytest.raises(ServerError) as error:
        served.client.complete("x")
    assert (error.value.reason, error.value.retry_after) == ("requests_per_minute", 2.25)


SERVER = """
import sys
from jaxserve.settings.schema import ServerConfig
from jaxserve.server.supervisor import serve
from tests.server.fakes import FakeReplica, FakeTokenizer
config = ServerConfig(grpc_port=0, port=0, api_keys=sys.argv[1])
def listening(server):
    print(server.ports['grpc'], flush=True)
serve(config, lambda: (FakeReplica(), FakeTokenizer()), listening)
"""


def test_a_strangers_message_is_not_read(key_file):
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, key_file(TWO)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        port = int(process.stdout.readline())
        target = f"127.0.0.1:{port}"
        any_size = [("grpc.max_send_message_length", -1)]
        with Client(target) as client, grpc.insecure_channel(target, any_size) as channel:
            client.wait_ready(60)
            before = psutil.Process(process.pid).memory_info().rss
            message = b"x\1" * (50 << 20)
            for _ in range(3):
                assert (
                    code_of(channel, "/jaxserve.v1.Inference/Tokenize", message)
                    is grpc.StatusCode.UNAUTHENTICATED
                )
            assert highest(process.pid) - before < 30 << 20
            code_of(
                channel,
                "/jaxserve.v1.Inference/Tokenize",
                message,
                metadata=[("authorization", bearer("a-key"))],
            )
            # a known key's is: the measure can tell
            assert highest(process.pid) - before > 90 << 20
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def highest(pid):
    """Most bytes of memory that a process has had."""
    (line,) = [
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmHWM")
    ]
    return int(line.split()[1]) << 10


# --- names and logs


@pytest.mark.parametrize(
    "model",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "file:///etc/passwd",
        "http://169.254.169.254/latest",
        "fake/../fake",
        "\0",
    ],
)
def test_a_models_name_in_a_request_is_a_name_and_no_path(serve, model):
    code, details = serve().status_of(
        "Inference/Generate", pb.GenerateRequest(text="x", model=model)
    )
    assert (
        code is grpc.StatusCode.NOT_FOUND
        and "is not served here" in details
        and "\n" not in details
    )


@pytest.fixture
def log(tmp_path):
    """The lines of text that are logged."""
    handler = logging.FileHandler(tmp_path / "log", encoding="utf-8")
    root = logging.getLogger()
    handler.setFormatter(TextFormatter())
    root.addHandler(handler)
    level = root.level
    root.setLevel(logging.DEBUG)
    yield lambda: (tmp_path / "log").read_text().splitlines()
    root.setLevel(level)
    root.removeHandler(handler)
    handler.close()


FORGED = "E 2026-01-01 00:00:00,000 jaxserve: forged"


def test_callers_cannot_forge_log_lines_and_neither_prompts_nor_keys_are_logged(
    serve, key_file, log
):
    served = serve(api_keys=key_file(TWO))
    evil = f"id\r\n{FORGED}\u2028{FORGED}\x1b[2J"
    with Client(served.target, api_key="a-key") as client:
        for prompt in ("secret-prompt", ""):
            for fields in ({"request_id": evil}, {"model": evil}, {"slo": pb.Slo(class_name=evil)}):
                try:
                    client.complete(prompt, SamplingParams(max_tokens=1), **fields)
                except ServerError as error:
                    assert FORGED not in str(error).splitlines()
        served.engine.fault = ValueError(f"what a library says of {evil}")
        with pytest.raises(ServerError, match="internal error"):
            client.complete("secret-prompt", request_id=evil)
    with pytest.raises(ServerError), Client(served.target, api_key="secret-key") as client:
        client.complete("secret-prompt")
    logging.getLogger("jaxserve").warning("%s", evil)
    lines = log()
    assert any("forged" in line for line in lines) and not [
        line for line in lines if line.startswith(FORGED)
    ]
    assert all(line.startswith("    ") or line[:2] in ("D ", "I ", "W ", "E ") for line in lines), (
        lines
    )
    assert all(line.isprintable() for line in lines)
    assert not [line for line in lines if "secret" in line or "a-key" in line]
