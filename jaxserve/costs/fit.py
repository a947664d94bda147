"""Fits the coefficients of `Costs` to measured steps of an engine, and says how well they fit.

Steps of local sequences come first. What steps with spread chunks take follows from these costs and
from how fast lanes send to each other (`ExchangeChooser`), but for a few numbers: what padding
takes, how much lanes wait for each other's work, and for each exchange a factor and a constant. Of
steps whose spread rows are decodes alone, a factor and a constant of each exchange are fitted too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.api.batch import Batch
from jaxserve.costs.coefficients import Costs, ShapeCost, SpreadShape
from jaxserve.costs.cross_validation import FOLDS, errors_of_unseen, mean_by_group
from jaxserve.costs.predictor import Predictor
from jaxserve.lanes.choice import Correction, ExchangeChooser
from jaxserve.lanes.cost import lane_costs
from jaxserve.lanes.groups import ChunkPlace
from jaxserve.lanes.load import LaneLoad
from jaxserve.settings.schema import ConfigError, MeshConfig

Extent = tuple[int, int, int]  # of a compiled shape of local steps: decodes, rows, width
TRIALS = 50  # steps of the search for what spread chunks take


@dataclass(frozen=True)
class StepSample:
    """A measured step of one lane: decodes, each after `context` tokens; chunks of `new` tokens
    after `cached` ones; how many tokens were sampled; the compiled shape, as (decodes, rows,
    width); seconds in the slowest stage."""

    decodes: int
    context: int
    chunks: int
    cached: int
    new: int
    samples: int
    shape: Extent
    seconds: float


@dataclass(frozen=True)
class SpreadSample:
    """A measured step with spread rows: its batch, whose exchanges say how they met, and seconds in
    the slowest stage."""

    batch: Batch
    seconds: float

    @property
    def group_size(self) -> int:
        return int(self.batch.group_size.max())


@dataclass(frozen=True)
class CostsFit:
    """Fitted costs and their errors. `fitted` is the mean relative error of all points; `held_out`
    that of points with context which a fit to the others has not seen (three folds)."""

    costs: Costs
    fitted: float
    held_out: float


@dataclass(frozen=True)
class SpreadFit:
    """Costs that are right for steps with spread chunks too, corrections of each exchange, and by
    exchange and size of group the mean relative error of points that a fit to the others has not
    seen (three folds)."""

    costs: Costs
    corrections: dict[str, Correction]
    held_out: dict[tuple[str, int], float]


@dataclass(frozen=True)
class DecodeFit:
    """Corrections of each exchange in steps whose spread rows are decodes alone, and by exchange
    and size of group the mean relative error of points that a fit to the others has not seen (three
    folds), or of all without a correction where none is better."""

    corrections: dict[str, Correction]
    held_out: dict[tuple[str, int], float]


def fit_costs(
    samples: Sequence[StepSample],
    layers: int,
    mesh: MeshConfig,
    longest: bool,
    shapes: Sequence[Extent] = (),
) -> CostsFit:
    """Fits the costs of an engine whose steps run in compiled shapes. longest: see `Costs`. shapes:
    those of local steps, cheapest first; what one takes that was not measured follows from those
    that were. Errors: ConfigError where points are missing."""
    base = [sample for sample in samples if not sample.cached and sample.context <= 1]
    others = [sample for sample in samples if sample not in base]
    if not any(sample.samples for sample in base) or not any(not sample.samples for sample in base):
        raise ConfigError("profile", "points with and without sampled tokens are needed")
    stage = -(-layers // mesh.spp)
    fitted = lambda seen_samples: _linear(
        _attention(Costs(layers=layers, longest=longest), base, seen_samples, stage), base, stage
    )
    errors = lambda costs, of: [
        abs(predicted(costs, mesh, sample) / sample.seconds - 1) for sample in of
    ]
    costs = fitted(others)
    costs = dataclasses.replace(costs, shapes=_with_unmeasured(costs.shapes, shapes))
    folds = [
        (others[fold::FOLDS], [s for index, s in enumerate(others) if index % FOLDS != fold])
        for fold in range(FOLDS)
    ]
    unseen = [
        error
        for unseen_samples, seen_samples in folds
        if unseen_samples
        for error in errors(fitted(seen_samples), unseen_samples)
    ]
    return CostsFit(costs, float(np.mean(errors(costs, samples))), float(np.mean(unseen or [0.0])))


def _attention(
    costs: Costs, base: Sequence[StepSample], others: Sequence[StepSample], stage: int
) -> Costs:
    """Attention to what is cached: what a point with context takes beyond the one of the same shape
    without."""
    from scipy.optimize import least_squares  # slow to import, and most servers fit nothing

    bare = {sample.shape: sample.seconds for sample in base if sample.samples or not sample.decodes}
    others = [sample for sample in others if sample.shape in bare]
    if not others:
        return costs

    def trial(logs: np.ndarray) -> Costs:
        return dataclasses.replace(
            costs, **dict(zip(("pair", "read", "decode_kv"), np.exp(logs).tolist()))
        )

    def errors(logs: np.ndarray) -> list[float]:
        return [
            (bare[sample.shape] + stage * _context(trial(logs), sample)) / sample.seconds - 1
            for sample in others
        ]

    pairs = sum(
        sample.decodes * sample.context + sample.chunks * sample.new * sample.cached
        for sample in others
    )
    each = sum(max(sample.seconds - bare[sample.shape], 0.0) for sample in others) / stage / pairs
    start = np.log(
        np.maximum(
            [each, each * min((sample.new for sample in others if sample.chunks), default=1), each],
            1e-15,
        )
    )
    return trial(least_squares(errors, start).x)


def _context(costs: Costs, sample: StepSample) -> float:
    """Seconds per layer that the sample's context adds."""
    decodes = sample.shape[0] if costs.longest else sample.decodes
    chunks = sample.chunks * (
        costs.attend_chunk(sample.cached, sample.new) - costs.attend_chunk(0, sample.new)
    )
    return chunks + (sample.decodes > 0) * costs.decode_kv * decodes * sample.context


