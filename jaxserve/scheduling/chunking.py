"""How much of a prompt goes into a step: a fixed number of tokens, or as many as the target time allows (medha.md M2, M10)."""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.scheduling.predictor import Lane, Predictor


class Room:
    """What a step has room for: per lane, tokens (`left`) and what it does so far (`lanes`); `target` is the step's pace in seconds."""

    def __init__(self, predictor: Predictor, lanes: list[Lane], tokens: int, tile: int, target: float):
        self.predictor, self.lanes, self.tile, self.target = predictor, lanes, tile, target
        self.left = [tokens] * len(lanes)
        self.base = [predictor.lane(lane) for lane in lanes]          # seconds before any chunk
        self.chunks = 0

    def until(self, home: int, share: float) -> float:
        """The pace at which `share` of what the decodes leave of the target is used up."""
        return self.base[home] + share * max(0.0, self.target - self.base[home])

    def pace(self, home: int, held: list[int] | None, cached: int, new: int) -> float:
        """Seconds of the step with a chunk more."""
        return self.predictor.with_chunk(self.lanes, home, held, cached, new)

    def take(self, home: int, held: list[int] | None, cached: int, new: int) -> None:
        """A chunk joins the step. Its share of the tokens is in whole tiles, as the device computes them."""
        self.predictor.add_chunk(self.lanes, home, held, cached, new)
        self.left[home] = max(0, self.left[home] - -(-new // self.tile) * self.tile)
        self.chunks += 1


Chunking = Callable[[Room, int, "list[int] | None", int, int, float], int]


def static(room: Room, home: int, held: list[int] | None, cached: int, most: int, until: float) -> int:
    """As many tokens as there is room for, whatever the time (Sarathi)."""
    return most


def adaptive(room: Room, home: int, held: list[int] | None, cached: int, most: int, until: float) -> int:
    """The most tokens, in whole tiles or all that is left, with which the step is done by `until`; 0 where one tile is too much."""
    above = room.pace(home, held, cached, most)
    if above <= until:
        return most
    if most <= room.tile or until <= room.base[home]:
        return 0
    low, high = 0, -(-most // room.tile)                             # `low` tiles fit, `high` do not
    below, even = room.base[home], False
    while high - low > 1:
        middle = (low + high) // 2 if even else low + int((high - low) * (until - below) / (above - below))
        middle, even = min(max(middle, low + 1), high - 1), not even   # by turns where a line would cross, and half way
        seconds = room.pace(home, held, cached, middle * room.tile)
        if seconds <= until:
            low, below = middle, seconds
        else:
            high, above = middle, seconds
    return low * room.tile


CHUNKING: dict[str, Chunking] = {"static": static, "adaptive": adaptive}
