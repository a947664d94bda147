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

FRESH_SECONDS = 5.0  # a token that is not older proves that the server is ready
PATIENCE_SECONDS = 5.0  # for a token of our own


class Readiness:
    """Answers health checks. Where no request had a token lately, one is generated; checks that
    come at the same time share it."""

    def __init__(self, frontend: Frontend, caller: Caller):
        """caller: in whose name the check's own request is made."""
        self._frontend = frontend
        self._caller = caller
        self._generating: asyncio.Task[str] | None = None

    def liveness_fault(self) -> str:
        """Returns why only a restart would help, or ''."""
        return FAULTS.get(self._frontend.state, "")

    async def readiness_fault(self) -> str:
        """Returns why no tokens come, or ''."""
        if self._frontend.state != SERVING:
            return f"the server is {self._frontend.state}"
        state = self._frontend.require_replica().weights.state
        if state != RUNNING:
            return f"the replica is {state}"
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
            return f"no token came: {error}"
        except TimeoutError:
            return f"no token came within {PATIENCE_SECONDS:g} s"
        return ""
