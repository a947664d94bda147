"""The adapters of a replica on another process: see replica.proto."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from jaxserve.replica.adapters import Adapter
from jaxserve.replica.protocol import Replica
from jaxserve.server import replica_pb2 as pb

LOAD_SECONDS = 600.0  # that files may take to be read there
Ask = Callable[[pb.AdapterQuestion], str]


class RemoteAdapters:
    """Adapters of a remote replica. said: gives those of its newest heartbeat. ask: asks it, and
    returns its answer; errors: RequestError, its own, or UNAVAILABLE."""

    def __init__(self, said: Callable[[], pb.Heartbeat], ask: Ask):
        self._said = said
        self._ask = ask

    @property
    def by_name(self) -> Mapping[str, Adapter]:
        return {
            each.name: Adapter(each.name, each.folder, each.identity, each.number)
            for each in self._said().adapters
        }

    def load(self, name: str, folder: str, in_place: bool = False) -> Adapter:
        question = pb.AdapterQuestion(kind="load", name=name, folder=folder, in_place=in_place)
        return Adapter(**json.loads(self._ask(question)))

    def unload(self, name: str) -> None:
        self._ask(pb.AdapterQuestion(kind="unload", name=name))


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
