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

    def fits(self, home: int, held: list[int] | None, cached: int, new: int, until: float) -> bool:
        """Whether the step would still be done by `until` with a chunk more."""
        return self.predictor.with_chunk(self.lanes, home, held, cached, new) <= until

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
    if room.fits(home, held, cached, most, until):
        return most
    low, high = 0, -(-most // room.tile)                             # `low` tiles fit, `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        if room.fits(home, held, cached, middle * room.tile, until):
            low = middle
        else:
            high = middle
    return low * room.tile


CHUNKING: dict[str, Chunking] = {"static": static, "adaptive": adaptive}
