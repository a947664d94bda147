"""Whether the server lives, and whether tokens come out of it: what health checks are told."""

from __future__ import annotations

import asyncio

from jaxserve.api.errors import RequestError
from jaxserve.api.request import Slo
from jaxserve.api.sampling import SamplingParams
from jaxserve.server.auth.access import Caller
from jaxserve.server.frontend import BROKEN, SERVING, STUCK, Frontend
from jaxserve.server.generate_call import GenerateCall, Origin

FRESH = 5.0  # seconds for which a token is proof enough
PATIENCE = 5.0  # seconds that ours may take


class Readiness:
    """`ready` asks for a real token where none came lately; callers that ask at the same time share
    one."""

    def __init__(self, front: Frontend, caller: Caller):
        """caller: for whom ours is made."""
        self._front = front
        self._caller = caller
        self._asking: asyncio.Task[str] | None = None

    def alive(self) -> str:
        """'' or what is wrong."""
        return {BROKEN: "the engine stopped", STUCK: "the devices do not answer"}.get(
            self._front.state, ""
        )

    async def ready(self) -> str:
        """'' or what is wrong."""
        if self._front.state != SERVING:
            return f"the server is {self._front.state}"
        if self._front.quiet_seconds < FRESH:
            return ""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asking)

    async def _ask(self) -> str:
        ask = GenerateCall(
            [0],
            SamplingParams(temperature=0, max_tokens=1),
            slo=Slo(ttft=PATIENCE),
            timeout=PATIENCE,
            bypass_prefix_cache=True,
            ids_only=True,
            origin=Origin(internal=True),
        )
        try:
            async with asyncio.timeout(PATIENCE), self._front.answer(ask, self._caller) as stream:
                while await stream.take():
                    pass
        except RequestError as error:
            return (
                ""
                if error.status == "RESOURCE_EXHAUSTED" and self._front.quiet_seconds < PATIENCE
                else f"no token came: {error}"
            )
        except TimeoutError:
            return f"no token came within {PATIENCE:g} s"
        return ""
