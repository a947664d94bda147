"""The live requests of a replica: one object for each, with its sink."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable

from jaxserve.api.events import Event, Finished
from jaxserve.api.request import Request
from jaxserve.replica.protocol import Sink

log = logging.getLogger(__name__)


@dataclasses.dataclass
class LiveRequest:
    """A request that has not ended. seed: of its sampling, 63 bits. unfinished: completions that
    have not ended."""

    request: Request
    sink: Sink
    seed: int
    unfinished: int


class Registry:
    """Live requests by id. It has no lock of its own."""

    def __init__(self) -> None:
        self._live: dict[str, LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def __getitem__(self, request_id: str) -> LiveRequest:
        return self._live[request_id]

    def ids(self) -> list[str]:
        """Ids of all live requests, oldest first."""
        return list(self._live)

    def add(self, request: Request, sink: Sink, seed: int) -> None:
        """Begins to follow a request; its id is not among the live ones."""
        self._live[request.id] = LiveRequest(request, sink, seed, len(request.completions))

    def notify(self, events: Iterable[tuple[str, Event]]) -> list[str]:
        """Hands (request id, event) pairs to their sinks, one call per request, and forgets
        requests whose last completion ended. Returns the ids of requests whose sinks raised: they
        are called no more."""
        by_request: dict[str, list[Event]] = {}
        ended: list[str] = []
        for request_id, event in events:
            mine = by_request.get(request_id)
            if mine is None:
                by_request[request_id] = [event]
            else:
                mine.append(event)
            if isinstance(event, Finished):
                ended.append(request_id)
        live_events = [(self._live[request_id], mine) for request_id, mine in by_request.items()]
        for request_id in ended:  # before any sink is called: it may ask for requests of the others
            live = self._live[request_id]
            live.unfinished -= 1
            if not live.unfinished:
                del self._live[request_id]
        failed = []
        for live, mine in live_events:
            try:
                live.sink(mine)
            except Exception:
                id = live.request.id
                log.exception("the sink of request %r failed", id, extra={"request_id": id})
                live.sink = _ignore
                failed.append(id)
        return failed


def _ignore(events: object) -> None:
    """Drops the events of a request whose sink raised."""
