"""Messages of a group's leader and its workers, and the check of who may join."""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass
from typing import Any

from jaxserve.settings.options import make, values_of
from jaxserve.settings.schema import EngineConfig

SHARED = ("mesh", "dtype", "quantization", "kv_cache_dtype")
LOCAL = ("model", "revision", "compile_cache")  # where they lie on a worker's machine


class Kind(enum.IntEnum):
    """Kinds of frames. All but COMMAND and RESULT have JSON in them."""

    HELLO = 1  # a worker: who it is
    REFUSED = 2  # the leader: why it may not join
    BEGIN = 3  # the leader, once all have come: its settings, and where JAX's processes meet
    PLANNED = 4  # a worker: it knows its part, and what it runs on
    COMMAND = 5  # the leader: a step command, see `engine.command`
    RESULT = 6  # worker 0: what a step left
    ASK = 7  # the leader: something else to do
    ANSWER = 8  # a worker: it is done, and what came of it
    PROGRESS = 9  # a worker: a part of that is done
    STATUS = 10  # a worker, each second: how far it is
    FAULT = 11  # a worker: why it ends
    END = 12  # the leader: nothing more will come
    TIERS = 13  # a worker: what has changed in the tiers below its devices
    ARRIVED = 14  # a worker: a piece of a fetch can be written to its pages
    BLOCKS = 15  # the leader: blocks below the devices to keep longer, or to bring nearer
    COMPILE = 16  # the leader: what the warm-up left is to be compiled beside steps
    DROP_ADAPTER = 17  # the leader: an adapter in host memory is not needed any more


@dataclass(frozen=True)
class Hello:
    """A worker that asks to join. port: free on its machine, for JAX's processes to meet if it is
    worker 0. weights: a fingerprint of the checkpoint."""

    worker: int
    versions: dict[str, str]
    settings: dict[str, Any]
    weights: str
    port: int

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, content: bytes) -> Hello:
        """Parses the message. Errors: ValueError."""
        try:
            hello = cls(**json.loads(content))
        except (TypeError, RecursionError) as error:
            raise ValueError(str(error)) from None
        is_valid = (
            type(hello.worker) is type(hello.port) is int
            and isinstance(hello.versions, dict)
            and isinstance(hello.settings, dict)
            and isinstance(hello.weights, str)
        )
        if not is_valid:
            raise ValueError("it does not say who it is")
        return hello


def shared_settings(config: EngineConfig) -> dict[str, Any]:
    """Returns the settings that distinguish members of different groups. In all others workers
    follow the leader; see `led_by`."""
    values = values_of(config)
    return {name: values[name] for name in SHARED}


def led_by(leader: dict[str, Any], own: EngineConfig) -> EngineConfig:
    """A worker's settings: the leader's, but for what is a matter of its machine. Errors:
    ConfigError."""
    values = values_of(own)
    return make(EngineConfig, leader | {name: values[name] for name in LOCAL})


def difference(leader: Hello, worker: Hello) -> str | None:
    """Returns why a worker cannot join this leader's group; None if it can."""
    for what, ours, theirs in (
        ("version of", leader.versions, worker.versions),
        ("setting", leader.settings, worker.settings),
    ):
        for name in sorted({*ours, *theirs}):
            if ours.get(name) != theirs.get(name):
                return (
                    f"{what} {name} is {theirs.get(name)!r}, and {ours.get(name)!r} at the leader"
                )
    if leader.weights != worker.weights:
        return (
            f"its weights are other ones (fingerprint {worker.weights[:12]}, and "
            f"{leader.weights[:12]} at the leader)"
        )
    return None
