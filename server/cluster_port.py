"""A gRPC port for those who know the cluster's secret. Strangers are refused at once, so that they
keep no place and cost no memory."""

from __future__ import annotations

import concurrent.futures
import logging

import grpc

from jaxserve.server import replica_pb2_grpc as rpc
from jaxserve.server.own_address import is_loopback
from jaxserve.server.replica_auth import HANDSHAKE_SECONDS, CallerCheck
from jaxserve.settings.schema import ConfigError, ServerConfig

HANDSHAKE_THREADS = 4  # for calls that are answered at once: of strangers and of handshakes
MAX_HANDSHAKES = 256  # such calls that are answered or wait for it
MAX_CALLS_PER_CONNECTION = 64
MAX_METADATA_BYTES = 8 << 10
IDLE_MS = 10_000  # after which a connection without a call is closed
STOP_SECONDS = 1.0  # for calls to end by themselves
ENDED_SECONDS = 5.0  # after it, for gRPC to have ended all calls
KEEPALIVE_MS = 5_000  # between pings of an asker that says nothing, and for its answer
log = logging.getLogger(__name__)


class ClusterPort:
    """A port, and its server, to which services are to be added before it listens. secret: that
    callers have to know. calls: at a time, beside handshakes; each has a thread. max_message_bytes:
    of a caller's message."""

    def __init__(self, secret: bytes, calls: int, max_message_bytes: int):
        options = [
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
            ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_SECONDS * 1000)),
            ("grpc.max_connection_idle_ms", IDLE_MS),
            ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ]
        callers = CallerCheck(secret)
        self.server = grpc.server(
            concurrent.futures.ThreadPoolExecutor(calls + HANDSHAKE_THREADS, "session"),
            interceptors=[callers],
            options=options,
            maximum_concurrent_rpcs=calls + MAX_HANDSHAKES,
        )
        rpc.add_HandshakeServicer_to_server(callers, self.server)

    def start(self, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
        """Listens on HOST:PORT; returns the port's number. Errors: ConfigError."""
        try:
            if credentials is None:
                port = self.server.add_insecure_port(address)
            else:
                port = self.server.add_secure_port(address, credentials)
        except RuntimeError:
            port = 0
        if not port:
            raise ConfigError("replica_port", f"cannot listen on {address}: is it taken?")
        self.server.start()
        return port

    def stop(self) -> None:
        """Ends all calls and closes the port."""
        # without a bound this may wait for ever: a message that cannot be read, of a call that its
        # handler has just ended, has gRPC send a second status, whose end it never learns
        if not self.server.stop(STOP_SECONDS).wait(STOP_SECONDS + ENDED_SECONDS):
            log.warning("gRPC keeps calls that have ended; the port is closed all the same")


def check_replica_port(config: ServerConfig) -> None:
    """Refuses a port where others on the network could read or change what a conductor says.
    Errors: ConfigError."""
    if config.replica_port is None or is_loopback(config.host):
        return
    if config.tls_cert is None and not config.insecure:
        raise ConfigError(
            "replica_port",
            f"on {config.host!r} it needs --tls_cert and --tls_key, or --insecure if no other "
            "machine can reach the network between conductors and replicas",
        )