def _linear(costs: Costs, base: Sequence[StepSample], stage: int) -> Costs:
    """Seconds of every shape without attention and head, and of tokens in between where no shape is
    asked for."""
    from scipy.optimize import nnls

    silent = [sample for sample in base if sample.decodes and not sample.samples]
    head = max(
        0.0,
        min(
            (
                other.seconds - sample.seconds
                for sample in silent
                for other in base
                if other.samples and other.shape == sample.shape
            ),
            default=0.0,
        ),
    )
    shapes = []
    for sample in base:  # in the order of the engine's shapes, cheapest first
        if sample not in silent:
            attention = sample.chunks * costs.attend_chunk(0, sample.new) + costs.attend_decodes(
                sample.shape[0], sample.shape[0]
            )
            seconds = (sample.seconds - head * (sample.samples > 0)) / stage - attention
            shapes.append(ShapeCost(*sample.shape, max(seconds, 0.0)))
    tokens = np.array([shape.decodes + shape.rows * shape.width for shape in shapes])
    weight = 1 / np.maximum([shape.seconds for shape in shapes], 1e-12)
    level, slope = nnls(np.stack([weight, tokens * weight], 1), np.ones(len(shapes)))[0].tolist()
    tile = min(
        (shape.width for shape in shapes if shape.rows > 1),
        default=max((shape.width for shape in shapes), default=1),
    )
    return dataclasses.replace(
        costs,
        head=head,
        shapes=tuple(shapes),
        tile=max(tile, 1),
        linear_base=level,
        linear_token=slope,
    )


def _with_unmeasured(
    measured: Sequence[ShapeCost], shapes: Sequence[Extent]
) -> tuple[ShapeCost, ...]:
    """Adds to measured shapes the others among `shapes`, in the order of these. Seconds of those
    are interpolated by tokens, padding included."""
    known = {(each.decodes, each.rows, each.width): each.seconds for each in measured}
    size = lambda shape: shape[0] + shape[1] * shape[2]
    tokens, seconds = zip(*sorted((size(shape), known[shape]) for shape in known))
    return tuple(
        ShapeCost(
            *shape,
            known[shape] if shape in known else np.interp(size(shape), tokens, seconds).item(),
        )
        for shape in dict.fromkeys([*shapes, *known])
    )


