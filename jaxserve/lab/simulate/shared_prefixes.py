"""Generates workloads whose prompts begin alike: questions about documents, of which some are asked
about more often than others, and sessions of turns that each continue the one before.

Lengths and the documents that are drawn depend on the seed alone, so that one seed at several rates
is the same work. Hash ids count UNIT tokens. Id 0 stands for the tokens that a virtual replica puts
out, so that a turn finds the KV of the answers before it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.mixes import Lengths, lognormal, uniform
from jaxserve.lab.simulate.spec import fault, to_number, to_options

UNIT = 16  # tokens of a hash id; shared parts and answers are whole numbers of them
ANSWER = 0  # hash id of what replicas put out


class SharedWorkload(Protocol):
    """Workload whose prompts share prefixes."""

    @property
    def options(self) -> tuple[str, ...]:
        """Fields that `parse` may set."""

    def arrivals(self, qps: float, count: int, seed: int, first_id: int = 1) -> list[Arrival]:
        """Returns the first `count` arrivals at `qps` requests per second on average, by time.
        first_id: the least hash id of what is not an answer."""


@dataclass(frozen=True)
class Documents:
    """Questions about documents, as a Poisson process. documents: how many there are. length:
    their tokens. zipf: exponent of Zipf's law, by which they are asked about. question, output:
    tokens behind a document, and of the answer."""

    documents: int
    length: Lengths
    zipf: float
    question: Lengths
    output: Lengths
    kind: str = "document"
    options: tuple[str, ...] = ("zipf", "documents")

    def arrivals(self, qps: float, count: int, seed: int, first_id: int = 1) -> list[Arrival]:
        rng = np.random.default_rng((seed, 0))
        units = _units(self.length(rng, self.documents))
        ends = first_id + np.cumsum(units)
        weights = 1 / np.arange(1, self.documents + 1) ** self.zipf
        drawn = rng.choice(self.documents, count, p=weights / weights.sum())
        questions = self.question(rng, count).astype(int).tolist()
        outputs = np.maximum(self.output(rng, count), 1).astype(int).tolist()
        times = np.cumsum(np.random.default_rng((seed, 1)).exponential(1 / qps, count)).tolist()
        found = []
        for time, document, question, output in zip(times, drawn.tolist(), questions, outputs):
            end = int(ends[document])
            blocks = np.arange(end - int(units[document]), end, dtype=np.int32)
            prompt = len(blocks) * UNIT + question
            found.append(Arrival(time, prompt, output, self.kind, blocks, UNIT))
        return found


@dataclass(frozen=True)
class Sessions:
    """Sessions that begin as a Poisson process. Each has a number of `turns`; a turn's prompt is
    `system` tokens that all sessions share, the session's own `context`, and all questions and
    answers so far. pause: mean seconds from a turn's arrival to the next, of which `least_pause`
    pass always."""

    system: int
    context: Lengths
    turns: Lengths
    question: Lengths
    output: Lengths
    pause: float
    least_pause: float = 3.0
    kind: str = "session"
    options: tuple[str, ...] = ("system", "pause")

    def arrivals(self, qps: float, count: int, seed: int, first_id: int = 1) -> list[Arrival]:
        rng = np.random.default_rng((seed, 0))
        turns = np.maximum(self.turns(rng, count), 1).astype(int)
        sessions = int(np.searchsorted(np.cumsum(turns), count)) + 1
        mean = float(turns[:sessions].mean())
        gaps = np.random.default_rng((seed, 1)).exponential(mean / qps, sessions)
        found: list[Arrival] = []
        fresh = first_id + self.system // UNIT
        for start, number in zip(np.cumsum(gaps).tolist(), turns.tolist()):
            session = list(self._session(start, number, first_id, fresh, rng))
            fresh = _next_id(session)
            found += session
        return sorted(found, key=lambda arrival: arrival.time)[:count]

    def _session(
        self, start: float, turns: int, first_id: int, fresh: int, rng: np.random.Generator
    ) -> Iterator[Arrival]:
        """Yields the turns of one session. fresh: the least hash id that no other has."""
        system = np.arange(first_id, first_id + self.system // UNIT, dtype=np.int32)
        context = self.context(rng, 1)
        questions = self.question(rng, turns)
        answers = _units(self.output(rng, turns)).tolist()
        pauses = self.least_pause + rng.exponential(self.pause - self.least_pause, turns)
        blocks = system
        time = start
        own = context + questions[0]
        for question, answer, pause in zip([own, *questions[1:]], answers, pauses.tolist()):
            new = int(_units(np.atleast_1d(question))[0])
            blocks = np.concatenate([blocks, np.arange(fresh, fresh + new, dtype=np.int32)])
            fresh += new
            output = answer * UNIT
            yield Arrival(time, len(blocks) * UNIT, output, self.kind, blocks, UNIT)
            blocks = np.concatenate([blocks, np.full(answer, ANSWER, np.int32)])
            time += pause


def _units(tokens: np.ndarray) -> np.ndarray:
    """Rounds tokens to whole hash ids, at least one."""
    return np.maximum(np.rint(np.asarray(tokens) / UNIT), 1).astype(int)


def _next_id(arrivals: Sequence[Arrival]) -> int:
    """Returns the least hash id above those of all arrivals."""
    return 1 + max(int(np.max(a.blocks)) for a in arrivals if a.blocks is not None)


def none(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draws nothing: no tokens."""
    return np.zeros(count)


