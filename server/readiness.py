"""Health checks: whether the server lives, and whether tokens come out of it."""

from __future__ import annotations

import asyncio

from jaxserve.api.errors import RequestError
from jaxserve.api.request import Slo
from jaxserve.api.sampling import SamplingParams
from jaxserve.replica.weights import RUNNING
from jaxserve.server.auth.access import Caller
from jaxserve.server.frontend import FAULTS, SERVING, Frontend
from jaxserve.server.generate_call import GenerateCall, Origin
from jaxserve.server.models import Models

FRESH_SECONDS = 5.0  # a token that is not older proves that the server is ready
PATIENCE_SECONDS = 5.0  # for a token of our own


class Readiness:
    """Answers health checks of a server, which is as well as all its models are. caller: in whose
    name the checks' own requests are made."""

    def __init__(self, models: Models, caller: Caller):
        self._models = models
        self._probes = [Probe(frontend, caller) for frontend in models.all]

    def liveness_fault(self) -> str:
        """Returns why only a restart would help, or ''."""
        faults = (_named(each, FAULTS.get(each.state, "")) for each in self._models.all)
        return "; ".join(filter(None, faults))

    async def readiness_fault(self) -> str:
        """Returns why no tokens come, of any of the models, or ''."""
        faults = await asyncio.gather(*(probe.fault() for probe in self._probes))
        return "; ".join(filter(None, faults))


class Probe:
    """Looks whether tokens come out of a model. Where no request had one lately, one is generated;
    checks that come at the same time share it."""

    def __init__(self, frontend: Frontend, caller: Caller):
        self._frontend = frontend
        self._caller = caller
        self._generating: asyncio.Task[str] | None = None

    async def fault(self) -> str:
        """Returns why no tokens come, or ''."""
        if self._frontend.state != SERVING:
            return f"{self._frontend.who} is {self._frontend.state}"
        state = self._frontend.require_replica().weights.state
        if state != RUNNING:
            return _named(self._frontend, f"the replica is {state}")
        if self._frontend.seconds_since_token < FRESH_SECONDS:
            return ""
        if self._generating is None or self._generating.done():
            self._generating = asyncio.create_task(self._generate())
        return await asyncio.shield(self._generating)

    async def _generate(self) -> str:
        """Generates one token; returns why none came, or ''."""
        call = GenerateCall(
            [0],
            SamplingParams(temperature=0, max_tokens=1),
            slo=Slo(ttft=PATIENCE_SECONDS),
            timeout=PATIENCE_SECONDS,
            bypass_prefix_cache=True,
            ids_only=True,
            origin=Origin(internal=True),
        )
        try:
            async with (
                asyncio.timeout(PATIENCE_SECONDS),
                self._frontend.generate(call, self._caller) as stream,
            ):
                while await stream.take():
                    pass
        except RequestError as error:
            overloaded = error.status == "RESOURCE_EXHAUSTED"
            if overloaded and self._frontend.seconds_since_token < PATIENCE_SECONDS:
                return ""
            return _named(self._frontend, f"no token came: {error}")
        except TimeoutError:
            return _named(self._frontend, f"no token came within {PATIENCE_SECONDS:g} s")
        return ""


def _named(frontend: Frontend, fault: str) -> str:
    """Returns a fault with the name of its model, where the server has several."""
    if fault and frontend.name:
        return f"{frontend.who}: {fault}"
    return fault
