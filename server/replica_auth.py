"""Who may hold a session with a replica: whoever proves that it knows the cluster's secret.

The secret itself is never sent. Who can change what others send needs TLS to be kept out: proofs
begin a session, and do not cover what is said in it.
"""

from __future__ import annotations

import hmac
import os
import secrets

from jaxserve.group.handshake import NONCE_BYTES, Proofs, Purpose
from jaxserve.group.member import MIN_SECRET
from jaxserve.settings.schema import ConfigError

SECRET_VARIABLE = "JAXSERVE_CLUSTER_SECRET"
PURPOSE = Purpose(b"jaxserve replica 1", "replica", "cluster")  # changes with replica.proto
CALLER = b"caller"
REPLICA = b"replica"


def cluster_secret() -> bytes:
    """The secret of this process's cluster. Errors: ConfigError where there is none."""
    secret = os.environ.get(SECRET_VARIABLE, "")
    if len(secret) < MIN_SECRET:
        raise ConfigError(
            "secret",
            f"{SECRET_VARIABLE} must be set, to the same text of at least {MIN_SECRET} characters "
            "for replicas and conductors",
        )
    return secret.encode()


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: bytes, role: bytes, replicas: bytes, callers: bytes) -> bytes:
    """The proof of one side, CALLER or REPLICA, over fresh numbers of both."""
    return Proofs(secret, PURPOSE, replicas, callers, b"").of(role)


def proves(given: bytes, secret: bytes, role: bytes, replicas: bytes, callers: bytes) -> bool:
    """Whether a proof is right. A number that is too short proves nothing."""
    long_enough = len(replicas) == len(callers) == NONCE_BYTES
    return long_enough and hmac.compare_digest(given, proof(secret, role, replicas, callers))
