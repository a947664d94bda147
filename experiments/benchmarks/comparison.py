"""Compares measurements of several engines: figures per point, ratios round by round, and what is
doubtful about them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from experiments.benchmarks.engines import OWN
from jaxserve.cli.display import table
from jaxserve.lab.cli.bench.speed import SpeedPoint

LAZY = 0.75  # share of the cores below which a prefill says that an engine was hindered


@dataclass(frozen=True)
class Measurement:
    """One engine at one point in one round: tokens per second of each repetition, others' share of
    the machine in percent, cores it used.

    quiet: the share was below the limit; `attempts` were needed for that, or made in vain.
    """

    engine: str
    point: SpeedPoint
    round: int
    rates: tuple[float, ...]
    foreign: float
    cores: float
    attempts: int
    quiet: bool

    @property
    def median(self) -> float:
        return statistics.median(self.rates)


@dataclass(frozen=True)
class Comparison:
    """All measurements of a run. Those that were disturbed are kept and count for nothing."""

    measurements: tuple[Measurement, ...]

    def of(self, engine: str, point: SpeedPoint) -> list[Measurement]:
        return [m for m in self.measurements if m.quiet and (m.engine, m.point) == (engine, point)]

    @property
    def engines(self) -> list[str]:
        """jaxserve first."""
        return sorted(
            dict.fromkeys(m.engine for m in self.measurements),
            key=lambda engine: (engine != OWN, engine),
        )

    @property
    def points(self) -> list[SpeedPoint]:
        return list(dict.fromkeys(m.point for m in self.measurements))

    def best(self, engine: str, point: SpeedPoint) -> float:
        return max(rate for m in self.of(engine, point) for rate in m.rates)

    def median(self, engine: str, point: SpeedPoint) -> float:
        return statistics.median(m.median for m in self.of(engine, point))

    def ratios(self, peer: str, point: SpeedPoint) -> list[float]:
        """jaxserve over a peer in each round in which neither was disturbed, of the rounds'
        medians."""
        mine, theirs = (
            {m.round: m.median for m in self.of(engine, point)} for engine in (OWN, peer)
        )
        return [mine[number] / theirs[number] for number in sorted(mine.keys() & theirs.keys())]

    def record(self) -> dict[str, Any]:
        speed = []
        ratio = []
        for point in self.points:
            speed += [
                {
                    "engine": engine,
                    **asdict(point),
                    "best": self.best(engine, point),
                    "median": self.median(engine, point),
                }
                for engine in self.engines
                if self.of(engine, point)
            ]
            ratio += [
                {
                    "peer": peer,
                    **asdict(point),
                    "median": statistics.median(found),
                    "low": min(found),
                    "high": max(found),
                }
                for peer in self.engines
                if peer != OWN and (found := self.ratios(peer, point))
            ]
        return {
            "speed": speed,
            "ratio": ratio,
            "doubts": self.doubts(),
            "measurements": [asdict(m) for m in self.measurements],
        }

    def shown(self) -> str:
        peers = [engine for engine in self.engines if engine != OWN]
        parts = ["tokens/s, best (median of rounds)\n" + self._table(self.engines, self._speed)]
        if peers:
            parts.append(
                f"{OWN} / peer, median of rounds (lowest to highest)\n"
                + self._table(peers, self._ratio)
            )
        parts.append("cores in use\n" + self._table(self.engines, self._cores))
        return "\n\n".join(filter(None, [*parts, "\n".join(self.doubts())]))

    def doubts(self) -> list[str]:
        lost = [m for m in self.measurements if not m.quiet]
        out = [
            f"{m.engine}, {m.point}, round {m.round}: not counted, others used {m.foreign:.1f}% "
            f"of the machine (attempt {m.attempts})"
            for m in lost
        ]
        busiest = max((m.cores for m in self.measurements), default=0)
        for engine, point in (
            (e, p)
            for e in self.engines
            for p in self.points
            if p.kind == "prefill" and self.of(e, p)
        ):
            cores = statistics.median(m.cores for m in self.of(engine, point))
            if cores < LAZY * busiest:
                out.append(
                    f"{engine} kept {cores:.2f} cores busy at {point}, another {busiest:.2f}: "
                    "are its threads bound as it needs?"
                )
        return out

    def _table(self, columns: Sequence[str], cell: Callable[[str, SpeedPoint], str]) -> str:
        return table(
            ["", *columns],
            [[str(point), *(cell(column, point) for column in columns)] for point in self.points],
        )

    def _speed(self, engine: str, point: SpeedPoint) -> str:
        return (
            f"{self.best(engine, point):.1f} ({self.median(engine, point):.1f})"
            if self.of(engine, point)
            else "-"
        )

    def _ratio(self, peer: str, point: SpeedPoint) -> str:
        found = self.ratios(peer, point)
        return (
            f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
            if found
            else "-"
        )

    def _cores(self, engine: str, point: SpeedPoint) -> str:
        return (
            f"{statistics.median(m.cores for m in self.of(engine, point)):.2f}"
            if self.of(engine, point)
            else "-"
        )


def agreement(ids: dict[str, list[int] | None]) -> list[str]:
    """Compares tokens of engines with those of jaxserve: a line for each that gave some."""
    mine = ids[OWN]
    assert mine is not None
    return [
        f"{engine}: {_equal(mine, theirs)} of {len(mine)} greedy tokens as {OWN}'s"
        for engine, theirs in ids.items()
        if engine != OWN and theirs is not None
    ]


def _equal(mine: Iterable[int], theirs: Iterable[int]) -> int:
    """Counts equal ids before the first difference."""
    count = 0
    for a, b in zip(mine, theirs):
        if a != b:
            break
        count += 1
    return count
