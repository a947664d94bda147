"""grpc.health.v1: what is told to who asks, to who watches, and to who watches and does not
read."""

import socket
import struct
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.server.client import Client
from jaxserve.server.supervisor import Background
from jaxserve.settings.schema import ServerConfig
from tests.server.fakes import FakeReplica, FakeTokenizer
from tests.waiting import eventually

UP, DOWN, UNKNOWN = (
    getattr(health_pb2.HealthCheckResponse, name)
    for name in ("SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
)


def ask(name: str = "") -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=name)


def turn(background: Background, up: bool) -> None:
    """Resumes or drains as an operator does."""
    models = background.server.models
    background.call_soon(models.resume if up else models.drain)


def test_who_watches_hears_every_change(serve):
    served = serve()
    stub = health_pb2_grpc.HealthStub(served.channel)
    watched = stub.Watch(ask("jaxserve.v1.Inference"), timeout=60)
    assert next(watched).status == UP
    turn(served.server, up=False)
    assert next(watched).status == DOWN
    turn(served.server, up=True)
    assert next(watched).status == UP
    watched.cancel()


def test_services_that_are_not_there(serve):
    stub = health_pb2_grpc.HealthStub(serve().channel)
    with pytest.raises(grpc.RpcError) as error:
        stub.Check(ask("no.such.Service"))
    assert error.value.code() == grpc.StatusCode.NOT_FOUND
    watched = stub.Watch(ask("no.such.Service"), timeout=60)
    assert next(watched).status == UNKNOWN
    watched.cancel()


@pytest.mark.skipif(
    not hasattr(health_pb2, "HealthListRequest"), reason="grpcio-health-checking is older"
)
def test_every_service_is_listed(serve):
    served = serve()
    stub = health_pb2_grpc.HealthStub(served.channel)
    listed = stub.List(health_pb2.HealthListRequest()).statuses
    assert {"", "jaxserve.v1.Inference", "jaxserve.v1.Control"} <= set(listed)
    assert {each.status for each in listed.values()} == {UP}


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return (
        struct.pack(">I", len(payload))[1:]
        + bytes([kind, flags])
        + struct.pack(">I", stream)
        + payload
    )


def field(name: bytes, value: bytes) -> bytes:
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def watching_unread(port: int) -> socket.socket:
    """A connection that watches all services, and lets no byte of a message be sent to it: HTTP/2's
    window is 0."""
    there = socket.create_connection(("127.0.0.1", port))
    header = b"".join(
        field(*pair)
        for pair in (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", b"/grpc.health.v1.Health/Watch"),
            (b":authority", b"localhost"),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
        )
    )
    there.sendall(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + frame(4, 0, 0, struct.pack(">HI", 4, 0))
        + frame(1, 4, 1, header)
        + frame(0, 1, 1, bytes(5))
    )
    there.settimeout(60)
    with there.makefile("rb") as reader:  # up to the header of the answer, which needs no window
        while True:
            size, kind = struct.unpack(">IB", b"\0" + reader.read(4))
            reader.read(5 + size)
            if kind == 1:
                return there


def test_who_watches_and_does_not_read_holds_up_nobody():
    background = Background(
        ServerConfig(grpc_port=0, port=0), lambda: (FakeReplica(), FakeTokenizer())
    )
    server = background.__enter__()
    ending = threading.Thread(target=background.__exit__, args=(None, None, None), daemon=True)
    with Client(server.target) as client, grpc.insecure_channel(server.target) as channel:
        client.wait_ready(60)
        check = health_pb2_grpc.HealthStub(channel).Check
        with watching_unread(server.server.ports["grpc"]):
            for status in (DOWN, UP, DOWN, UP):
                turn(server, status == UP)
                eventually(lambda status=status: check(ask(), timeout=60).status == status)
            ending.start()
            ending.join(60)
            assert not ending.is_alive(), "the server does not end"
