"""Responses that callers asked to be stored, in this process's memory and within bounds."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Sequence

from jaxserve.api.errors import RequestError
from jaxserve.server.json_body import JsonObject, dump


@dataclasses.dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and the conversation that it ends.

    items: of the conversation, the response's own output last; what `/v1/responses` calls items.
    bytes: about how much memory it takes, as its length in JSON.
    """

    response: JsonObject
    items: Sequence[JsonObject]
    bytes: int

    @property
    def input_items(self) -> Sequence[JsonObject]:
        return self.items[: len(self.items) - len(self.response["output"])]


class StoredResponses:
    """Responses by their caller's name and their id. max_bytes: of all together; the oldest go
    first, and a response that is larger alone is not stored. For any thread: long responses are
    written in one of their own."""

    def __init__(self, max_bytes: int):
        self.bytes = 0  # of all responses
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._stored: collections.OrderedDict[tuple[str, str], StoredResponse] = (
            collections.OrderedDict()
        )

    def add(self, caller: str, response: JsonObject, items: Sequence[JsonObject]) -> None:
        """Stores a response. items: of its conversation, see `StoredResponse`."""
        entry = StoredResponse(response, items, len(dump(response)) + len(dump(list(items))))
        if entry.bytes > self._max_bytes:
            return
        with self._lock:
            self._stored[caller, response["id"]] = entry
            self.bytes += entry.bytes
            while self.bytes > self._max_bytes:
                _, oldest = self._stored.popitem(last=False)
                self.bytes -= oldest.bytes

    def get(self, caller: str, id: str, field: str = "") -> StoredResponse:
        """A caller's response. field: the request's field with the id. Errors: RequestError."""
        try:
            return self._stored[caller, id]
        except KeyError:
            message = f"no response {id!a:.100} is stored here (any more): ask with store=true"
            raise RequestError(field, message, "NOT_FOUND") from None

    def items(self, caller: str) -> dict[str, JsonObject]:
        """All items of a caller's responses that have an id, by this."""
        with self._lock:
            mine = [entry for (name, _), entry in self._stored.items() if name == caller]
        return {str(item["id"]): item for entry in mine for item in entry.items if item.get("id")}

    def delete(self, caller: str, id: str) -> None:
        """Forgets a caller's response. Errors: RequestError."""
        with self._lock:
            self.bytes -= self.get(caller, id).bytes
            del self._stored[caller, id]
