"""Proofs of the cluster's secret, by which a replica and its callers trust each other.

A caller asks for a challenge, a fresh number. Its other calls carry a proof over that and a number
of its own in their metadata, and the replica's proof comes back in the answer's. gRPC bounds
metadata, and neither side reads a message before it has seen the proof of the other: strangers cost
no memory, and keep no place, for there is nothing to wait for.

The secret itself is never sent. Proofs begin a call and do not cover its messages: only TLS keeps
out those who can change what others send.
"""

from __future__ import annotations

import functools
import hmac
import logging
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from jaxserve.api.errors import RequestError
from jaxserve.group.handshake import NONCE_BYTES, Proofs, Purpose
from jaxserve.group.member import MIN_SECRET
from jaxserve.server import replica_pb2 as pb
from jaxserve.server import replica_pb2_grpc as rpc
from jaxserve.settings.schema import ConfigError

SECRET_VARIABLE = "JAXSERVE_CLUSTER_SECRET"
PURPOSE = Purpose(b"jaxserve replica 7", "replica", "cluster")  # changes with replica.proto
CALLER = b"caller"
REPLICA = b"replica"
CHALLENGE_KEY = "jaxserve-challenge-bin"  # keys of metadata; gRPC takes bytes for -bin
NONCE_KEY = "jaxserve-nonce-bin"
PROOF_KEY = "jaxserve-proof-bin"
HANDSHAKE_SECONDS = 5.0  # that a challenge may be answered, and waited for
END_SECONDS = 1.0  # that the status of a refused call may take to follow its metadata
WARN_SECONDS = 1.0  # between warnings of strangers
CHALLENGE_METHOD = "/jaxserve.replica.v1.Handshake/Challenge"
Behavior = Callable[[Iterator[Any], grpc.ServicerContext], Iterator[Any]]
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
    """The caller's side of a handshake: `metadata` goes with a call, whose answer `check` waits
    for."""

    def __init__(self, secret: bytes, challenge: bytes):
        self._secret = secret
        self._challenge = challenge
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    @classmethod
    def begin(cls, handshakes: rpc.HandshakeStub, secret: bytes) -> CallerProof:
        """Asks the replica at the other end for a challenge. handshakes: made with the channel, for
        gRPC ends the process where a stub is made once another thread has closed that. Errors:
        RequestError."""
        try:
            call = handshakes.Challenge(iter(()), timeout=HANDSHAKE_SECONDS)
        except ValueError:
            raise RequestError("", "the connection was closed", "UNAVAILABLE") from None
        challenge = _metadata_value(call, CHALLENGE_KEY)
        call.cancel()
        return cls(secret, challenge)

    @property
    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        proof = _proof(self._secret, CALLER, self._challenge, self._nonce)
        return (CHALLENGE_KEY, self._challenge), (NONCE_KEY, self._nonce), (PROOF_KEY, proof)

    def call(
        self,
        method: grpc.StreamStreamMultiCallable[Any, Any],
        messages: Iterator[Any],
        timeout: float | None = None,
    ) -> Any:
        """Begins a call with this proof. Errors: RequestError once the channel was closed."""
        try:
            return method(messages, timeout=timeout, metadata=self.metadata)
        except ValueError:
            raise RequestError("", "the connection was closed", "UNAVAILABLE") from None

    def check(self, call: grpc.Call) -> None:
        """Waits until the replica has proved that it knows the secret too. Errors: RequestError,
        also where the call has ended before."""
        given = _metadata_value(call, PROOF_KEY)
        if not _proves(given, self._secret, REPLICA, self._challenge, self._nonce):
            raise RequestError("", "it does not know the cluster's secret", "UNAUTHENTICATED")


def _metadata_value(call: grpc.Call, key: str) -> bytes:
    """Waits for a value in the metadata of an answer. Errors: RequestError if there is none, with
    the status of the call."""
    value = dict(call.initial_metadata() or ()).get(key)
    if value is not None:
        return bytes(value)
    ended = threading.Event()
    if call.add_callback(ended.set) and not ended.wait(END_SECONDS):
        raise RequestError("", "it does not know the cluster's secret", "UNAUTHENTICATED")
    raise RequestError("", call.details() or "it is no replica", call.code().name)


