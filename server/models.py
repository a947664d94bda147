"""The models of a server: which frontend serves a request, by the name of its model."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jaxserve.api.errors import RequestError
from jaxserve.api.request import UNKNOWN_MODEL
from jaxserve.server.frontend import DRAINING, RESTARTING, SERVING, Frontend
from jaxserve.server.frontend_metrics import FrontendMetrics
from jaxserve.server.streams import Stream
from jaxserve.settings.schema import ServerConfig


class Models:
    """The frontends of a server, one for each model; nearly always one. Must be made on the event
    loop.

    names: by which requests call the models. That of a single one may be "": its replica knows it.
    """

    def __init__(self, config: ServerConfig, names: Sequence[str] = ("",)):
        self.config = config
        self.metrics = FrontendMetrics()
        self.all = [Frontend(config, self.metrics, name) for name in names]
        self._adapters: dict[Frontend, frozenset[str]] = {}

    @property
    def several(self) -> bool:
        return len(self.all) > 1

    @property
    def serving(self) -> bool:
        """True while all models are served."""
        return all(frontend.state == SERVING for frontend in self.all)

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

    def drain(self) -> None:
        """Has all models refuse new requests, also one that comes back later, until `resume`."""
        for frontend in self.all:
            if frontend.state in (SERVING, RESTARTING):
                frontend.state = DRAINING

    def resume(self) -> None:
        for frontend in self.all:
            if frontend.state == DRAINING:
                frontend.state = SERVING

    def poll(self) -> None:
        """Follows the health of all models; see `Frontend.poll`."""
        for frontend in self.all:
            frontend.poll()
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
        if all(frontend.state != SERVING for frontend in self.all):
            self.all[0].check_open()

    def open(self, name: str) -> Frontend:
        """Returns the frontend of the model that a request names, and refuses unless it accepts
        requests. Errors: RequestError, as of `named`, and UNAVAILABLE."""
        frontend = self.named(name)
        frontend.check_open()
        return frontend

    def named(self, name: str) -> Frontend:
        """Returns the frontend of the model, or of the base model of the adapter, with this name.
        The only one takes all names, and refuses unknown ones itself. Errors: RequestError."""
        if not self.several:
            return self.all[0]
        served = f"served here are {', '.join(frontend.name for frontend in self.all)}"
        if not name:
            raise RequestError("model", f"is missing; {served}")
        # names of models first: no adapter takes the place of one
        for names in (_names, self._adapter_names):
            for frontend in self.all:
                if name in names(frontend):
                    return frontend
        said = f"{name[:100]!r} is not served here; {served}"
        raise RequestError("model", said, "NOT_FOUND", reason=UNKNOWN_MODEL)

    def check_unused(self, name: str, base: Frontend) -> None:
        """Refuses a name for an adapter of one model that another model or its adapters have.
        Errors: RequestError."""
        for other in self.all:
            if other is not base and name in (*_names(other), *self._adapter_names(other)):
                said = f"{name[:100]!r} is a name of {other.name!r} or of one of its adapters"
                raise RequestError("lora_name", said, "ALREADY_EXISTS")


def _names(frontend: Frontend) -> Collection[str]:
    """All names of a model, its adapters' apart."""
    if frontend.replica is None:
        return (frontend.name,)
    return (frontend.name, *frontend.replica.info.other_names)
