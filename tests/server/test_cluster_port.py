"""A port of the cluster ends, whatever gRPC still does for its callers."""

from __future__ import annotations

import threading
import time

import grpc

from jaxserve.server import replica_pb2_grpc as rpc
from jaxserve.server.cluster_port import ClusterPort
from jaxserve.server.replica_auth import CallerProof

SECRET = b"of the tests of the cluster's port"
SERVICE = "jaxserve.tests.Port"


def test_a_port_stops_while_grpc_cannot_end_a_call(caplog):
    reading, over = threading.Event(), threading.Event()

    def read(message: bytes) -> bytes:  # on the thread that gRPC ends calls with
        reading.set()
        over.wait(60)
        return message

    handler = grpc.stream_stream_rpc_method_handler(lambda messages, _: messages, read)
    port = ClusterPort(SECRET, calls=2, max_message_bytes=1 << 20)
    handlers = grpc.method_handlers_generic_handler(SERVICE, {"Call": handler})
    port.server.add_generic_rpc_handlers((handlers,))
    number = port.start("127.0.0.1:0")
    try:
        with grpc.insecure_channel(f"127.0.0.1:{number}") as channel:
            proof = CallerProof.begin(rpc.HandshakeStub(channel), SECRET)
            call = proof.call(channel.stream_stream(f"/{SERVICE}/Call"), iter([b"any"]), 30)
            assert reading.wait(10)
            began = time.monotonic()
            port.stop()
            assert time.monotonic() - began < 20
            assert "gRPC keeps calls that have ended" in caplog.text
            assert call.code() == grpc.StatusCode.UNAVAILABLE
    finally:
        over.set()
