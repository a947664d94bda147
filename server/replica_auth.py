"""Proofs of the cluster's secret, by which a replica and its callers trust each other.

The secret itself is never sent. Proofs begin a session and do not cover its messages: only TLS
keeps out those who can change what others send.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import threading
from collections.abc import Iterator

import grpc

from jaxserve.group.handshake import NONCE_BYTES, Proofs, Purpose
from jaxserve.group.member import MIN_SECRET
from jaxserve.server import replica_pb2 as pb
from jaxserve.settings.schema import ConfigError

SECRET_VARIABLE = "JAXSERVE_CLUSTER_SECRET"
PURPOSE = Purpose(b"jaxserve replica 2", "replica", "cluster")  # changes with replica.proto
CALLER = b"caller"
REPLICA = b"replica"
HANDSHAKE_SECONDS = 5.0
log = logging.getLogger(__name__)


def cluster_secret() -> bytes:
    """Returns the secret of this process's cluster. Errors: ConfigError if it has none."""
    secret = os.environ.get(SECRET_VARIABLE, "")
    if len(secret) < MIN_SECRET:
        raise ConfigError(
            "secret",
            f"{SECRET_VARIABLE} must be set, to the same text of at least {MIN_SECRET} characters "
            "for replicas and conductors",
        )
    return secret.encode()


class CallerProof:
    """The caller's side of a handshake: `hello`, then `answer` to the challenge, then `accepts`."""

    def __init__(self, secret: bytes):
        self._secret = secret
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._replicas = b""

    @property
    def hello(self) -> pb.Hello:
        return pb.Hello(nonce=self._nonce)

    def answer(self, challenge: pb.Challenge) -> pb.Proof:
        self._replicas = challenge.nonce
        return pb.Proof(proof=_proof(self._secret, CALLER, self._replicas, self._nonce))

    def accepts(self, given: bytes) -> bool:
        """Returns whether the replica has proved that it knows the secret too."""
        return _proves(given, self._secret, REPLICA, self._replicas, self._nonce)


class ReplicaProof:
    """The replica's side of a handshake: `challenge` after the caller's hello, then `answer`."""

    def __init__(self, secret: bytes):
        self._secret = secret
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    @property
    def challenge(self) -> pb.Challenge:
        return pb.Challenge(nonce=self._nonce)

    def answer(self, hello: pb.Hello, given: pb.Proof, context: grpc.ServicerContext) -> bytes:
        """The replica's own proof. The call of one that does not know the secret is aborted."""
        if not self.accepts(hello, given):
            log.warning("refused %s, which does not know the cluster's secret", context.peer())
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the replica has another secret")
        return _proof(self._secret, REPLICA, self._nonce, hello.nonce)

    def accepts(self, hello: pb.Hello, given: pb.Proof) -> bool:
        """Returns whether the caller has proved that it knows the secret."""
        return _proves(given.proof, self._secret, CALLER, self._nonce, hello.nonce)


@contextlib.contextmanager
def handshake_time(context: grpc.ServicerContext) -> Iterator[None]:
    """Cancels a call whose handshake takes longer than HANDSHAKE_SECONDS."""
    late = threading.Timer(HANDSHAKE_SECONDS, context.cancel)
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


def _proof(secret: bytes, role: bytes, replicas: bytes, callers: bytes) -> bytes:
    """The proof of one side, CALLER or REPLICA, over fresh numbers of both."""
    return Proofs(secret, PURPOSE, replicas, callers, b"").of(role)


def _proves(proof: bytes, secret: bytes, role: bytes, replicas: bytes, callers: bytes) -> bool:
    """Returns whether a proof is right. A number that is too short proves nothing."""
    long_enough = len(replicas) == len(callers) == NONCE_BYTES
    return long_enough and hmac.compare_digest(proof, _proof(secret, role, replicas, callers))