def predicted(costs: Costs, mesh: MeshConfig, sample: StepSample) -> float:
    """Predicts the seconds of a sample."""
    predictor = Predictor(costs, mesh)
    lanes = [
        LaneLoad(
            sample.decodes, sample.decodes * sample.context, sample.context, samples=sample.samples
        )
    ]
    for _ in range(sample.chunks):
        predictor.add_chunk(lanes, ChunkPlace(0), sample.cached, sample.new)
    return predictor.stage(lanes)


def fit_spread(
    costs: Costs, mesh: MeshConfig, exchange: ExchangeChooser, samples: Sequence[SpreadSample]
) -> SpreadFit:
    """Fits what steps with spread chunks take besides what `costs`, fitted to local ones, and
    `exchange`, without corrections, say of them. Errors: ConfigError where there are no samples."""
    if not samples:
        raise ConfigError("profile", "points with spread chunks are needed")
    steps = [_SpreadStep.of(sample, costs, mesh, exchange) for sample in samples]

    def trained(some: Sequence[_SpreadStep]) -> Callable[[_SpreadStep], float]:
        trial_costs, corrections = _spread_costs(costs, mesh, some)
        return lambda step: step.error(trial_costs, mesh, corrections)

    held_out = mean_by_group(steps, errors_of_unseen(steps, trained))
    return SpreadFit(*_spread_costs(costs, mesh, steps), held_out)


@dataclass(frozen=True)
class _SpreadStep:
    """A sample as the work of its lanes, whose exchange is not corrected yet."""

    exchange: str
    group_size: int
    lanes: list[LaneLoad]
    seconds: float

    @classmethod
    def of(
        cls, sample: SpreadSample, costs: Costs, mesh: MeshConfig, exchange: ExchangeChooser
    ) -> _SpreadStep:
        strategy = sample.batch.exchange
        fixed = dataclasses.replace(exchange, chooser=strategy, corrections={})
        # lanes that do the same take as long
        lanes = {
            (load.decodes, load.context, load.tokens, load.spread_seconds): load
            for load in lane_costs(costs, mesh.kvp, fixed).loads(sample.batch)
        }
        return cls(strategy, sample.group_size, list(lanes.values()), sample.seconds)

    def error(self, costs: Costs, mesh: MeshConfig, corrections: dict[str, Correction]) -> float:
        """The relative error of what these say of the step."""
        correction = corrections.get(self.exchange, Correction())
        lanes = [
            dataclasses.replace(load, spread_seconds=correction(load.spread_seconds))
            if load.spread_seconds
            else load
            for load in self.lanes
        ]
        return Predictor(costs, mesh).stage(lanes) / self.seconds - 1


