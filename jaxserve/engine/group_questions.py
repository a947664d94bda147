"""Questions to all workers of a group, about what each has read of the same files."""

from __future__ import annotations

from typing import Any, Protocol

from jaxserve.api.errors import RequestError
from jaxserve.engine.command import WorkersLost


class Asks(Protocol):
    """Whatever has all workers do something; see `worker_peers.Peers`."""

    lost: str

    def ask(self, what: str, seconds: float, **arguments: Any) -> list[Any]: ...


def ask_all(peers: Asks, what: str, seconds: float, **arguments: Any) -> list[Any]:
    """Has all workers do something; returns their answers. Errors: RequestError, the first
    worker's, or UNAVAILABLE where workers are lost."""
    try:
        answers = peers.ask(what, seconds, **arguments)
    except WorkersLost as lost:
        raise RequestError("", f"workers were lost: {lost}", "UNAVAILABLE") from None
    for worker, answer in enumerate(answers):
        if "error" in answer:
            fault = f"worker {worker}: {answer['error']}"
            raise RequestError(answer["field"], fault, answer["status"])
    return answers


def common_fingerprint(answers: list[Any], field: str, path: str) -> str:
    """Returns the fingerprint of the files that all workers have read. Errors: RequestError of this
    field where they have not read the same."""
    found = {answer["fingerprint"] for answer in answers}
    if len(found) > 1:
        raise RequestError(field, f"the files of {path} differ between workers")
    return found.pop()
