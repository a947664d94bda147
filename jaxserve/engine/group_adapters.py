"""The adapters that all workers of a group hold in host memory, each its part."""

from __future__ import annotations

import contextlib
import json

from jaxserve.api.errors import RequestError
from jaxserve.engine.command import WorkersLost
from jaxserve.engine.worker_peers import Peers
from jaxserve.group.messages import Kind
from jaxserve.settings.schema import ConfigError

LOAD_SECONDS = 600.0  # that the files of an adapter may take to be read


class GroupAdapters:
    """Adapters of a group's workers, by number; see `HostAdapters`."""

    def __init__(self, peers: Peers):
        self._peers = peers
        self._folders: dict[int, str] = {}

    def load(self, number: int, folder: str) -> str:
        """Has all workers read an adapter; returns its fingerprint. Errors: RequestError for files
        that cannot be served, or that differ between workers."""
        fingerprint = self._ask(number, folder)
        self._folders[number] = folder
        return fingerprint

    def _ask(self, number: int, folder: str) -> str:
        try:
            answers = self._peers.ask("load_adapter", LOAD_SECONDS, number=number, folder=folder)
        except WorkersLost as lost:
            raise RequestError("", f"workers were lost: {lost}", "UNAVAILABLE") from None
        for worker, answer in enumerate(answers):
            if "error" in answer:
                raise RequestError("lora_path", f"worker {worker}: {answer['error']}")
        found = {answer["fingerprint"] for answer in answers}
        if len(found) > 1:
            raise RequestError("lora_path", f"the files of {folder} differ between workers")
        return found.pop()

    def drop(self, number: int) -> None:
        """Has all workers forget an adapter."""
        self._folders.pop(number, None)
        with contextlib.suppress(WorkersLost):
            self._peers.tell(Kind.DROP_ADAPTER, json.dumps({"number": number}).encode())

    def load_again(self) -> None:
        """Has new workers read the adapters that those before them had. Errors: ConfigError where
        one cannot be served any more; WorkersLost."""
        for number, folder in list(self._folders.items()):
            try:
                self._ask(number, folder)
            except RequestError as error:
                if error.status == "UNAVAILABLE":
                    raise WorkersLost(self._peers.lost) from None
                raise ConfigError("lora_modules", str(error)) from None
