"""Cancellation, deadlines, slow readers, health, reflection, and the end of a server."""

import asyncio
import contextlib
import gc
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Accepted
from jaxserve.api.sampling import SamplingParams
from jaxserve.server import supervisor
from jaxserve.server.client import AsyncClient, Client, ServerError
from jaxserve.server.supervisor import Background, check_host
from jaxserve.settings.schema import ConfigError, ServerConfig
from jaxserve.text.output import Delta, NoText
from tests.server.fakes import FakeReplica, FakeTokenizer, expected
from tests.waiting import SOON, eventually

LONG = SamplingParams(max_tokens=4000, ignore_eos=True)
ROOT = pathlib.Path(__file__).parents[2]


def test_closing_the_iterator_frees_the_request_at_once(serve):
    served = serve(FakeReplica(step_seconds=0.01))
    outputs = served.client.generate("hello", LONG, request_id="r")
    next(outputs)
    outputs.close()
    eventually(lambda: not served.engine.requests)
    assert served.engine.cancelled == ["r"] and not served.server.server.frontend.streams


def test_a_client_that_vanishes_frees_its_requests(serve):
    served = serve(FakeReplica(step_seconds=0.01))
    client = Client(served.target)
    streams = [client.generate("hello", LONG) for _ in range(5)]
    for outputs in streams:
        next(outputs)
    client.close()
    eventually(lambda: not served.engine.requests)


def test_cancelling_the_task_frees_the_request(serve):
    served = serve(FakeReplica(step_seconds=0.01))

    async def main():
        async with AsyncClient(served.target) as client:
            task = asyncio.create_task(client.complete("hello", LONG))
            while not served.engine.requests:
                await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            while served.engine.requests:
                await asyncio.sleep(0.005)
            return await client.complete("hello", SamplingParams(max_tokens=3))

    (completion,) = asyncio.run(asyncio.wait_for(main(), SOON))
    assert completion.ids == expected(b"hello", 3)


def test_many_cancelled_at_random_points_leave_nothing(serve):
    served = serve(FakeReplica(step_seconds=0.001, chunk=2))

    async def one(client, wait):
        async def read():
            async for _ in client.generate("hello", LONG):
                pass

        await asyncio.wait([task := asyncio.create_task(read())], timeout=wait)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def main():
        async with AsyncClient(served.target) as client:
            await asyncio.gather(*(one(client, 0.001 * (i % 50)) for i in range(300)))

    asyncio.run(main())
    eventually(lambda: not served.engine.requests and not served.server.server.frontend.streams)


def test_abort_ends_the_stream_as_cancelled(serve):
    served = serve(FakeReplica(step_seconds=0.01))
    outputs = served.client.generate("hello", LONG, request_id="r")
    next(outputs)
    assert served.client.abort("r") == 1
    with pytest.raises(ServerError) as error:
        list(outputs)
    assert error.value.status == "CANCELLED" and not served.engine.requests
    others = [served.client.generate("hello", LONG) for _ in range(3)]
    for outputs in others:
        next(outputs)
    assert served.client.abort() == 3


def test_a_deadline_in_the_queue_costs_no_prefill(serve):
    engine = FakeReplica()
    engine.paused = True
    served = serve(engine)
    with pytest.raises(ServerError) as error:
        served.client.complete("hello", timeout=0.2)
    engine.paused = False
    assert error.value.status == "DEADLINE_EXCEEDED"
    eventually(lambda: not engine.requests)
    assert engine.prefill_steps == 0


def test_the_clients_deadline_is_the_requests(serve):
    served = serve(FakeReplica(step_seconds=0.01))
    seen = []
    submit, served.engine.submit = (
        served.engine.submit,
        lambda request, sink: (seen.append(request), submit(request, sink)),
    )
    with pytest.raises(ServerError) as error:
        served.client.complete("hello", LONG, timeout=2.0)
    assert (
        error.value.status == "DEADLINE_EXCEEDED" and 0 < seen[0].deadline - seen[0].arrival <= 2.01
    )
    eventually(lambda: not served.engine.requests)


