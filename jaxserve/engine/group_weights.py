"""The weights of a replica over several processes: each worker has its part of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.engine.command import WorkersLost
from jaxserve.engine.group_questions import Asks, ask_all, common_fingerprint
from jaxserve.replica.weights import MODEL_PATH, WeightsHolder, WeightSource
from jaxserve.settings.schema import ConfigError

READ_SECONDS = 3600.0  # that the files of new weights may take to be read
MOVE_SECONDS = 600.0  # that weights may take between host memory and devices


class GroupWeights(WeightsHolder):
    """Weights of the workers of a group. Where the group forms again, its workers read those that
    were used last: their files must be there until others are used."""

    def __init__(self, peers: Asks):
        self._peers = peers
        self._read: tuple[str, str] | None = None  # path and fingerprint
        self._used: tuple[str, str] | None = None  # None: those that the settings name

    def read(self, source: WeightSource) -> str:
        if isinstance(source, Mapping):
            raise RequestError(
                MODEL_PATH,
                "arrays of this process cannot be given to a group of workers: write them to a "
                "folder, in /dev/shm for instance",
            )
        try:
            fingerprint = self._read_on_all(source)
        except RequestError:
            self._forget_on_all()  # some may have read them
            raise
        self._read = source, fingerprint
        return fingerprint

    def _read_on_all(self, path: str) -> str:
        """Has all workers read weights; returns their fingerprint. Errors: RequestError."""
        answers = self._ask("read_weights", READ_SECONDS, path=path)
        return common_fingerprint(answers, MODEL_PATH, path)

    def use(self) -> None:
        self._ask("use_weights", READ_SECONDS)
        self._used = self._read

    def forget(self) -> None:
        if self._read is not None:
            self._read = None
            self._forget_on_all()

    def _forget_on_all(self) -> None:
        try:
            self._ask("forget_weights", MOVE_SECONDS)
        except RequestError as error:
            if error.status != "UNAVAILABLE":  # with the workers what they read is gone
                raise

    def sleep(self, level: int) -> None:
        self._ask("sleep", MOVE_SECONDS, level=level)

    def wake(self) -> None:
        self._ask("wake", MOVE_SECONDS)

    def use_again(self) -> None:
        """Has new workers use the weights that those before them had. Errors: ConfigError where
        they are not there any more; WorkersLost."""
        if self._used is None:
            return
        path, fingerprint = self._used
        try:
            found = self._read_on_all(path)
            if found == fingerprint:
                self._ask("use_weights", READ_SECONDS)
        except RequestError as error:
            if error.status == "UNAVAILABLE":
                raise WorkersLost(self._peers.lost) from None
            raise ConfigError("model", str(error)) from None
        if found != fingerprint:
            raise ConfigError("model", f"the files of {path} are not those that were served")

    def _ask(self, what: str, seconds: float, **arguments: Any) -> list[Any]:
        return ask_all(self._peers, what, seconds, **arguments)
