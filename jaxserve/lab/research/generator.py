"""Sends requests to a server and notes when what comes back comes: at planned moments, whether
earlier requests are done or not (open loop), or a fixed number at once (closed loop).

Latencies count from the planned moment, so a generator that falls behind cannot flatter the server;
how far behind it fell is reported. In a closed loop a request is planned when it is sent.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxserve.api.errors import RequestError
from jaxserve.lab.quotients import per_later_token
from jaxserve.lab.research.transports import Transport
from jaxserve.lab.simulate.arrival import Arrival

OK = "OK"
REFUSED = "RESOURCE_EXHAUSTED"  # HTTP's 429: the server says that it has no room
COMPLETE = ("stop", "length")  # reasons of answers that came to their end


@dataclasses.dataclass
class Sent:
    """One request and what became of it; times are seconds since the run began.

    prompt, output: tokens that were sent and asked for. first, last: of the events that had tokens;
    gaps: between each of these and the next. cached: tokens of the prompt that the server had; None
    where it does not say. in_time: whether the server says that it kept its objectives; None where
    it does not say. status: OK, or the name of a gRPC status, and `error` its message.
    """

    planned: float
    prompt: int
    output: int
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    gaps: list[float] = dataclasses.field(default_factory=list)
    tokens: int = 0
    cached: int | None = None
    in_time: bool | None = None
    status: str = OK
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.first - self.planned

    @property
    def tpot(self) -> float:
        """Mean seconds per output token after the first; 0 without one."""
        return per_later_token(self.last - self.first, self.tokens)

    @property
    def e2e(self) -> float:
        return self.last - self.planned

    def hear(self, now: float) -> None:
        """Notes an event that has tokens."""
        if self.first:
            self.gaps.append(now - self.last)
        else:
            self.first = now
        self.last = now


async def play(
    transport: Transport,
    arrivals: Sequence[Arrival],
    prompts: Sequence[np.ndarray],
    timeout: float,
    concurrency: int | None = None,
) -> list[Sent]:
    """Sends all requests; returns what became of each when all have ended. timeout: seconds of each
    one. concurrency: requests at once, each next one when one has ended; None: at their times."""
    run = _Run(transport, arrivals, prompts, timeout)
    if concurrency is None:
        await run.open_loop()
    else:
        await run.closed_loop(concurrency)
    return run.sent


class _Run:
    """One run; all messages are made before it begins, so that nothing delays what is sent."""

    def __init__(
        self,
        transport: Transport,
        arrivals: Sequence[Arrival],
        prompts: Sequence[np.ndarray],
        timeout: float,
    ):
        self.sent = [Sent(each.time, each.prompt, each.output) for each in arrivals]
        self._messages = [
            transport.prepare(prompt, each.output) for prompt, each in zip(prompts, arrivals)
        ]
        self._transport = transport
        self._timeout = timeout
        self._began = time.perf_counter()

    async def open_loop(self) -> None:
        async with asyncio.TaskGroup() as group:
            for sent, message in zip(self.sent, self._messages):
                await asyncio.sleep(max(0.0, sent.planned - self._now()))
                group.create_task(self._send(sent, message))

    async def closed_loop(self, concurrency: int) -> None:
        waiting = iter(zip(self.sent, self._messages))

        async def one_after_the_other() -> None:
            for sent, message in waiting:
                sent.planned = self._now()
                await self._send(sent, message)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(one_after_the_other())

    async def _send(self, sent: Sent, message: Any) -> None:
        sent.sent = self._now()
        try:
            async with asyncio.timeout(self._timeout):
                ended = await self._transport.send(message, lambda: sent.hear(self._now()))
        except RequestError as error:
            sent.status = error.status
            sent.error = str(error)
            return
        except TimeoutError:
            sent.status = "DEADLINE_EXCEEDED"
            sent.error = f"no end within {self._timeout:g} s"
            return
        sent.cached = ended.cached
        sent.in_time = ended.in_time
        sent.tokens = len(sent.gaps) + 1
        if ended.tokens is not None:
            sent.tokens = ended.tokens
        if ended.reason not in COMPLETE or not sent.first:
            sent.status = "UNKNOWN"
            sent.error = f"ended by {ended.reason or 'the server'} after {sent.tokens} tokens"

    def _now(self) -> float:
        return time.perf_counter() - self._began