def test_an_engine_that_finds_the_deadline_passed_says_so(serve):
    served = serve(FakeReplica(step_seconds=0.01))
    outputs = served.client.generate("hello", LONG, request_id="r")
    next(outputs)
    served.engine.cancel("r", "deadline")
    with pytest.raises(ServerError) as error:
        list(outputs)
    assert error.value.status == "DEADLINE_EXCEEDED"


class Verbose(FakeTokenizer):
    """Each token is 20 kB of text, so that a reader who stops is soon behind."""

    def stream(self, skip_special=True, prompt=()):
        return Shouting()


class Shouting(NoText):
    def push(self, *ids):
        return "x" * 20_000 * len(ids)


def test_a_reader_who_stops_is_aborted_and_others_are_not(serve):
    served = serve(FakeReplica(step_seconds=0.001), Verbose, stall_timeout=3.0)
    lazy = served.client.generate("hello", LONG, request_id="lazy")
    next(lazy)
    (brisk,) = served.client.complete("hello", SamplingParams(max_tokens=500, ignore_eos=True))
    assert brisk.ids == expected(b"hello", 500) and len(brisk.text) == 500 * 20_000
    eventually(lambda: not served.engine.requests)
    assert served.engine.cancelled == ["lazy"]
    with pytest.raises(ServerError) as error:
        list(lazy)
    assert (error.value.status, error.value.reason) == ("RESOURCE_EXHAUSTED", "stream")


def test_a_slow_reader_gets_every_token_merged(serve):
    got = []
    for output in serve(None, Verbose).client.generate(
        "hello", SamplingParams(max_tokens=500, ignore_eos=True)
    ):
        got.append(output)
        if len(got) < 20:
            time.sleep(0.01)
    deltas = [o for o in got if isinstance(o, Delta)]
    assert [id for o in deltas for id in o.ids] == expected(b"hello", 500) and len(deltas) < 500
    assert sum(len(o.text) for o in deltas) == 500 * 20_000


def test_health_follows_the_engine():
    warm = threading.Event()
    engine = FakeReplica(step_seconds=0.01)

    def build():
        warm.wait()
        return engine, FakeTokenizer()

    def statuses():
        names = ["", "jaxserve.v1.Inference", "jaxserve.v1.Control"]
        return {
            health_pb2_grpc.HealthStub(channel)
            .Check(health_pb2.HealthCheckRequest(service=name))
            .status
            for name in names
        }

    background = Background(ServerConfig(grpc_port=0, port=0), build)
    with (
        background as server,
        grpc.insecure_channel(server.target) as channel,
        Client(server.target) as client,
    ):
        assert statuses() == {health_pb2.HealthCheckResponse.NOT_SERVING}
        with pytest.raises(ServerError, match="starting") as error:
            client.complete("x")
        assert error.value.status == "UNAVAILABLE" and client.server_info().state == "starting"
        warm.set()
        client.wait_ready(60)
        assert statuses() == {health_pb2.HealthCheckResponse.SERVING}
        outputs = client.generate("hello", LONG)
        next(outputs)
        engine.die()
        with pytest.raises(ServerError) as error:
            list(outputs)
        assert error.value.status == "INTERNAL"
        eventually(lambda: statuses() == {health_pb2.HealthCheckResponse.NOT_SERVING})
        with pytest.raises(ServerError) as error:
            client.complete("x")
        assert error.value.status == "UNAVAILABLE"


def test_a_build_that_fails_ends_the_server():
    def build():
        raise ConfigError("mesh", "too large")

    with (
        pytest.raises(ConfigError, match="mesh"),
        Background(ServerConfig(grpc_port=0, port=0), build) as server,
    ):
        server.wait_ready()


@pytest.mark.parametrize("version", ["v1alpha", "v1"])
def test_reflection_lists_the_services(serve, version):
    ask = serve().channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    listed, described = ask(
        iter(
            [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(
                    file_containing_symbol="jaxserve.v1.Inference"
                ),
            ]
        )
    )
    names = {service.name for service in listed.list_services_response.service}
    assert {"jaxserve.v1.Inference", "jaxserve.v1.Control", "grpc.health.v1.Health"} <= names
    assert b"SamplingParams" in b"".join(described.file_descriptor_response.file_descriptor_proto)


def test_reflection_can_be_off(serve):
    stub = reflection_pb2_grpc.ServerReflectionStub(serve(reflection=False).channel)
    with pytest.raises(grpc.RpcError):
        next(
            stub.ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            )
        )


