"""Fits what pages take that a step moves between lanes, to steps that were measured with moves and
without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.api.batch import Batch
from jaxserve.costs.coefficients import Costs
from jaxserve.costs.cross_validation import errors_of_unseen, mean_by_group
from jaxserve.costs.predictor import Predictor
from jaxserve.lanes.choice import Correction, ExchangeChooser, MoveTimes
from jaxserve.lanes.cost import lane_costs
from jaxserve.lanes.groups import size_of_step
from jaxserve.settings.schema import ConfigError, MeshConfig


@dataclass(frozen=True)
class MoveSample:
    """A measured step that moves pages: its batch, and seconds in the slowest stage of this step,
    and of the same one without the moves."""

    batch: Batch
    seconds: float
    unmoved: float


@dataclass(frozen=True)
class MoveFit:
    """Times of moves, None where links alone say as much, and by exchange and size of group the
    mean relative error of points that a fit to the others has not seen (three folds), or of all as
    links say where no fit is better."""

    times: MoveTimes | None
    held_out: dict[tuple[str, int], float]


def fit_moves(
    costs: Costs, mesh: MeshConfig, exchange: ExchangeChooser, samples: Sequence[MoveSample]
) -> MoveFit:
    """Fits how long moves of pages take, and how much of that linear parts hide. exchange: its
    links say what an all-to-all takes; without times of moves. Times are kept if they lower the
    errors of points that their fit has not seen. Errors: ConfigError where there are no samples."""
    if not samples:
        raise ConfigError("profile", "points that move pages are needed")
    steps = [_MoveStep.of(sample, costs, mesh, exchange) for sample in samples]

    def trained(some: Sequence[_MoveStep]) -> Callable[[_MoveStep], float]:
        times = _move_times(some)
        return lambda step: step.error(times)

    errors = errors_of_unseen(steps, trained)
    linked = MoveTimes(hidden=exchange.rates.hidden)
    plain = [abs(step.error(linked)) for step in steps]
    if sum(errors) >= sum(plain):
        return MoveFit(None, mean_by_group(steps, plain))
    return MoveFit(_move_times(steps), mean_by_group(steps, errors))


@dataclass(frozen=True)
class _MoveStep:
    """A sample with the seconds of an all-to-all of as many bytes, `sent`, and of linear parts, in
    each of the `layers` before which pages move."""

    exchange: str
    group_size: int
    layers: int
    sent: float
    linear: float
    unmoved: float
    seconds: float

    @classmethod
    def of(
        cls, sample: MoveSample, costs: Costs, mesh: MeshConfig, exchange: ExchangeChooser
    ) -> _MoveStep:
        batch = sample.batch
        predictor = Predictor(costs, mesh, lane_costs(costs, mesh.kvp, exchange))
        loads = predictor.lane_costs.loads(batch)
        size = size_of_step(batch.group_size, batch.moves, mesh.kvp)
        return cls(
            batch.exchange,
            size,
            exchange.pools(predictor.layers),
            exchange.for_groups(size).move_seconds(),
            costs.linear(max(load.decodes + load.tokens for load in loads)),
            sample.unmoved,
            sample.seconds,
        )

    def error(self, times: MoveTimes) -> float:
        """The relative error of what these times say of the step."""
        exposed = times.exposed(self.sent, self.linear, self.layers)
        return (self.unmoved + exposed) / self.seconds - 1


def _move_times(steps: Sequence[_MoveStep]) -> MoveTimes:
    """The times with the least errors, of which outliers count less."""
    from scipy.optimize import least_squares  # slow to import, and most servers fit nothing

    scale = float(np.median([step.seconds / step.layers for step in steps]))  # of the constant

    def trial(values: np.ndarray) -> MoveTimes:
        seconds, factor, hidden = values.tolist()
        return MoveTimes(Correction(scale * seconds, factor), hidden)

    def errors(values: np.ndarray) -> list[float]:
        times = trial(values)
        return [step.error(times) for step in steps]

    # a constant, a factor, and the share that is hidden
    solution = least_squares(
        errors,
        [0.05, 1.0, 0.5],
        bounds=([0.0, 0.0, 0.0], [1.0, 100.0, 1.0]),
        loss="soft_l1",
        f_scale=0.1,
    )
    return trial(solution.x)
