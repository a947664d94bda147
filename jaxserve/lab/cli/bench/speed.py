"""Measures how fast an engine computes: tokens per second of prompts on their own and of sequences
that decode together.

The engine is driven by its own `turn`, from this thread. Prompts are random, so that nothing is
found in a cache.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.api.events import Event, Finished, Token
from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams

CONTEXT = 128  # tokens before those that decoding is measured on
STEPS = 64  # tokens per sequence that decoding is measured on


@dataclass(frozen=True)
class SpeedPoint:
    """A measured load: kind 'prefill' of a prompt of `size` tokens, or 'decode' of `size`
    sequences."""

    kind: str
    size: int

    def __str__(self) -> str:
        if self.kind == "prefill":
            return f"prefill {self.size}"
        return f"decode x{self.size}"

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        if self.kind == "prefill":
            return self.size + 1
        return CONTEXT + STEPS + 1


class Runner:
    """Runs random prompts on an engine that was not started."""

    def __init__(self, engine: Any, seed: int = 0):
        self._engine = engine
        self._dice = np.random.default_rng(seed)
        self._ids = itertools.count()

    @property
    def compiles(self) -> int:
        """Programs compiled so far."""
        return self._engine.worker.compiles

    def generate(
        self, prompts: Sequence[Sequence[int] | np.ndarray] | np.ndarray, tokens: int
    ) -> list[list[int]]:
        """The greedy ids after each prompt, exactly `tokens` of them. Errors: RequestError, also
        where the engine ends a request early."""
        out: list[list[int]] = [[] for _ in prompts]

        def sink(into: list[int]) -> Callable[[Sequence[Event]], None]:
            def take(events: Sequence[Event]) -> None:
                for event in events:
                    if isinstance(event, Token):
                        into.append(event.id)
                    elif isinstance(event, Finished) and event.error is not None:
                        raise event.error

            return take

        sampling = SamplingParams.make(temperature=0, max_tokens=tokens, ignore_eos=True)
        engine = self._engine
        for prompt, into in zip(prompts, out):
            engine.submit(
                Request.make(
                    f"{next(self._ids)}",
                    prompt,
                    sampling,
                    vocab=engine.info.vocab,
                    max_len=engine.info.max_model_len,
                    arrival=engine.now(),
                ),
                sink(into),
            )
        while engine.step():
            pass
        return out

    def seconds(self, sequences: int, prompt: int, tokens: int) -> float:
        """Seconds for `sequences` random prompts to end with `tokens` tokens each."""
        vocab = self._engine.info.vocab
        prompts = self._dice.integers(vocab // 2, vocab, (sequences, prompt))
        began = time.perf_counter()
        self.generate(prompts, tokens)
        return time.perf_counter() - began

    def rate(self, point: SpeedPoint) -> float:
        """Tokens per second, once: prompt tokens over the time to the first token, or what `STEPS`
        more tokens per sequence add."""
        if point.kind == "prefill":
            return point.size / self.seconds(1, point.size, 1)
        prefill = min(self.seconds(point.size, CONTEXT, 1) for _ in range(2))
        return point.size * STEPS / (self.seconds(point.size, CONTEXT, 1 + STEPS) - prefill)


@dataclass(frozen=True)
class Speed:
    """Tokens per second of a point, one figure per round."""

    point: SpeedPoint
    rates: tuple[float, ...]

    @property
    def best(self) -> float:
        return max(self.rates)

    @property
    def median(self) -> float:
        return statistics.median(self.rates)

    def record(self) -> dict[str, Any]:
        return {
            "name": str(self.point),
            "kind": self.point.kind,
            "size": self.point.size,
            "best": self.best,
            "median": self.median,
            "tokens_per_s": list(self.rates),
        }


def measure(
    runner: Runner, points: Sequence[SpeedPoint], rounds: int, done: Callable[[str], None]
) -> tuple[list[Speed], int]:
    """Measures all points in each round, after a round that does not count; `done` is called after
    every measurement.

    The second result is the number of programs that were compiled in rounds that count, which
    should be none.
    """
    rates: dict[SpeedPoint, list[float]] = {point: [] for point in points}
    compiled = 0
    for turn in range(rounds + 1):
        for point in points:
            rate = runner.rate(point)
            if turn:
                rates[point].append(rate)
            done(str(point))
        compiled = compiled if turn else runner.compiles
    return [
        Speed(point, tuple(measured)) for point, measured in rates.items()
    ], runner.compiles - compiled
