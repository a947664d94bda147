"""Questions about cached blocks between processes: see `replica.kv_pool` and replica.proto."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxserve.api.errors import RequestError
from jaxserve.replica.kv_pool import HasKvPool, KvHolding, KvLease, KvPool
from jaxserve.replica.protocol import Replica
from jaxserve.server import replica_pb2 as pb

TOKEN_TYPE = np.dtype("<i4")


def require_pool(replica: Replica) -> KvPool:
    """The pool of a replica. Errors: RequestError where it has none."""
    if not isinstance(replica, HasKvPool):
        raise RequestError("", "this server has no pool of KV", "UNIMPLEMENTED")
    return replica.kv_pool


def kv_answer(question: pb.KvQuestion, replica: Replica) -> str:
    """Asks a replica's pool; returns the answer as JSON. Errors: RequestError."""
    pool = require_pool(replica)
    if len(question.prompt) % TOKEN_TYPE.itemsize:
        raise RequestError("prompt", f"has {len(question.prompt)} bytes, not 4 for each token")
    prompt = np.frombuffer(question.prompt, TOKEN_TYPE)
    match question.kind:
        case "find":
            found: Any = [dataclasses.asdict(one) for one in pool.find(prompt, question.salt)]
        case "lease":
            found = dataclasses.asdict(pool.lease(prompt, question.salt, question.seconds, ""))
        case "release":
            found = pool.release(question.lease)
        case "leases":
            found = [dataclasses.asdict(one) for one in pool.leases()]
        case _:
            raise RequestError("kind", f"{question.kind!r:.80} is unknown", "UNIMPLEMENTED")
    return json.dumps(found)


class RemoteKvPool:
    """The pool of a replica on another process; implements `KvPool`. ask: sends a question and
    returns the answer as JSON."""

    def __init__(self, ask: Callable[[pb.KvQuestion], str]):
        self._ask = ask

    def _question(self, kind: str, **fields: Any) -> Any:
        return json.loads(self._ask(pb.KvQuestion(kind=kind, **fields)))

    def find(self, prompt: np.ndarray, salt: str) -> list[KvHolding]:
        found = self._question("find", prompt=_bytes_of(prompt), salt=salt)
        return [KvHolding(**one) for one in found]

    def lease(self, prompt: np.ndarray, salt: str, seconds: float, replica: str) -> KvLease:
        fields = {"prompt": _bytes_of(prompt), "salt": salt, "seconds": seconds}
        return KvLease(**self._question("lease", **fields))

    def release(self, lease: str) -> bool:
        return bool(self._question("release", lease=lease))

    def leases(self) -> list[KvLease]:
        return [KvLease(**one) for one in self._question("leases")]

    def replicate(self, prompt: np.ndarray, salt: str, target: str, source: str) -> KvHolding:
        raise RequestError("replica", "copies between replicas are made by their conductor")


def _bytes_of(prompt: np.ndarray) -> bytes:
    return np.ascontiguousarray(prompt, TOKEN_TYPE).tobytes()
