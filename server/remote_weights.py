"""The weights of a replica on another process: see replica.proto."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from jaxserve.api.errors import RequestError
from jaxserve.replica.protocol import Replica
from jaxserve.replica.weights import (
    ASLEEP,
    MODEL_PATH,
    PARTS,
    PAUSED,
    RUNNING,
    Mode,
    WeightSource,
)
from jaxserve.scheduling.request_table import FIRST_VERSION
from jaxserve.server import replica_pb2 as pb
from jaxserve.server.grpc.proto import value_in

CHANGE_SECONDS = 3600.0  # that files may take to be read there, and what runs to end
Ask = Callable[[pb.WeightsQuestion], str]


class RemoteWeights:
    """Weights of a remote replica. said: gives its newest heartbeat. ask: asks it, and returns its
    answer; errors: RequestError, its own, or UNAVAILABLE."""

    def __init__(self, said: Callable[[], pb.Heartbeat], ask: Ask):
        self._said = said
        self._ask = ask

    @property
    def version(self) -> str:
        return self._said().weight_version or FIRST_VERSION

    @property
    def state(self) -> str:
        return self._said().weight_state or RUNNING

    def pause(self, mode: Mode = "abort") -> None:
        self._change(PAUSED, pb.WeightsQuestion(kind="pause", mode=mode))

    def resume(self) -> None:
        self._change(RUNNING, pb.WeightsQuestion(kind="resume"))

    def update(
        self, source: WeightSource, version: str | None = None, mode: Mode = "finish"
    ) -> str:
        if isinstance(source, Mapping):
            raise RequestError(MODEL_PATH, "arrays cannot be given to another process: give a path")
        question = pb.WeightsQuestion(kind="update", path=source, version=version, mode=mode)
        return self._change(None, question)

    def sleep(self, level: int = 1, mode: Mode = "abort") -> None:
        self._change(ASLEEP, pb.WeightsQuestion(kind="sleep", level=level, mode=mode))

    def wake_up(self, parts: Collection[str] = PARTS) -> None:
        self._change(None, pb.WeightsQuestion(kind="wake_up", parts=list(parts)))

    def _change(self, state: str | None, question: pb.WeightsQuestion) -> str:
        """Asks for a change, after which it is in this state, and returns the version; both hold
        until the next heartbeat. None: the state is not known before that."""
        version = self._ask(question)
        said = self._said()
        said.weight_version = version
        if state is not None:
            said.weight_state = state
        return version


def weights_answer(question: pb.WeightsQuestion, replica: Replica) -> str:
    """Changes a replica's weights as a question says, and returns their version. Errors:
    RequestError."""
    weights = replica.weights
    mode: Mode = question.mode  # type: ignore[assignment]  # checked there
    match question.kind:
        case "pause":
            weights.pause(mode)
        case "resume":
            weights.resume()
        case "update":
            weights.update(question.path, value_in(question, "version"), mode)
        case "sleep":
            weights.sleep(question.level, mode)
        case "wake_up":
            weights.wake_up(question.parts)
        case _:
            raise RequestError("kind", f"{question.kind!r:.50} is unknown", "UNIMPLEMENTED")
    return weights.version