@pytest.mark.parametrize(
    "host, fine",
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.0.1", False),
        ("example.com", False),
        ("127.0.0.1.example.com", False),
    ],
)
def test_only_loopback_is_bound_without_insecure(host, fine):
    if fine:
        check_host(ServerConfig(host=host))
    else:
        with pytest.raises(ConfigError, match="insecure"):
            check_host(ServerConfig(host=host))
    check_host(ServerConfig(host=host, insecure=True))


def test_a_taken_port_is_a_config_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match="port"),
            Background(ServerConfig(grpc_port=port, port=0), FakeReplica),
        ):
            pass


SERVER = """
import sys
from jaxserve.settings.schema import ServerConfig
from jaxserve.server.supervisor import serve
from tests.server.fakes import FakeReplica, FakeTokenizer
config = ServerConfig(grpc_port=0, port=0, drain_timeout=float(sys.argv[1]))
def listening(server):
    print(server.ports['grpc'], flush=True)
serve(config, lambda: (FakeReplica(step_seconds=0.01), FakeTokenizer()), listening)
"""


def server_process(drain: float, **pipes) -> subprocess.Popen:
    """A server of a fake model that tells its port; drain: seconds for running requests."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SERVER, str(drain)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=environment, **pipes)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_server_at_once_and_quietly(number):
    process = server_process(60, stderr=subprocess.PIPE)
    try:
        with Client(f"127.0.0.1:{int(process.stdout.readline())}") as client:
            client.wait_ready(60)
            outputs = client.generate("hello", SamplingParams(max_tokens=10**5, ignore_eos=True))
            assert isinstance(next(outputs), Accepted)
            process.send_signal(number)
            eventually(lambda: not client.healthy())
            process.send_signal(number)
            assert process.wait(60) == -number
        assert b"Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.stdout.close()
        process.stderr.close()


@pytest.mark.parametrize("drain, tokens, end", [(60, 100, "length"), (0.2, 4000, "UNAVAILABLE")])
def test_sigterm_drains(drain, tokens, end):
    process = server_process(drain)
    try:
        with Client(f"127.0.0.1:{int(process.stdout.readline())}") as client:
            client.wait_ready(60)
            running = [
                client.generate("hello", SamplingParams(max_tokens=tokens, ignore_eos=True))
                for _ in range(20)
            ]
            assert all(isinstance(next(outputs), Accepted) for outputs in running)
            process.send_signal(signal.SIGTERM)
            eventually(lambda: not client.healthy())
            with pytest.raises(ServerError) as error:
                client.complete("new")
            assert error.value.status == "UNAVAILABLE"
            ends = [end_of(outputs) for outputs in running]
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.stdout.close()
    assert ends == [end] * 20


def end_of(outputs):
    try:
        return list(outputs)[-1].reason
    except RequestError as error:
        return error.status


def test_the_garbage_collector_leaves_what_serves_alone_and_is_itself_again_afterwards():
    with Background(
        ServerConfig(grpc_port=0, port=0), lambda: (FakeReplica(), FakeTokenizer())
    ) as server:
        server.wait_ready()
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0


def test_waiting_for_a_server_whose_engine_cannot_be_built_says_why():
    def build():
        raise ConfigError("model", "is not there")

    for _ in range(5):
        with (
            pytest.raises(ConfigError, match="is not there"),
            Background(ServerConfig(grpc_port=0, port=0), build) as server,
        ):
            server.wait_ready()
            pytest.fail("it was not built")


def test_a_client_may_ping_for_ever_unless_it_does_so_too_often(serve, monkeypatch):
    ready = grpc.ChannelConnectivity.READY
    options = [
        ("grpc.keepalive_time_ms", 150),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    servers = [serve()]
    states = [[], []]
    monkeypatch.setattr(supervisor, "MIN_PING_MS", 50)
    servers.append(serve())
    with contextlib.ExitStack() as stack:
        for served, told in zip(servers, states):
            stack.enter_context(grpc.insecure_channel(served.target, options=options)).subscribe(
                told.append, try_to_connect=True
            )
        eventually(lambda: ready in states[0] and ready in states[1])
        eventually(lambda: states[0][-1] != ready)
        assert states[1][-1] == ready
