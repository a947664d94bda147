"""Plans of prompts over lanes that tests draw at random."""

from __future__ import annotations

import random
from collections.abc import Sequence

from jaxserve.lanes.planner import PlanPart


class Plans:
    """Random plans: chunks of any length, on lanes of which those of the chunk before are some."""

    def __init__(self, seed: int, lanes: int = 8, longest: int = 200):
        self.rng = random.Random(seed)
        self.lanes = lanes
        self.longest = longest

    def arrived(self, now: float) -> None:
        pass

    def __call__(
        self, pending: list[float], start: int, target: int, lanes: Sequence[int] = ()
    ) -> tuple[PlanPart, ...]:
        group = list(lanes)
        rest = [lane for lane in range(self.lanes) if lane not in lanes]
        parts = []
        at = start
        self.rng.shuffle(rest)
        while at < target:
            size = self.rng.choice(
                [size for size in (1, 2, 4, 8) if max(1, len(group)) <= size <= self.lanes]
            )
            while len(group) < size:
                group.append(rest.pop())
            at = min(target, at + self.rng.randint(1, self.longest))
            parts.append(PlanPart(at, tuple(group)))
        return tuple(parts)
