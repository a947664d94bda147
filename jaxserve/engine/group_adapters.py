"""The adapters that all workers of a group hold in host memory, each its part."""

from __future__ import annotations

import contextlib
import json
import logging

from jaxserve.api.errors import RequestError
from jaxserve.engine.command import WorkersLost
from jaxserve.engine.group_questions import ask_all, common_fingerprint
from jaxserve.engine.worker_peers import Peers
from jaxserve.group.messages import Kind

LOAD_SECONDS = 600.0  # that the files of an adapter may take to be read
log = logging.getLogger(__name__)


class GroupAdapters:
    """Adapters of a group's workers, by number; see `HostAdapters`."""

    def __init__(self, peers: Peers):
        self._peers = peers
        # by number: folder and fingerprint, "" until that is known
        self._loaded: dict[int, tuple[str, str]] = {}
        self._lost: list[int] = []

    def load(self, number: int, folder: str) -> str:
        """Has all workers read an adapter; returns its fingerprint. Errors: RequestError for files
        that cannot be served, or that differ between workers."""
        self._loaded[number] = folder, ""
        fingerprint = self._ask(number, folder)
        self._loaded[number] = folder, fingerprint
        return fingerprint

    def _ask(self, number: int, folder: str) -> str:
        answers = ask_all(self._peers, "load_adapter", LOAD_SECONDS, number=number, folder=folder)
        return common_fingerprint(answers, "lora_path", folder)

    def drop(self, number: int) -> None:
        """Has all workers forget an adapter."""
        self._loaded.pop(number, None)
        with contextlib.suppress(WorkersLost):
            self._peers.tell(Kind.DROP_ADAPTER, json.dumps({"number": number}).encode())

    def load_again(self) -> None:
        """Has new workers read the adapters that those before them had; those that cannot be read
        any more, or are others now, are `lost`. Errors: WorkersLost."""
        for number, (folder, before) in list(self._loaded.items()):
            try:
                fingerprint = self._ask(number, folder)
            except RequestError as error:
                if error.status == "UNAVAILABLE":
                    raise WorkersLost(self._peers.lost) from None
                log.error("adapter %d is lost: %s", number, error)
                self._lost.append(number)
                continue
            if before and fingerprint != before:
                log.error("adapter %d is lost: the files of %s have changed", number, folder)
                self._lost.append(number)

    def take_lost(self) -> list[int]:
        """Returns the numbers of the adapters that new workers do not have, each once."""
        lost, self._lost = self._lost, []
        return lost
