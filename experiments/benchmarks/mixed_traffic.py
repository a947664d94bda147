"""The load of `mixed_load` on one server, and what a caller sees of it: decodes, long prompts one
after the other, and short prompts at random times meanwhile."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.api.errors import RequestError
from jaxserve.lab.quotients import quotient
from jaxserve.lab.research.generator import OK, Sent
from jaxserve.lab.research.transports import Transport
from jaxserve.settings.schema import SchedulerConfig

WARM = (64, 512)  # tokens of prompts that do not count
FEW = 4  # tokens of their answers, and of those to long prompts
ALONE_SHORTS = 5
WAIT = 900.0  # most seconds of a request
# of a decode that runs, before the first long prompt comes, and of that before the first short one
SETTLED = 2.0
AHEAD = 0.5
# of all tokens of short requests, that have an event of their own: below it, gaps are not a token's
OWN_EVENTS = 0.9
TTFT = SchedulerConfig().ttft
TPOT = SchedulerConfig().tpot
STRETCH = SchedulerConfig().ttft_stretch


@dataclass(frozen=True)
class Traffic:
    """The load. long, short: tokens of prompts; longs, shorts: how many, at most; short_output: of
    a short one's answer; every: mean seconds from one short one to the next; decodes: sequences
    that decode meanwhile, for up to decode_output tokens; alone: long prompts alone."""

    long: int
    longs: int
    short: int
    shorts: int
    short_output: int
    every: float
    decodes: int
    decode_output: int
    alone: int


@dataclass
class Visit:
    """All requests that one server got in one round. ended_early: decodes that had all their tokens
    while they were still needed."""

    short_alone: list[Sent] = field(default_factory=list)
    long_alone: list[Sent] = field(default_factory=list)
    shorts: list[Sent] = field(default_factory=list)
    longs: list[Sent] = field(default_factory=list)
    decodes: list[Sent] = field(default_factory=list)
    ended_early: int = 0

    @property
    def mixed(self) -> bool:
        """True where more than prompts alone was asked."""
        return bool(self.decodes)

    @property
    def beside(self) -> list[Sent]:
        """Short requests that were sent while a long prompt had no first token."""
        return [
            short
            for short in self.shorts
            if any(long.sent <= short.sent < long.first for long in self.longs)
        ]

    def gaps(self, decode: Sent) -> list[float]:
        """Seconds from each token of a decode to its next, of those that overlap the prefill of
        long prompts."""
        if not self.longs:
            return []
        begin, end = self.longs[0].sent, self.longs[-1].first
        times = np.cumsum([decode.first, *decode.gaps])
        return [
            float(after - before)
            for before, after in zip(times, times[1:])
            if after > begin and before < end
        ]

    def figures(self) -> dict[str, float]:
        """Figures in seconds, shares in time, and the count of short prompts; only those of prompts
        alone where nothing else was asked. There must be no faults."""
        alone = statistics.median(each.ttft for each in self.long_alone)
        found = {
            "short_alone": statistics.median(each.ttft for each in self.short_alone),
            "long_alone": alone,
        }
        if not self.mixed:
            return found
        ttft = [each.ttft for each in self.beside]
        gaps = [self.gaps(decode) for decode in self.decodes]
        means = [statistics.fmean(each) for each in gaps]
        limit = max(TTFT, STRETCH * alone)
        p50, p90 = np.percentile(ttft, (50, 90)).tolist()
        gap_p50, gap_p99 = np.percentile(np.concatenate(gaps), (50, 99)).tolist()
        return found | {
            "shorts": len(ttft),
            "short_p50": p50,
            "short_p90": p90,
            "short_max": max(ttft),
            "decode_mean": statistics.fmean(means),
            "gap_p50": gap_p50,
            "gap_p99": gap_p99,
            "long_ttft": statistics.fmean(each.ttft for each in self.longs),
            "shorts_in_time": _share(each <= TTFT for each in ttft),
            "shorts_in_both": _share(
                each.ttft <= TTFT and each.tpot <= TPOT for each in self.beside
            ),
            "longs_in_time": _share(each.ttft <= limit for each in self.longs),
            "decodes_in_time": _share(mean <= TPOT for mean in means),
        }

    def faults(self, least_shorts: int) -> list[str]:
        """Tells why figures would show nothing: errors, or a load that did not come about."""
        every = [
            *(*self.short_alone, *self.long_alone),
            *(*self.shorts, *self.longs, *self.decodes),
        ]
        failed = [each for each in every if each.status != OK or not each.first]
        if failed:
            first = failed[0]
            return [
                f"{len(failed)} of {len(every)} requests failed, the first, of {first.prompt} "
                f"tokens, with {first.error or 'no token'}"
            ]
        found = []
        if cached := sum(each.cached or 0 for each in every):
            found.append(f"{cached} tokens of prompts were in a cache; none should be")
        return found + (self._faults_of_mix(least_shorts) if self.mixed else [])

    def _faults_of_mix(self, least_shorts: int) -> list[str]:
        found = []
        if (count := len(self.beside)) < least_shorts:
            found.append(
                f"{count} of {len(self.shorts)} short prompts came while a long one had no first "
                f"token; the figures need {least_shorts}"
            )
        if self.ended_early:
            found.append(f"{self.ended_early} decodes ended before the last long prompt's prefill")
        silent = sum(not self.gaps(decode) for decode in self.decodes)
        if silent:
            found.append(f"{silent} decodes had no two tokens around a long prompt's prefill")
        events = sum(len(each.gaps) + 1 for each in self.shorts)
        tokens = sum(each.tokens for each in self.shorts)
        if quotient(events, tokens, 1.0) < OWN_EVENTS:
            found.append(f"{tokens} tokens came in {events} events: gaps are not those of tokens")
        return found


def _share(kept: Iterator[bool]) -> float:
    return statistics.fmean(kept)


class Caller:
    """Requests to one server, each with a prompt of random token ids that no other has."""

    def __init__(self, transport: Transport, seed: int):
        self._transport = transport
        self._dice = np.random.default_rng(seed)
        self._began = time.perf_counter()

    def prepared(self, prompt: int, output: int) -> tuple[Sent, Any]:
        """A request to send: its record, and its message."""
        ids = self._dice.integers(0, self._transport.served.vocab, prompt)
        return Sent(0.0, prompt, output), self._transport.prepare(ids, output)

    async def send(self, sent: Sent, message: Any) -> Sent:
        """Sends a request and waits for its end; what goes wrong is in the record."""
        sent.planned = sent.sent = self._now()
        try:
            async with asyncio.timeout(WAIT):
                ended = await self._transport.send(message, lambda: sent.hear(self._now()))
        except RequestError as error:
            sent.status, sent.error = error.status, str(error)
        except TimeoutError:
            sent.status, sent.error = "DEADLINE_EXCEEDED", f"no end within {WAIT:g} s"
        else:
            sent.cached = ended.cached
            sent.tokens = len(sent.gaps) + 1 if ended.tokens is None else ended.tokens
            if sent.tokens != sent.output:
                sent.status = "UNKNOWN"
                sent.error = f"{sent.tokens} tokens of {sent.output}, ended by {ended.reason!r}"
        return sent

    async def ask(self, prompt: int, output: int) -> Sent:
        return await self.send(*self.prepared(prompt, output))

    def _now(self) -> float:
        return time.perf_counter() - self._began


async def visit(transport: Transport, traffic: Traffic, seed: int, mixed: bool) -> Visit:
    """Puts the load on a server, prompts alone first. mixed: whether more follows. The same seed
    gives the same times between short requests."""
    caller = Caller(transport, seed)
    found = Visit()
    for tokens in WARM:
        await caller.ask(tokens, FEW)
    for _ in range(ALONE_SHORTS):
        found.short_alone.append(await caller.ask(traffic.short, traffic.short_output))
    for _ in range(traffic.alone):
        found.long_alone.append(await caller.ask(traffic.long, FEW))
    if mixed:
        await _mix(caller, traffic, random.Random(seed), found)
    return found


async def _mix(caller: Caller, traffic: Traffic, dice: random.Random, found: Visit) -> None:
    """The decodes run until all else has ended, and are cancelled then."""
    longs = [caller.prepared(traffic.long, FEW) for _ in range(traffic.longs)]
    shorts = [caller.prepared(traffic.short, traffic.short_output) for _ in range(traffic.shorts)]
    decodes = [
        caller.prepared(traffic.short, traffic.decode_output) for _ in range(traffic.decodes)
    ]
    found.decodes = [sent for sent, _ in decodes]
    running = [asyncio.create_task(caller.send(*decode)) for decode in decodes]
    try:
        if not await _all_decode(found.decodes, running):
            found.ended_early = sum(task.done() for task in running)
            return
        await asyncio.sleep(SETTLED)
        prefilled = asyncio.create_task(_one_by_one(caller, longs, found.longs))
        await asyncio.sleep(AHEAD)
        async with asyncio.TaskGroup() as group:
            for sent, message in shorts:
                if prefilled.done():
                    break
                found.shorts.append(sent)
                group.create_task(caller.send(sent, message))
                # not after the last long prompt
                await asyncio.wait([prefilled], timeout=dice.expovariate(1 / traffic.every))
            await prefilled
            found.ended_early = sum(task.done() for task in running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _all_decode(decodes: Sequence[Sent], running: Sequence[asyncio.Task[Sent]]) -> bool:
    """Waits until every decode has a token; False where one ended before."""
    while not all(each.first for each in decodes):
        if any(task.done() for task in running):
            return False
        await asyncio.sleep(0.05)
    return True


async def _one_by_one(
    caller: Caller, requests: Sequence[tuple[Sent, Any]], begun: list[Sent]
) -> None:
    for sent, message in requests:
        begun.append(sent)
        await caller.send(sent, message)
