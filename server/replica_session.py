"""A caller's side of a session with a replica on another process: see replica.proto."""

from __future__ import annotations

import queue
import time
from typing import Any

import grpc

from jaxserve.api.errors import RequestError
from jaxserve.server import replica_pb2 as pb
from jaxserve.server import replica_pb2_grpc as rpc
from jaxserve.server.auth.tls import Authorities
from jaxserve.server.replica_auth import CallerProof
from jaxserve.transfer.protocol import split_address

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),  # the replica is trusted: it knows the secret
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # each session has a connection of its own
]


def open_channel(
    target: str, authorities: Authorities | None, replica: str | None = None
) -> grpc.Channel:
    """Returns a connection to the port of a replica. authorities: of its certificate; None: it has
    no TLS. replica: HOST:PORT for whose host the certificate is, if not for the target's: a process
    of a replica has that of its leader."""
    if authorities is None:
        return grpc.insecure_channel(target, CHANNEL_OPTIONS)
    options: list[tuple[str, Any]] = list(CHANNEL_OPTIONS)
    if replica is not None and replica != target:
        options.append(("grpc.ssl_target_name_override", split_address(replica)[0]))
    return grpc.secure_channel(target, authorities.credentials(), options)


class ReplicaSession:
    """One session. `say` and `end` may be called by any thread, `open` and `next` by one.

    heard_at: monotonic seconds of the replica's last word, of the beginning before there was one.
    """

    def __init__(self, target: str, secret: bytes, authorities: Authorities | None = None):
        self._channel = open_channel(target, authorities)
        self._handshakes = rpc.HandshakeStub(self._channel)  # see `CallerProof.begin`
        self._replicas = rpc.ReplicaStub(self._channel)
        self._secret = secret
        self._commands: queue.SimpleQueue[pb.Command | None] = queue.SimpleQueue()
        self._reports: Any = iter(())
        self._cause = ""  # why this side has ended it
        self.heard_at = time.monotonic()

    def open(self) -> pb.Welcome:
        """Proves to the replica that this side knows the secret, and has it prove the same.
        Errors: RequestError."""
        try:
            proof = CallerProof.begin(self._handshakes, self._secret)
            self._reports = proof.call(self._replicas.Session, iter(self._commands.get, None))
            proof.check(self._reports)
        except RequestError as error:
            raise self._ended(error) from None
        return self.next().welcome

    def say(self, command: pb.Command) -> None:
        """Sends a command, without waiting."""
        self._commands.put(command)

    def next(self) -> pb.Report:
        """Waits for the next report. Errors: RequestError where the session has ended."""
        try:
            report = next(self._reports)
        except StopIteration:
            raise RequestError("", "it has ended the session", "UNAVAILABLE") from None
        except grpc.RpcError as error:
            details = RequestError("", error.details() or "", error.code().name)
            raise self._ended(details) from None
        self.heard_at = time.monotonic()
        return report

    def _ended(self, error: RequestError) -> RequestError:
        """Returns why the session has ended: as this side said first, else the error of gRPC."""
        return RequestError("", self._cause, "UNAVAILABLE") if self._cause else error

    def end(self, cause: str = "closed") -> None:
        """Ends the session; an `open` or `next` that waits fails with the first cause given."""
        self._cause = self._cause or cause
        self._commands.put(None)
        self._channel.close()  # cancels its calls
