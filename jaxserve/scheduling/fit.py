"""Coefficients from measured steps of an engine, and how well they fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares, nnls

from jaxserve.config import ConfigError, MeshConfig
from jaxserve.scheduling.predictor import Compiled, Costs, Lane, Predictor


@dataclass(frozen=True)
class Sample:
    """A measured step of one lane: decodes, each after `context` tokens; chunks of `new` tokens after `cached` ones; how many tokens were
    sampled; the compiled shape, as (decodes, rows, width); seconds in the slowest stage."""

    decodes: int
    context: int
    chunks: int
    cached: int
    new: int
    samples: int
    shape: tuple[int, int, int]
    seconds: float


@dataclass(frozen=True)
class Fit:
    """What was found: `fitted` and `held_out` are mean relative errors of the points used and of those left out (every third one)."""

    costs: Costs
    fitted: float
    held_out: float


def fit(samples: Sequence[Sample], layers: int, mesh: MeshConfig, longest: bool) -> Fit:
    """Costs of an engine whose steps run in compiled shapes. longest: see `Costs`. Errors: ConfigError where points are missing."""
    base = [sample for sample in samples if not sample.cached and sample.context <= 1]
    rest = [sample for sample in samples if sample not in base]
    if not any(sample.samples for sample in base) or not any(not sample.samples for sample in base):
        raise ConfigError("profile", "points with and without sampled tokens are needed")
    kept = [sample for index, sample in enumerate(rest) if index % 3]
    stage = -(-layers // mesh.spp)
    costs = _attention(Costs(layers=layers, longest=longest), base, kept, stage)
    costs = _linear(costs, base, stage)
    errors = lambda of: float(np.mean([abs(predicted(costs, mesh, s) / s.seconds - 1) for s in of])) if of else 0.0
    return Fit(costs, errors(base + kept), errors([sample for sample in rest if sample not in kept]))


def _attention(costs: Costs, base: Sequence[Sample], rest: Sequence[Sample], stage: int) -> Costs:
    """Attention to what is cached: what a point with context takes beyond the one of the same shape without."""
    bare = {sample.shape: sample.seconds for sample in base if sample.samples or not sample.decodes}
    rest = [sample for sample in rest if sample.shape in bare]
    alone = [sample for sample in rest if not sample.chunks]
    chunks = [sample for sample in rest if not sample.decodes]
    if alone:
        context = np.array([(s.shape[0] if costs.longest else s.decodes) * s.context * stage / s.seconds for s in alone])
        extra = np.array([1 - bare[s.shape] / s.seconds for s in alone])
        costs = dataclasses.replace(costs, decode_kv=max(0.0, float(context @ extra / (context @ context))))
    if chunks:
        def errors(logs: np.ndarray) -> list[float]:
            trial = dataclasses.replace(costs, pair=float(np.exp(logs[0])), read=float(np.exp(logs[1])))
            more = lambda s: s.chunks * (trial.attend_chunk(s.cached, s.new) - trial.attend_chunk(0, s.new))
            return [(bare[s.shape] + stage * more(s)) / s.seconds - 1 for s in chunks]

        pairs = sum(s.chunks * s.cached * s.new for s in chunks) * stage
        first = max(sum(s.seconds - bare[s.shape] for s in chunks), 1e-9) / pairs
        pair, read = np.exp(least_squares(errors, np.log([first, first])).x).tolist()
        costs = dataclasses.replace(costs, pair=pair, read=read)
    return costs


def _linear(costs: Costs, base: Sequence[Sample], stage: int) -> Costs:
    """Seconds of every shape without attention and head, and of tokens in between where no shape is asked for."""
    silent = [sample for sample in base if sample.decodes and not sample.samples]
    head = max(0.0, min((other.seconds - sample.seconds for sample in silent for other in base
                         if other.samples and other.shape == sample.shape), default=0.0))
    shapes = []
    for sample in base:                                                              # in the order of the engine's shapes, cheapest first
        if sample not in silent:
            attention = sample.chunks * costs.attend_chunk(0, sample.new) + costs.attend_decodes(sample.shape[0], sample.shape[0])
            seconds = (sample.seconds - (head if sample.samples else 0.0)) / stage - attention
            shapes.append(Compiled(*sample.shape, max(seconds, 0.0)))
    tokens = np.array([shape.decodes + shape.rows * shape.width for shape in shapes])
    seconds = np.array([shape.seconds for shape in shapes])
    weight = 1 / np.maximum(seconds, 1e-12)
    level, slope = nnls(np.stack([weight, tokens * weight], 1), np.ones(len(shapes)))[0].tolist()
    tile = min((shape.width for shape in shapes if shape.rows > 1), default=max((shape.width for shape in shapes), default=1))
    return dataclasses.replace(costs, head=head, shapes=tuple(shapes), tile=max(tile, 1), linear_base=level, linear_token=slope)


def predicted(costs: Costs, mesh: MeshConfig, sample: Sample) -> float:
    """Seconds that the costs give for a sample."""
    predictor = Predictor(costs, mesh)
    lanes = [Lane(sample.decodes, sample.decodes * sample.context, sample.context, samples=sample.samples)]
    for _ in range(sample.chunks):
        predictor.add_chunk(lanes, 0, None, sample.cached, sample.new)
    return predictor.stage(lanes)


def to_json(costs: Costs) -> dict[str, Any]:
    return dataclasses.asdict(costs)


def from_json(found: dict[str, Any]) -> Costs:
    """Errors: ConfigError for a field that costs do not have, or a value that is not a number."""
    try:
        shapes = tuple(Compiled(**shape) for shape in found.get("shapes", ()))
        costs = Costs(**{**found, "shapes": shapes})
        Predictor(costs, MeshConfig()).prefill(0, 1000, 100)
        return costs
    except (TypeError, AttributeError) as error:
        raise ConfigError("profile", f"is not one of this version: {error}") from None
