"""The adapters of a replica on another process: see replica.proto."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping

from jaxserve.replica.adapters import Adapter
from jaxserve.replica.protocol import Replica
from jaxserve.server import replica_pb2 as pb

LOAD_SECONDS = 600.0  # that files may take to be read there
HEARTBEAT_SECONDS = 2.0  # after a change, in which a heartbeat says so
Ask = Callable[[pb.AdapterQuestion], str]


class RemoteAdapters:
    """Adapters of a remote replica. said: gives those of its newest heartbeat. ask: asks it, and
    returns its answer; errors: RequestError, its own, or UNAVAILABLE."""

    def __init__(self, said: Callable[[], pb.Heartbeat], ask: Ask):
        self._said = said
        self._ask = ask
        # what was changed from here, until a heartbeat is sure to say so; None: unloaded
        self._changed: dict[str, tuple[float, Adapter | None]] = {}

    @property
    def by_name(self) -> Mapping[str, Adapter]:
        found = {
            each.name: Adapter(each.name, each.folder, each.identity, each.number)
            for each in self._said().adapters
        }
        now = time.monotonic()
        for name, (until, adapter) in list(self._changed.items()):
            if now > until:
                self._changed.pop(name, None)
            elif adapter is None:
                found.pop(name, None)
            else:
                found[name] = adapter
        return found

    def load(self, name: str, folder: str, in_place: bool = False) -> Adapter:
        question = pb.AdapterQuestion(kind="load", name=name, folder=folder, in_place=in_place)
        adapter = Adapter(**json.loads(self._ask(question)))
        self._changed[name] = time.monotonic() + HEARTBEAT_SECONDS, adapter
        return adapter

    def unload(self, name: str) -> None:
        self._ask(pb.AdapterQuestion(kind="unload", name=name))
        self._changed[name] = time.monotonic() + HEARTBEAT_SECONDS, None


def adapter_messages(replica: Replica) -> list[pb.Adapter]:
    """Returns the adapters of a replica, for its heartbeat."""
    adapters = replica.adapters.by_name.values()
    return [
        pb.Adapter(name=each.name, folder=each.folder, identity=each.identity, number=each.number)
        for each in adapters
    ]


def adapter_answer(question: pb.AdapterQuestion, replica: Replica) -> str:
    """Answers a question about adapters, as JSON. Errors: RequestError."""
    if question.kind == "unload":
        replica.adapters.unload(question.name)
        return "null"
    adapter = replica.adapters.load(question.name, question.folder, question.in_place)
    fields = ("name", "folder", "identity", "number")
    return json.dumps({name: getattr(adapter, name) for name in fields})