def _spread_costs(
    costs: Costs, mesh: MeshConfig, steps: Sequence[_SpreadStep]
) -> tuple[Costs, dict[str, Correction]]:
    """The costs and corrections with the least errors, of which outliers count less."""
    from scipy.optimize import least_squares  # slow to import, and most servers fit nothing

    exchanges = sorted({step.exchange for step in steps})
    layers = -(-costs.layers // mesh.spp)
    scale = float(np.median([step.seconds for step in steps])) / layers  # of the constants

    def trial(values: np.ndarray) -> tuple[Costs, dict[str, Correction]]:
        padding, shared, *each = values.tolist()
        pairs = zip(exchanges, each[::2], each[1::2])
        return (
            dataclasses.replace(costs, padding=padding, shared=shared),
            {name: Correction(scale * seconds, factor) for name, seconds, factor in pairs},
        )

    def errors(values: np.ndarray) -> list[float]:
        costs, corrections = trial(values)
        return [step.error(costs, mesh, corrections) for step in steps]

    # padding, shared, and for each exchange a constant and a factor
    start = [0.5, 0.5, *[0.05, 1.0] * len(exchanges)]
    high = [1.0, 1.0, *[1.0, 10.0] * len(exchanges)]
    solution = least_squares(
        errors,
        start,
        bounds=([0.0] * len(start), high),
        loss="soft_l1",
        f_scale=0.1,
        max_nfev=TRIALS,
    )
    return trial(solution.x)


def fit_decodes(
    costs: Costs, mesh: MeshConfig, exchange: ExchangeChooser, samples: Sequence[SpreadSample]
) -> DecodeFit:
    """Fits what steps whose spread rows are decodes alone take besides what `costs`, fitted to
    local ones, and `exchange`, without corrections, say of them. An exchange is corrected if that
    lowers the errors of points that its fit has not seen. Errors: ConfigError where there are no
    samples."""
    if not samples:
        raise ConfigError("profile", "points with spread decodes are needed")
    by_exchange: dict[str, list[_DecodeStep]] = {}
    for sample in samples:
        step = _DecodeStep.of(sample, costs, mesh, exchange)
        by_exchange.setdefault(step.exchange, []).append(step)

    def trained(some: Sequence[_DecodeStep]) -> Callable[[_DecodeStep], float]:
        correction = _decode_correction(some)
        return lambda step: step.error(correction)

    corrections: dict[str, Correction] = {}
    held_out: dict[tuple[str, int], float] = {}
    for name, steps in by_exchange.items():
        errors = errors_of_unseen(steps, trained)
        plain = [abs(step.error(Correction())) for step in steps]
        corrections[name] = _decode_correction(steps)
        if sum(errors) >= sum(plain):
            corrections[name], errors = Correction(), plain
        held_out |= mean_by_group(steps, errors)
    return DecodeFit(corrections, dict(sorted(held_out.items())))


@dataclass(frozen=True)
class _DecodeStep:
    """A sample with spread decodes alone. local: seconds that it would take without exchange;
    exchanged: seconds per layer that the exchange, not corrected yet, adds in each of `layers`."""

    exchange: str
    group_size: int
    layers: int
    local: float
    exchanged: float
    seconds: float

    @classmethod
    def of(
        cls, sample: SpreadSample, costs: Costs, mesh: MeshConfig, exchange: ExchangeChooser
    ) -> _DecodeStep:
        strategy = sample.batch.decode_exchange
        fixed = dataclasses.replace(exchange, decode_chooser=strategy, decode_corrections={})
        predictor = Predictor(costs, mesh, lane_costs(costs, mesh.kvp, fixed))
        loads = predictor.lane_costs.loads(sample.batch)
        return cls(
            strategy,
            sample.group_size,
            predictor.layers,
            predictor.stage([dataclasses.replace(load, decode_choice=None) for load in loads]),
            max(map(predictor.lane_costs.messages, loads)),
            sample.seconds,
        )

    def error(self, correction: Correction) -> float:
        """The relative error of what a correction says of the step."""
        step = self.local + self.layers * correction(self.exchanged)
        return step / self.seconds - 1


def _decode_correction(steps: Sequence[_DecodeStep]) -> Correction:
    """The correction with the least errors, of which outliers count less."""
    from scipy.optimize import least_squares  # slow to import, and most servers fit nothing

    scale = float(np.median([step.seconds / step.layers for step in steps]))  # of the constant

    def trial(values: np.ndarray) -> Correction:
        seconds, factor = values.tolist()
        return Correction(scale * seconds, factor)

    def errors(values: np.ndarray) -> list[float]:
        correction = trial(values)
        return [step.error(correction) for step in steps]

    solution = least_squares(
        errors, [0.05, 1.0], bounds=([0.0, 0.0], [1.0, 10.0]), loss="soft_l1", f_scale=0.1
    )
    return trial(solution.x)


def to_json(costs: Costs) -> dict[str, Any]:
    """Returns costs as JSON has them."""
    return dataclasses.asdict(costs)


def from_json(fields: dict[str, Any]) -> Costs:
    """Reads costs that `to_json` gave. Errors: ConfigError for a field that costs do not have, or a
    value that is not a number."""
    try:
        shapes = tuple(ShapeCost(**shape) for shape in fields.get("shapes", ()))
        spread = tuple(SpreadShape(**shape) for shape in fields.get("spread_shapes", ()))
        costs = Costs(**{**fields, "shapes": shapes, "spread_shapes": spread})
        Predictor(costs, MeshConfig()).prefill(0, 1000, 100)
        return costs
    except (TypeError, AttributeError) as error:
        raise ConfigError("profile", f"is not one of this version: {error}") from None
