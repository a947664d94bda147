"""Conversations of agents, whose next turn comes when a tool has answered, beside chats that come
once: with their KV kept for the next turn, and evicted as that of all others (least recently used).

    python -m experiments.benchmarks.agent_sessions --json=agents.json

Simulated: an agent's turn has all that was said before and what the tool gave; its next turn comes
as long after its answer as the tool takes. The verdict fails where keeping KV brings back less of
it, makes the next turns' first tokens come later, or those of chats by more than a tenth.
"""

from __future__ import annotations

import heapq
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.script import command_line, exit_code, keep
from jaxserve.api.events import Event, Finished
from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.cli.display import table
from jaxserve.lab.simulate.replica import VirtualReplica
from jaxserve.lab.simulate.run import System, shape_of
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig

KEPT, EVICTED = "kept for the next turn", "least recently used"
SPREAD = 1.0  # of the logarithm of a tool's seconds
NEXT, FIRST, CHAT = "next turns", "first turns", "chats"
OWN_TOKENS = 1 << 18  # ids of each conversation's own
SLOWER = 1.1  # of the chats' time to first token, at most
BLOCK = 64  # tokens
OPTIONS = {
    "agents": [
        Option("model", str, "llama3-8b", "of the zoo"),
        Option("device", str, "h100", "the GPU"),
        Option("agents", int, 16, "conversations of agents at once", 1, 1000),
        Option("turns", int, 12, "of each of them", 2),
        Option("begin", int, 6000, "tokens of the first prompt of an agent", 1),
        Option("grows", int, 1500, "tokens that a turn has more than the one before", 1),
        Option("tool", float, 10.0, "seconds of a tool, the median", 0.01),
        Option("chats", float, 3.0, "chats a second, of another prompt each", 0.0),
        Option("chat", int, 4000, "tokens of the prompt of a chat", 1),
        Option("output", int, 120, "tokens of each answer", 1),
        Option("cache", int, 300_000, "tokens that the devices hold", 1),
        Option("json", str, None, "file for all figures"),
    ]
}


@dataclass(order=True)
class Turn:
    """A request that comes at a clock second. conversation: its number; turn: from 0 on."""

    time: float
    conversation: int
    kind: str
    turn: int = 0


@dataclass
class Figures:
    """Measurements of the requests of a kind: seconds to the first token of each, tokens of all
    prompts, and of these the cached ones."""

    seconds: list[float]
    prompt: int = 0
    cached: int = 0


class Simulation:
    """A replica with agents and chats. kept: whether requests of agents name their conversation."""

    def __init__(self, values: dict[str, Any], kept: bool):
        self._values = values
        self._kept = kept
        self._random = np.random.default_rng(0)
        self._coming = list(self._first_turns())
        heapq.heapify(self._coming)
        self._replica = _replica(values)
        self.figures = {kind: Figures([]) for kind in (FIRST, NEXT, CHAT)}

    def _first_turns(self) -> Iterator[Turn]:
        """The first turns of agents, over a while, and the chats of all the time."""
        values = self._values
        end = values["turns"] * (2 * values["tool"] + 2)
        for number in range(values["agents"]):
            yield Turn(float(self._random.uniform(0, end / 4)), number, FIRST)
        numbers = itertools.count(values["agents"])
        time = 0.0
        while values["chats"] and time < end:
            time += float(self._random.exponential(1 / values["chats"]))
            yield Turn(time, next(numbers), CHAT)

    def run(self) -> dict[str, Figures]:
        """Simulates until all have ended."""
        replica = self._replica
        replica.start()
        while True:
            now = min(self._coming[0].time if self._coming else np.inf, replica.next_event())
            if now == np.inf:
                return self.figures
            replica.advance(now)
            while self._coming and self._coming[0].time <= now:
                self._submit(heapq.heappop(self._coming))

    def _submit(self, turn: Turn) -> None:
        values = self._values
        tokens = values["chat"]
        session = ""
        if turn.kind != CHAT:
            tokens = values["begin"] + turn.turn * values["grows"]
            session = f"agent {turn.conversation}" if self._kept else ""
        own = turn.conversation * OWN_TOKENS
        request = Request(
            f"{turn.conversation}-{turn.turn}",
            np.arange(own, own + tokens).astype(np.int32),
            SamplingParams(temperature=0, max_tokens=values["output"], ignore_eos=True),
            arrival=turn.time,
            session=session,
        )
        self._replica.submit(request, lambda events: self._heard(turn, events))

    def _heard(self, turn: Turn, events: Sequence[Event]) -> None:
        for event in events:
            if not isinstance(event, Finished):
                continue
            figures = self.figures[turn.kind]
            figures.seconds.append(event.timing.first_token)
            figures.prompt += event.usage.prompt
            figures.cached += event.usage.cached
            if turn.kind != CHAT and turn.turn + 1 < self._values["turns"]:
                tool = self._values["tool"] * float(self._random.lognormal(0, SPREAD))
                time = self._replica.now() + tool
                following = Turn(time, turn.conversation, NEXT, turn.turn + 1)
                heapq.heappush(self._coming, following)


def _replica(values: dict[str, Any]) -> VirtualReplica:
    scheduler = SchedulerConfig(
        policy="slack", chunking="adaptive", max_seqs=128, chunk_tokens=2048, max_queue=4096
    )
    cache = CacheConfig(block_size=BLOCK, pages=values["cache"] // BLOCK)
    return System(shape_of(values["model"]), values["device"], MeshConfig()).replica(
        scheduler, cache
    )


def run(values: dict[str, Any]) -> int:
    found = {name: Simulation(values, name == KEPT).run() for name in (EVICTED, KEPT)}
    print(shown(found))
    faults = verdict(found)
    seconds = {
        name: {kind: one.seconds for kind, one in each.items()} for name, each in found.items()
    }
    keep(values, seconds=seconds, faults=faults)
    return exit_code(faults)


def shown(found: dict[str, dict[str, Figures]]) -> str:
    """A table of first tokens and hits."""
    rows = []
    for kind in (NEXT, FIRST, CHAT):
        for name, each in found.items():
            one = each[kind]
            p50, p90, p99 = np.percentile(one.seconds, (50, 90, 99))
            times = f"{1000 * p50:.0f} / {1000 * p90:.0f} / {1000 * p99:.0f}"
            rows.append([kind, name, times, f"{one.cached / one.prompt:.0%}"])
    return table(["", "KV of agents", "TTFT, ms: p50 / p90 / p99", "cached"], rows)


def verdict(found: dict[str, dict[str, Figures]]) -> list[str]:
    """Returns what is wrong."""
    faults = []
    before, after = found[EVICTED], found[KEPT]
    if after[NEXT].cached <= before[NEXT].cached:
        faults.append("what is kept brings back no more of the next turns' prompts")
    for kind, share, most in ((NEXT, 50, 1.0), (NEXT, 90, 1.0), (CHAT, 99, SLOWER)):
        old, new = (np.percentile(each[kind].seconds, share) for each in (before, after))
        if new > most * old:
            faults.append(f"{kind}: P{share} {1000 * new:.0f} ms, {1000 * old:.0f} ms before")
    return faults


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])

if __name__ == "__main__":
    summary = "conversations of agents, with their KV kept for the next turn"
    sys.exit(command_line("agent_sessions", summary, COMMAND, sys.argv[1:]))