class CallerCheck(rpc.HandshakeServicer, grpc.ServerInterceptor):
    """The replica's side of handshakes: makes challenges, and aborts each other call of a server
    unless its caller has answered one, which admits that call only.

    A challenge is the time, in milliseconds of this process's clock, and a code that shows that
    this process has made it: nothing is kept until a caller has proved that it knows the secret.
    """

    def __init__(self, secret: bytes):
        self._secret = secret
        self._key = secrets.token_bytes(NONCE_BYTES)  # of the challenges' codes
        self._lock = threading.Lock()
        self._used: dict[bytes, float] = {}  # answered challenges, until they are too old
        self._refused = 0  # since the last warning
        self._warned_at = -WARN_SECONDS

    def Challenge(
        self, messages: Iterator[pb.Alive], context: grpc.ServicerContext
    ) -> Iterator[pb.Alive]:
        """The RPC of the handshake. Reads no message."""
        context.send_initial_metadata(((CHALLENGE_KEY, self._challenge(time.monotonic())),))
        return iter(())

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Returns the handler of a call, behind the check; called by gRPC for each."""
        handler = continuation(details)
        if handler is None or details.method == CHALLENGE_METHOD:
            return handler
        return grpc.stream_stream_rpc_method_handler(
            functools.partial(self._admitted, handler.stream_stream),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _admitted(
        self, behavior: Behavior, messages: Iterator[Any], context: grpc.ServicerContext
    ) -> Iterator[Any]:
        self._admit(context)
        return behavior(messages, context)

    def _admit(self, context: grpc.ServicerContext) -> None:
        """Proves to a caller that this replica knows the secret. Aborts the call of one that does
        not know it."""
        given = dict(context.invocation_metadata())
        challenge = given.get(CHALLENGE_KEY, b"")
        nonce = given.get(NONCE_KEY, b"")
        proof = given.get(PROOF_KEY, b"")
        if not _proves(proof, self._secret, CALLER, challenge, nonce):
            self._warn(context.peer())
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the replica has another secret")
        if not self._use(challenge):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the challenge is old or was used")
        answer = _proof(self._secret, REPLICA, challenge, nonce)
        context.send_initial_metadata(((PROOF_KEY, answer),))

    def _challenge(self, now: float) -> bytes:
        made = struct.pack("<Q", int(now * 1000)) + secrets.token_bytes(NONCE_BYTES // 4)
        return made + self._code(made)

    def _code(self, made: bytes) -> bytes:
        return hmac.digest(self._key, made, "sha256")[: NONCE_BYTES // 2]

    def _use(self, challenge: bytes) -> bool:
        """Takes a challenge; False unless it is of this process, recent and not used yet."""
        now = time.monotonic()
        made = challenge[: NONCE_BYTES // 2]
        made_at = struct.unpack_from("<Q", made)[0] / 1000
        is_ours = hmac.compare_digest(challenge, made + self._code(made))
        if not is_ours or now - made_at > HANDSHAKE_SECONDS:
            return False
        with self._lock:
            used = self._used
            self._used = {one: at for one, at in used.items() if now - at <= HANDSHAKE_SECONDS}
            is_new = challenge not in self._used
            self._used[challenge] = made_at
        return is_new

    def _warn(self, peer: str) -> None:
        """Logs that callers were refused, once in a while: strangers may call without end."""
        with self._lock:
            self._refused += 1
            now = time.monotonic()
            if now - self._warned_at < WARN_SECONDS:
                return
            refused = self._refused
            self._refused = 0
            self._warned_at = now
        log.warning(
            "refused %s, which does not know the cluster's secret (%d calls since the last time)",
            peer,
            refused,
        )


def _proof(secret: bytes, role: bytes, replicas: bytes, callers: bytes) -> bytes:
    """The proof of one side, CALLER or REPLICA, over fresh numbers of both."""
    return Proofs(secret, PURPOSE, replicas, callers, b"").of(role)


def _proves(proof: bytes, secret: bytes, role: bytes, replicas: bytes, callers: bytes) -> bool:
    """Returns whether a proof is right. A number that is too short proves nothing."""
    long_enough = len(replicas) == len(callers) == NONCE_BYTES
    return long_enough and hmac.compare_digest(proof, _proof(secret, role, replicas, callers))
