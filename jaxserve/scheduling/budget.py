"""How much of a prompt goes into a step: a fixed number of tokens, or as many as the target time
allows (medha.md M2, M10)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxserve.costs.predictor import LaneLoad, Predictor

LEAST = 0.25  # of the decodes' time that chunks get where decodes alone take all there is


class StepBudget:
    """What a step has room for: per lane, tokens (`left`), what it does so far (`lanes`) and its
    seconds (`pace`). Paces of the step in seconds: `target`, and `long`, which a prompt of several
    steps may not exceed, since what arrives meanwhile waits for the step's end."""

    def __init__(
        self,
        predictor: Predictor,
        lanes: list[LaneLoad],
        tokens: int,
        tile: int,
        target: float,
        long: float,
    ):
        self.predictor = predictor
        self.lanes = lanes
        self.tile = tile
        self.tokens_left = [tokens] * len(lanes)
        self.base = [predictor.lane(lane) for lane in lanes]  # seconds before any chunk
        self.pace = self.base.copy()
        # the last chunk asked about, and the lanes with it
        self._tried: tuple[tuple, list[tuple[int, LaneLoad, float]]] = ((), [])
        least = (1 + LEAST) * max(self.base)
        self.target = target if target > max(self.base) else least
        self.long = min(self.target, max(long, least))

    def until(self, home: int, share: float) -> float:
        """The pace at which `share` of what the decodes leave of the target is used up."""
        return self.base[home] + share * max(0.0, self.target - self.base[home])

    def so_far(self, home: int, held: list[int] | None) -> float:
        """Seconds of the lanes on which a chunk would bear."""
        return self.pace[home] if held is None else max(self.pace)

    def seconds(self, home: int, held: list[int] | None, cached: int, new: int) -> float:
        """Seconds of these lanes with a chunk more."""
        lanes = self._with(home, held, cached, new)
        return lanes[0][2] if held is None else max(seconds for _, _, seconds in lanes)

    def _with(self, *chunk: Any) -> list[tuple[int, LaneLoad, float]]:
        if self._tried[0] != chunk:
            joined = self.predictor.joined(self.lanes, *chunk)
            self._tried = (
                chunk,
                [(index, lane, self.predictor.lane(lane)) for index, lane in joined],
            )
        return self._tried[1]

    def take(self, home: int, held: list[int] | None, cached: int, new: int) -> None:
        """A chunk joins the step. Its share of the tokens is in whole tiles, as the device computes
        them."""
        for index, lane, seconds in self._with(home, held, cached, new):
            self.lanes[index] = lane
            self.pace[index] = seconds
        self._tried = (), []
        self.tokens_left[home] = max(0, self.tokens_left[home] - -(-new // self.tile) * self.tile)


Chunking = Callable[[StepBudget, int, "list[int] | None", int, int, float], int]


def static(
    room: StepBudget, home: int, held: list[int] | None, cached: int, most: int, until: float
) -> int:
    """As many tokens as there is room for, whatever the time (Sarathi)."""
    return most


def adaptive(
    room: StepBudget, home: int, held: list[int] | None, cached: int, most: int, until: float
) -> int:
    """The most tokens, in whole tiles or all that is left, with which the step is done by `until`;
    0 where one tile is too much."""
    below = room.so_far(home, held)
    if until <= below:
        return 0
    above = room.seconds(home, held, cached, most)
    if above <= until:
        return most
    # `low` tiles fit, `high` do not
    low = 0
    high = -(-most // room.tile)
    even = False
    while high - low > 1:
        middle = (
            (low + high) // 2
            if even
            else low + int((high - low) * (until - below) / (above - below))
        )
        # by turns where a line would cross, and half way
        middle = min(max(middle, low + 1), high - 1)
        even = not even
        seconds = room.seconds(home, held, cached, middle * room.tile)
        if seconds <= until:
            low = middle
            below = seconds
        else:
            high = middle
            above = seconds
    return low * room.tile


CHUNKING: dict[str, Chunking] = {"static": static, "adaptive": adaptive}