def lognormal_of_mean(mean: float, sigma: float, low: float, high: float) -> Lengths:
    """Draws from a lognormal distribution of this mean before it is cut off at low and high."""
    return lognormal(mean * math.exp(-(sigma**2) / 2), sigma, low, high)


# Means are those that TokenLake's evaluation gives (section 7); shapes, pauses and Zipf's exponent
# are not published. SCBench's contexts have a mean of 227K there, more than an instance of two A100
# holds for Llama-2-7B beside another: 150K, so that every system can serve every request.
WORKLOADS: Mapping[str, SharedWorkload] = {
    "loogle": Documents(
        documents=200,
        length=lognormal_of_mean(24_000, 0.5, 2_000, 100_000),
        zipf=0.9,
        question=uniform(30, 119),
        output=lognormal(36, 0.8, 4, 400),
    ),
    "scbench": Sessions(
        system=0,
        context=lognormal_of_mean(150_000, 0.4, 20_000, 210_000),
        turns=uniform(5, 5),
        question=uniform(50, 150),
        output=uniform(64, 128),
        pause=25.0,
    ),
    "sharegpt-o3": Sessions(
        system=4096,  # tokens, about as long as the system prompt of OpenAI's o3
        context=none,
        turns=uniform(1, 5),
        question=lognormal(100, 1.0, 4, 1_800),
        output=lognormal(200, 0.8, 4, 1_000),
        pause=8.0,  # shorter than people's, so that short runs have all turns of a session
        kind="chat",
    ),
}


def named(name: str, text: str = "") -> SharedWorkload:
    """Returns the workload of a name with options, `a=1,b=2`. Errors: ConfigError."""
    workload = WORKLOADS[name]
    given = to_options(text, workload.options)
    changes: dict[str, float] = {}
    for field, value in given.items():
        number = to_number(field, value, 0)
        whole = isinstance(getattr(workload, field), int)
        changes[field] = int(number) if whole else number
    if changes.get("documents") == 0:
        fault("documents must be at least 1")
    return dataclasses.replace(workload, **changes)  # type: ignore[type-var]


def together(
    workloads: Sequence[SharedWorkload], qps: float, count: int, seed: int
) -> list[Arrival]:
    """Returns arrivals of several workloads, each at an equal share of `qps`; none share a
    prefix with another."""
    part = -(-count // len(workloads))
    found: list[Arrival] = []
    first_id = 1
    for number, workload in enumerate(workloads):
        drawn = workload.arrivals(qps / len(workloads), part, seed + number, first_id)
        first_id = _next_id(drawn)
        found += drawn
    return sorted(found, key=lambda arrival: arrival.time)[:count]
