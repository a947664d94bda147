"""The models of a server: which frontend serves a request, by the name of its model."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from jaxserve.api.errors import RequestError
from jaxserve.api.request import UNKNOWN_MODEL
from jaxserve.replica.protocol import Replica
from jaxserve.server.frontend import DRAINING, RESTARTING, SERVING, STOPPING, Frontend
from jaxserve.server.frontend_metrics import FrontendMetrics
from jaxserve.server.streams import Stream
from jaxserve.settings.schema import ConfigError, ServerConfig
from jaxserve.text import Tokenizer
from jaxserve.text.structured_output import Guides


class Models:
    """The frontends of a server, one for each model; nearly always one. Must be made on the event
    loop.

    names: by which requests call the models. That of a single one may be "": its replica knows it.
    """

    def __init__(self, config: ServerConfig, names: Sequence[str] = ("",)):
        self.config = config
        self.metrics = FrontendMetrics()
        self.all = [Frontend(config, self.metrics, name) for name in names]
        self.naming = asyncio.Lock()  # held from the check of an adapter's name until it is loaded
        self._adapters: dict[Frontend, frozenset[str]] = {}
        self._drained = False

    @property
    def several(self) -> bool:
        return len(self.all) > 1

    @property
    def state(self) -> str:
        """The state of the first model that is not served, else SERVING."""
        states = [frontend.state for frontend in self.all if frontend.state != SERVING]
        return states[0] if states else SERVING

    @property
    def requests(self) -> int:
        """Requests in progress."""
        return sum(len(frontend.streams) for frontend in self.all)

    @property
    def streams(self) -> dict[str, Stream]:
        """The requests in progress, by id."""
        return {id: one for frontend in self.all for id, one in frontend.streams.items()}

    async def abort(self, ids: Sequence[str]) -> int:
        """Ends requests with the reason cancelled; returns how many were running."""
        mine = [(frontend, [id for id in ids if id in frontend.streams]) for frontend in self.all]
        return sum([await frontend.abort(some) for frontend, some in mine if some])

    def serve(
        self, name: str, replica: Replica, tokenizer: Tokenizer | None, guides: Guides
    ) -> Frontend:
        """Begins to serve the model of this name; returns its frontend. Other arguments as of
        `Frontend.open`. Errors: ConfigError where another model has one of its names, or of those
        of its adapters; RequestError, UNAVAILABLE, once the server stops."""
        (frontend,) = (each for each in self.all if each.name == name)
        if frontend.state == STOPPING:
            frontend.check_open()
        if self.several:
            self._check_names(frontend, {*replica.info.other_names, *replica.adapters.by_name})
        frontend.open(replica, tokenizer, guides)
        self._follow_drain(frontend)
        return frontend

    def _check_names(self, frontend: Frontend, others: Collection[str]) -> None:
        """Refuses names beside a model's own that another one has. Errors: ConfigError."""
        for other in self.all:
            taken = {*_names(other), *self._adapter_names(other)} & {frontend.name, *others}
            if other is not frontend and taken:
                said = f"{min(taken)!r} is a name of {other.name!r} and of {frontend.name!r}"
                raise ConfigError("models", f"{said}, or of adapters of theirs")

    def drain(self) -> None:
        """Has all models refuse new requests, also one that comes later, until `resume`."""
        self._drained = True
        self._follow_drains()

    def resume(self) -> None:
        """Undoes `drain`."""
        self._drained = False
        self._follow_drains()

    def _follow_drains(self) -> None:
        for frontend in self.all:
            self._follow_drain(frontend)

    def _follow_drain(self, frontend: Frontend) -> None:
        if self._drained and frontend.state in (SERVING, RESTARTING):
            frontend.state = DRAINING
        elif not self._drained and frontend.state == DRAINING:
            frontend.state = SERVING

    def poll(self) -> None:
        """Follows the health of all models; see `Frontend.poll`."""
        for frontend in self.all:
            frontend.poll()
            self._follow_drain(frontend)
            self._adapter_names(frontend)

    def _adapter_names(self, frontend: Frontend) -> frozenset[str]:
        """The names of a model's adapters; while its replica is lost, those that it had."""
        replica = frontend.replica
        if replica is not None and replica.available:
            self._adapters[frontend] = frozenset(replica.adapters.by_name)
        return self._adapters.get(frontend, frozenset())

    def close(self) -> None:
        """Closes all frontends; see `Frontend.close`."""
        for frontend in self.all:
            frontend.close()

    def check_open(self) -> None:
        """Refuses unless requests for any model are accepted. Errors: RequestError, UNAVAILABLE."""
        if self.several and all(frontend.state != SERVING for frontend in self.all):
            raise RequestError("", f"the server is {self.state}", "UNAVAILABLE")
        if not self.several:
            self.all[0].check_open()

    def open(self, name: str) -> Frontend:
        """Returns the frontend of the model that a request names, and refuses unless it accepts
        requests. Errors: RequestError, as of `named`, and UNAVAILABLE."""
        frontend = self._found(name)
        frontend.check_open()
        frontend.check_model(name)
        return frontend

    def named(self, name: str) -> Frontend:
        """Returns the frontend of the model, or of the base model of the adapter, with this name;
        of a single one it may be left out. Errors: RequestError."""
        frontend = self._found(name)
        if frontend.replica is None or frontend.replica.available:  # else its adapters are unknown
            frontend.check_model(name)
        return frontend

    def _found(self, name: str) -> Frontend:
        """Returns what `named` does, but the only one for all names. Errors: RequestError."""
        if not self.several:
            return self.all[0]
        served = f"served here are {_listed(self.all)}"
        if not name:
            raise RequestError("model", f"is missing; {served}")
        # names of models first: no adapter takes the place of one
        for names in (_names, self._adapter_names):
            for frontend in self.all:
                if name in names(frontend):
                    return frontend
        if starting := [frontend for frontend in self.all if _starts(frontend)]:
            said = f"{name[:100]!r} is not known while models start ({_listed(starting)}); {served}"
            raise RequestError("model", said, "UNAVAILABLE")
        said = f"{name[:100]!r} is not served here; {served}"
        raise RequestError("model", said, "NOT_FOUND", reason=UNKNOWN_MODEL)

    def check_unused(self, name: str, base: Frontend) -> None:
        """Refuses a name for an adapter of one model that another model or its adapters have, or
        may have: it is not loaded yet. Errors: RequestError."""
        for other in self.all:
            if other is base:
                continue
            if name in (*_names(other), *self._adapter_names(other)):
                said = f"{name[:100]!r} is a name of {other.name!r} or of one of its adapters"
                raise RequestError("lora_name", said, "ALREADY_EXISTS")
            other.require_replica()


def _starts(frontend: Frontend) -> bool:
    """Returns whether a model is loading, or its processes start again."""
    return frontend.replica is None or not frontend.replica.available


def _listed(frontends: Sequence[Frontend]) -> str:
    return ", ".join(frontend.name for frontend in frontends)


def _names(frontend: Frontend) -> Collection[str]:
    """All names of a model, its adapters' apart."""
    if frontend.replica is None:
        return (frontend.name,)
    return (frontend.name, *frontend.replica.info.other_names)
