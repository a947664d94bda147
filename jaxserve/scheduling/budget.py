"""The share of a prompt that goes into a step: a fixed number of tokens, or as many as the target
time allows (medha.md M2, M10)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from jaxserve.costs.predictor import Predictor
from jaxserve.lanes.groups import ChunkPlace
from jaxserve.lanes.load import LaneLoad
from jaxserve.scheduling.pacing import MIN_PREFILL_SHARE, StepTarget

# share of a long prompt's remaining work: prompts with at most so much may share its step
SHARER_WORK_RATIO = 1 / 8
# share of the time for each token that a chunk of twice the tokens has to save, so that steps go
# without prefill until the decodes can afford that one
WORTH_WAITING = 0.1
WORTH_ALONE = 0.02  # the same where no decodes wait for it


def size_class(work: np.ndarray, step: float) -> np.ndarray:
    """Returns classes [n] of prompts of `work` seconds of prefill [n], by how many steps of `step`
    seconds they need: much longer prompts have higher ones."""
    steps = np.maximum(work * (1 / step), 1.0)
    return (np.log(steps) * (1 / math.log(1 / SHARER_WORK_RATIO))).astype(np.int16)


Chunk = tuple[ChunkPlace, int, int]  # cached tokens, new tokens


class StepBudget:
    """The tokens and seconds that a step has, and what of them is used.

    `lanes`: what each lane does so far, at first its decodes. `decode_seconds` and `lane_seconds`
    [lanes]: predicted seconds of each lane with the decodes alone, and with all so far.
    `tokens_left` [lanes]: prefill tokens that a lane can still take. `objective`: of a token, in
    seconds. `target` and `long_target`: predicted seconds that a step may take, the latter where it
    has a part of a prompt that needs several steps: what arrives meanwhile waits for the step's
    end. `most`: the same where a part so long takes less time for each of its tokens. `paced`: what
    its decodes allow; None where none set its time. `saving`: seconds of a step for which they had
    better save.
    """

    def __init__(
        self,
        predictor: Predictor,
        lanes: list[LaneLoad],
        tokens: int,
        tile: int,
        target: float,
        long_target: float,
        paced: StepTarget | None = None,
        most: float = 0.0,
    ):
        """tokens: most prefill tokens per lane; tile: prefill tokens are computed in multiples of
        it; most: see `most`, unless decodes allow less."""
        self.predictor = predictor
        self.lanes = lanes
        self.tile = tile
        self.tokens_left = [tokens] * len(lanes)
        self.decode_seconds = [predictor.lane(lane) for lane in lanes]
        self.lane_seconds = self.decode_seconds.copy()
        self._plain = predictor.plain
        # the last chunk asked about, and the lanes that it bears on: number, load, seconds
        self._tried: tuple[Chunk | None, list[tuple[int, LaneLoad, float]]] = (None, [])
        self.paced = paced
        self.saving = 0.0
        self.most = most if paced is None else min(most, paced.most)
        self.objective = target if paced is None else paced.objective
        # tokens that `adaptive` has found since a chunk was added, by what it was asked
        self.found: dict[tuple[int, int, int, float], int] = {}
        self.target = target
        least = (1 + MIN_PREFILL_SHARE) * max(self.decode_seconds)
        self.long_target = min(target, max(long_target, least))

    def limit(self, home: int, share: float) -> float:
        """Returns the step time at which `share` of what the home lane's decodes leave of the
        target is used up."""
        decodes = self.decode_seconds[home]
        return decodes + share * max(0.0, self.target - decodes)

    def end_here(self) -> bool:
        """Lets the step take no longer than with what it has so far. Returns whether some lane has
        time left."""
        slowest = max(self.lane_seconds)
        self.target = min(self.target, slowest)
        self.long_target = min(self.long_target, slowest)
        return min(self.lane_seconds) < slowest

    def capacity(self, place: ChunkPlace) -> int:
        """Returns the most tokens of a chunk: as many as its lanes can still take; none where the
        home lane, which computes the last of them, takes no more."""
        left = self.tokens_left[place.home]
        if not left or place.is_local:
            return left
        return sum(self.tokens_left[lane] for lane in place.lanes)

    def seconds(self, place: ChunkPlace) -> float:
        """Returns seconds so far of the lanes that a chunk would bear on."""
        if place.is_local:
            return self.lane_seconds[place.home]
        return max(self.lane_seconds[lane] for lane in place.group)

    def seconds_with(self, place: ChunkPlace, cached: int, new: int) -> float:
        """Predicts seconds of these lanes with a chunk of `new` tokens after `cached` ones."""
        if self._plain:
            return self.predictor.lane_with(self.lanes[0], cached, new)
        with_chunk = self._with((place, cached, new))
        if place.is_local:
            return with_chunk[0][2]
        group = place.group
        return max(seconds for lane, _, seconds in with_chunk if lane in group)

    def affords(self, seconds: float) -> bool:
        """Returns whether the decodes have the time for a step of `seconds`."""
        return self.paced is None or seconds <= self.paced.spare

    def worthwhile(self, place: ChunkPlace, cached: int, new: int, most: int) -> int:
        """Returns the tokens of a chunk for which it is worth to wait, instead of one of `new`
        tokens after `cached` ones: twice as many, and so on, as long as these take a good part less
        time for each token, within what decodes may save for and others may wait for. most: tokens
        of a chunk."""
        worth = WORTH_ALONE if self.paced is None else WORTH_WAITING
        before = self.seconds(place)
        each = (self.seconds_with(place, cached, new) - before) / new
        while 2 * new <= most:
            seconds = self.seconds_with(place, cached, 2 * new)
            twice = (seconds - before) / (2 * new)
            if seconds > self.most or twice > (1 - worth) * each:
                break
            new *= 2
            each = twice
        return new

    def _with(self, chunk: Chunk) -> list[tuple[int, LaneLoad, float]]:
        if self._tried[0] != chunk:
            predict = self.predictor.lane
            joined = self.predictor.lane_costs.joined(self.lanes, *chunk)
            self._tried = (chunk, [(index, load, predict(load)) for index, load in joined])
        return self._tried[1]

    def add(self, place: ChunkPlace, cached: int, new: int) -> None:
        """Adds a chunk to the step. It takes whole tiles, as the device computes them: the last one
        of its home lane's tokens, the others of those of its lanes that have most left."""
        for index, lane, seconds in self._with((place, cached, new)):
            self.lanes[index] = lane
            self.lane_seconds[index] = seconds
        self._tried = (None, [])
        self.found.clear()
        tiles = -(-new // self.tile)
        if place.is_local:
            self._take(place.home, tiles)
            return
        self._take(place.home, 1)
        for _ in range(tiles - 1):
            self._take(max(place.lanes, key=self.tokens_left.__getitem__), 1)

    def _take(self, lane: int, tiles: int) -> None:
        self.tokens_left[lane] = max(0, self.tokens_left[lane] - tiles * self.tile)


# budget, place, cached tokens, most new tokens, step time in seconds
Chunking = Callable[[StepBudget, ChunkPlace, int, int, float], int]


def static(budget: StepBudget, place: ChunkPlace, cached: int, tokens: int, limit: float) -> int:
    """Takes as many tokens as the lane can, whatever the time (Sarathi)."""
    return tokens


def adaptive(budget: StepBudget, place: ChunkPlace, cached: int, tokens: int, limit: float) -> int:
    """Takes the most tokens, in whole tiles or all of `tokens`, with which the step takes no longer
    than `limit`; 0 where one tile is too much."""
    if not place.is_local:
        return _most_tokens(budget, place, cached, tokens, limit)
    asked = (place.home, cached, tokens, limit)
    if asked not in budget.found:
        budget.found[asked] = _most_tokens(budget, place, cached, tokens, limit)
    return budget.found[asked]


def _most_tokens(
    budget: StepBudget, place: ChunkPlace, cached: int, tokens: int, limit: float
) -> int:
    below = budget.seconds(place)
    if limit <= below:
        return 0
    above = budget.seconds_with(place, cached, tokens)
    if above <= limit:
        return tokens
    # `low` tiles fit, `high` do not; try in turns where a line would cross, and half way
    low = 0
    high = -(-tokens // budget.tile)
    halve = False
    while high - low > 1:
        if halve:
            middle = (low + high) // 2
        else:
            middle = low + int((high - low) * (limit - below) / (above - below))
        halve = not halve
        middle = min(max(middle, low + 1), high - 1)
        seconds = budget.seconds_with(place, cached, middle * budget.tile)
        if seconds <= limit:
            low = middle
            below = seconds
        else:
            high = middle
            above = seconds
    return low * budget.tile


CHUNKING: dict[str, Chunking] = {"static": static, "adaptive": adaptive}
