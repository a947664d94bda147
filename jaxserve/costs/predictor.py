"""Predicts how long steps take: one model of time for the scheduler, placement, planning and the
simulator.

A step runs through the stages one after the other; within a stage the slowest lane decides. A
lane's time in one layer is that of its linear parts, which depends on how many tokens it computes,
plus attention, which depends on who attends to how much, plus what ranks and lanes say to each
other. `Costs` holds the coefficients, in seconds; `LaneCosts` deals a step's work out over lanes
and knows what they add to it; `Predictor` applies both to batches and, while serving, corrects them
by what steps really took.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxserve.api.batch import Batch
from jaxserve.costs.coefficients import NOMINAL, Costs
from jaxserve.lanes.cost import LaneCosts, PrefillPart, lane_costs
from jaxserve.lanes.groups import ChunkPlace
from jaxserve.lanes.load import ExchangedChunks, LaneLoad
from jaxserve.settings.schema import MeshConfig

HOST_SECONDS = 0.003  # in which the host decides and issues a step
EARLY_SHARE = 0.1  # of a step's predicted time, by which it may end early
MEMORY = 0.05  # weight of a step's time among those before it, for the online correction
MOST_CORRECTION = 4.0  # factor by which the online correction changes times at most


class Predictor:
    """Seconds of batches on a mesh. lanes: what its lanes add; default: they gather queries, as
    `costs` says. `scale` is what the online correction has learnt: it starts at 1."""

    def __init__(self, costs: Costs, mesh: MeshConfig, lanes: LaneCosts | None = None):
        self.mesh = mesh
        self.costs = costs
        self.lane_costs = lanes or lane_costs(costs, mesh.kvp)
        self.layers = -(-costs.layers // mesh.spp)
        self.scale = 1.0
        self.calibrated = costs != NOMINAL  # whether its costs are seconds: NOMINAL counts work

    def use(self, costs: Costs, lanes: LaneCosts) -> None:
        """Predicts by other costs from now on. lanes: what lanes add to them."""
        self.costs = costs
        self.lane_costs = lanes
        self.scale = 1.0
        self.calibrated = costs != NOMINAL

    def early(self, seconds: float) -> float:
        """Seconds before a step's predicted end at which its successor is decided, so that it is
        issued in time: later, and the devices may wait; earlier, and requests that come in between
        do. Infinite where it is not calibrated."""
        if not self.calibrated:
            return math.inf
        return HOST_SECONDS + EARLY_SHARE * seconds

    # --- one step

    def stage(self, loads: Sequence[LaneLoad]) -> float:
        """Seconds of a step in the slowest stage: the pace at which steps can follow each other."""
        return max(map(self.lane, loads))

    def lane(self, load: LaneLoad) -> float:
        """Seconds of a step on one lane."""
        costs = self.costs
        layer = costs.layer(load, self.lane_costs.messages(load))
        head = self.head(load.samples) if load.samples else 0.0
        return (costs.launch + self.layers * layer) * self.scale + head

    def lane_with(self, load: LaneLoad, cached: int, new: int) -> float:
        """Seconds of a step on the only lane with a chunk of `new` tokens after `cached` ones:
        those of `lane` for the load with it, where no compiled shapes are known, without making
        that load."""
        costs = self.costs
        layer = costs.linear(load.decodes + load.tokens + new)
        layer += costs.attention(
            load.attention + costs.attend_chunk(cached, new) + load.spread_seconds,
            costs.attend_decodes(load.decodes, load.context),
        )
        head = self.head(load.samples) if load.samples else 0.0
        return (costs.launch + self.layers * layer) * self.scale + head

    @property
    def plain(self) -> bool:
        """Returns whether `lane_with` may be asked."""
        return self.lane_costs.lanes == 1 and not (self.costs.shapes or self.costs.longest)

    def head(self, samples: int) -> float:
        """Seconds by which the last stage, where tokens are sampled, is slower than the others."""
        if not samples:
            return 0.0
        return (self.costs.head + self.costs.head_token * samples) * self.scale

    def hop(self, tokens: int) -> float:
        """Seconds from one stage to the next."""
        return self.costs.hop + self.costs.hop_token * tokens

    def latency(self, stage: float, tokens: int, samples: int) -> float:
        """Seconds from a step's start to its tokens, given `stage`, its tokens and how many a lane
        samples: through all stages, and the hops between them."""
        return stage + (self.mesh.spp - 1) * (stage - self.head(samples) + self.hop(tokens))

    def add_chunk(self, loads: list[LaneLoad], place: ChunkPlace, cached: int, new: int) -> None:
        """Adds a prefill chunk to the loads of the lanes."""
        for index, load in self.lane_costs.joined(loads, place, cached, new):
            loads[index] = load

    def seconds(self, batch: Batch, exchanged: ExchangedChunks | None = None) -> float:
        """Seconds of a batch's pace: see `stage`. exchanged: see `LaneCosts.loads`."""
        loads = self.lane_costs.loads(batch, exchanged)
        moves = self.lane_costs.exposed_moves(batch, loads, self.layers)
        return self.stage(loads) + moves * self.scale

    # --- a whole prompt

    def prefill(self, cached: float, total: int, chunk: int) -> float:
        """Seconds to prefill tokens `cached` to before `total` alone, in chunks of `chunk` for each
        lane that takes part: the sum of the steps' paces (Medha, Eq. 4)."""
        if total <= cached:
            return 0.0
        seconds = self.head(1)
        for part in self.lane_costs.parts(cached, total):
            seconds += self.lane_costs.prefill(part, chunk, self.layers) * self.scale
        return seconds

    def prefill_on(self, lanes: int, cached: int, total: int, chunk: int) -> float:
        """Seconds to prefill tokens `cached` to before `total` alone, dealt over `lanes` lanes, as
        the ones before them are, in chunks of `chunk` for each lane."""
        if total <= cached:
            return self.head(1)
        part = PrefillPart(lanes, cached, total)
        return self.lane_costs.prefill(part, chunk, self.layers) * self.scale + self.head(1)

    def growth(self, before: int, after: int, history: float, chunk: int) -> float:
        """Seconds that moves add to the steps of a prompt as its group of lanes grows: see
        `LaneCosts.growth`."""
        return self.lane_costs.growth(before, after, history, chunk, self.layers) * self.scale

    # --- learning while serving

    def seen(self, predicted: float, seconds: float) -> None:
        """Corrects the scale by a step that was predicted to take `predicted` seconds and took
        `seconds`: slowly, and never beyond a factor of 4 either way."""
        if predicted > 0 and seconds > 0:
            ratio = min(max(seconds / predicted * self.scale, 1 / MOST_CORRECTION), MOST_CORRECTION)
            self.scale *= (ratio / self.scale) ** MEMORY
