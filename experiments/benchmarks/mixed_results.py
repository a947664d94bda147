"""Compares what servers did under the load of `mixed_load`: figures over rounds, ratios within
rounds, and what makes them worth nothing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from experiments.benchmarks.engines import OWN
from experiments.benchmarks.mixed_traffic import Visit
from jaxserve.cli.display import table

# figure -> its row in the table
SECONDS = {
    "short_alone": "short prompt alone: TTFT",
    "long_alone": "long prompt alone: TTFT",
    "short_p50": "short prompts: TTFT p50",
    "short_p90": "p90",
    "short_max": "longest",
    "decode_mean": "decodes: mean per token",
    "gap_p50": "gaps p50",
    "gap_p99": "gaps p99",
    "long_ttft": "long prompts: TTFT, mean",
}
SHARES = {
    "shorts_in_time": "short prompts in time",
    "shorts_in_both": "and with their tokens in time",
    "longs_in_time": "long prompts in time",
    "decodes_in_time": "decodes in time",
}
COUNTS = {"shorts": "short prompts that count"}


@dataclass(frozen=True)
class Turn:
    """One server in one round: what it was asked, why that shows nothing, and others' share of the
    machine in percent, while it started and while it was asked. It counts without faults and where
    the latter share was below the limit (`quiet`)."""

    server: str
    dtype: str
    round: int
    visit: Visit
    faults: tuple[str, ...]
    start_foreign: float
    foreign: float
    quiet: bool
    seconds: float

    @property
    def counts(self) -> bool:
        return self.quiet and not self.faults

    @property
    def place(self) -> str:
        return f"{self.server}, {self.dtype}, round {self.round}"


def said(turn: Turn) -> str:
    """One line on a turn."""
    if turn.faults:
        return f"FAILED: {'; '.join(turn.faults)}"
    figures = turn.visit.figures()
    shown = [f"long alone {figures['long_alone']:.3g} s"]
    if turn.visit.mixed:
        shown += [
            f"{len(turn.visit.beside)} shorts {figures['short_p50']:.3g} s",
            f"decodes {figures['decode_mean']:.3g} s",
            f"long {figures['long_ttft']:.3g} s",
        ]
    disturbed = f", does not count: others used {turn.foreign:.1f}%" if not turn.quiet else ""
    return f"{', '.join(shown)}; took {turn.seconds:.0f} s{disturbed}"


@dataclass(frozen=True)
class Spread:
    """A figure over rounds."""

    median: float
    low: float
    high: float

    def shown(self, form: str) -> str:
        return f"{self.median:{form}} ({self.low:{form}} to {self.high:{form}})"


def spread(found: Sequence[float]) -> Spread | None:
    return Spread(statistics.median(found), min(found), max(found)) if found else None


class Results:
    """Figures of all turns of one type of weights that count."""

    def __init__(self, turns: Sequence[Turn], dtype: str):
        self._of: dict[str, dict[int, dict[str, float]]] = {}
        for turn in turns:
            if turn.dtype == dtype and turn.counts:
                self._of.setdefault(turn.server, {})[turn.round] = turn.visit.figures()

    def figure(self, server: str, name: str) -> Spread | None:
        rounds = self._of.get(server, {}).values()
        return spread([each[name] for each in rounds if name in each])

    def ratio(self, server: str, name: str) -> Spread | None:
        """jaxserve's seconds over another's, of the rounds in which both count."""
        mine, theirs = self._of.get(OWN, {}), self._of.get(server, {})
        both = [(mine[number], theirs[number]) for number in sorted(mine.keys() & theirs.keys())]
        return spread([one[name] / other[name] for one, other in both if name in other])

    def record(self, servers: Sequence[str]) -> list[dict[str, Any]]:
        return [
            {
                "server": server,
                "figure": name,
                "rounds": len(self._of.get(server, {})),
                "seconds" if name in SECONDS else "share": asdict(found),
                "ratio": asdict(ratio) if ratio else None,
            }
            for server in servers
            for name in (*SECONDS, *SHARES)
            if (found := self.figure(server, name))
            for compared in [name in SECONDS and server != OWN]
            for ratio in [self.ratio(server, name) if compared else None]
        ]

    def shown(self, servers: Sequence[str]) -> str:
        """Two tables: figures, and jaxserve's ratios to others."""
        rows = [
            [title, *(_cell(self.figure(server, name), ".3g") for server in servers)]
            for name, title in SECONDS.items()
        ]
        rows += [
            [title, *(_cell(self.figure(server, name), ".0%") for server in servers)]
            for name, title in SHARES.items()
        ]
        counted = {server: len(self._of.get(server, {})) for server in servers}
        rows += [
            [title, *(_cell(self.figure(server, name), ".0f") for server in servers)]
            for name, title in COUNTS.items()
        ]
        rows.append(["rounds that count", *map(str, counted.values())])
        text = table(["seconds: median of rounds (range)", *servers], rows)
        others = [server for server in servers if server != OWN]
        if OWN not in servers or not others:
            return text
        rows = [
            [title, *(_cell(self.ratio(server, name), ".3g") for server in others)]
            for name, title in SECONDS.items()
        ]
        return f"{text}\n\n{table([f'{OWN} / it, within rounds', *others], rows)}"


def _cell(found: Spread | None, form: str) -> str:
    return found.shown(form) if found else "-"


def verdict(turns: Sequence[Turn]) -> list[str]:
    """Returns why figures show nothing: faults of turns, and servers without a round that
    counts."""
    faults = [f"{turn.place}: {fault}" for turn in turns for fault in turn.faults]
    places = dict.fromkeys((turn.server, turn.dtype) for turn in turns)
    counted = {(turn.server, turn.dtype) for turn in turns if turn.counts}
    return faults + [
        f"{server}, {dtype}: no round counts" for server, dtype in places.keys() - counted
    ]
