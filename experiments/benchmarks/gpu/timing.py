"""Times of launches: batches of them, after warm-up, in rounds in which what is compared takes
turns."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# number of launches, one after the other -> seconds until all are done
Launches = Callable[[int], float]
# launches of a round
FEWEST = 2
MOST = 1000


@dataclass(frozen=True)
class Pace:
    """Length of a measurement: rounds, and about these seconds for each round of each of those
    compared."""

    rounds: int = 5
    seconds: float = 0.04
    least: int = FEWEST


@dataclass(frozen=True)
class Timed:
    """Seconds per launch, round by round."""

    rounds: tuple[float, ...]
    launches: int

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    def spread(self, scale: float = 1.0) -> dict[str, float]:
        return spread([seconds * scale for seconds in self.rounds])


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def faster(one: Timed, other: Timed, work: float = 1.0) -> dict[str, float]:
    """Ratios by which `one` is faster than the other, which does `work` times its work, from
    round to round."""
    return spread([work * b / a for a, b in zip(one.rounds, other.rounds)])


def launches(f: Callable[..., Any], *variants: tuple[Any, ...], each: int = 1) -> Launches:
    """Launches of f, with these arguments in turn. f does `each` times what is timed: as many
    launches as hold `count` are made."""
    import jax

    turns = itertools.cycle(variants)

    def run(count: int) -> float:
        began = time.perf_counter()
        out = None
        whole = -(-count // each)
        for _ in range(whole):
            out = f(*next(turns))
        jax.block_until_ready(out)
        return (time.perf_counter() - began) * count / (whole * each)

    return run


def in_turns(entries: dict[str, Launches], pace: Pace) -> tuple[dict[str, Timed], dict[str, str]]:
    """Times by name, and of those that fail, why."""
    counts = {}
    faults = {}
    for name, run in entries.items():
        try:
            run(1)  # compiles
            once = run(pace.least) / pace.least
            counts[name] = max(pace.least, min(MOST, round(pace.seconds / once)))
            if counts[name] > 2 * pace.least:  # the first launches may have been slow
                once = run(counts[name]) / counts[name]
                counts[name] = max(pace.least, min(MOST, round(pace.seconds / once)))
        except Exception as error:
            faults[name] = said(error)
    names = list(counts)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(pace.rounds):
        first = turn % max(1, len(names))
        for name in names[first:] + names[:first]:
            seconds[name].append(entries[name](counts[name]) / counts[name])
    return {name: Timed(tuple(seconds[name]), counts[name]) for name in names}, faults


def said(error: BaseException) -> str:
    """An error on one line that is not too long."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:240]}{'...' if len(text) > 240 else ''}"
