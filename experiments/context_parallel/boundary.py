"""Rules of the paper that serving does not use: its thresholds, and a line fitted to measurements
(appendix D)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxserve.lanes.choice import Pick
from jaxserve.lanes.rates import ExchangeTimes
from jaxserve.lanes.work import Heads, require

RIDGE = 1e-4  # of the logistic regression: keeps it finite where a line parts all points


@dataclasses.dataclass(frozen=True, slots=True)
class Boundary:
    """The paper's line between the rings (appendix D): pass-KV where h = new log(T) + miss log(T /
    (T+P)) + constant is above 0; natural logarithms."""

    new: float
    miss: float
    constant: float

    def __call__(self, cached: int, new: int) -> float:
        return self.new * math.log(new) + self.miss * math.log(new / (new + cached)) + self.constant


def fit_boundary(points: Sequence[tuple[int, int, float, float]]) -> Boundary:
    """Fits the line that best tells where pass-KV is faster, by logistic regression. points:
    (cached, new, seconds of pass-KV, seconds of pass-Q). Where all points have one total length it
    cannot be told apart from one in T alone; the smallest coefficients are then taken. Errors:
    ConfigError where the same ring is faster at all points."""
    table = np.array(points, float).reshape(-1, 4)
    faster = (table[:, 2] < table[:, 3]).astype(float)
    require(
        0 < faster.sum() < len(faster),
        "points",
        f"{len(points)} measurements",
        "a set in which each ring is faster somewhere",
    )
    x = np.log(np.stack([table[:, 1], table[:, 1] / (table[:, 0] + table[:, 1])], 1))
    middle = x.mean(0)
    spread = np.maximum(x.std(0), 1e-9)
    design = np.column_stack([(x - middle) / spread, np.ones(len(x))])
    ridge = RIDGE * np.diag([1.0, 1.0, 0.0])
    found = np.zeros(3)
    for _ in range(100):  # Newton's method
        share = 1 / (1 + np.exp(-np.clip(design @ found, -30, 30)))
        slope = design.T @ (share - faster) / len(x) + ridge @ found
        hessian = (design.T * (share * (1 - share))) @ design / len(x) + ridge + 1e-12 * np.eye(3)
        step = np.linalg.solve(hessian, slope)
        found -= step / max(1.0, float(np.abs(step).max()))
        if np.abs(step).max() < 1e-9:
            break
    new, miss = (found[:2] / spread).tolist()
    return Boundary(new, miss, float(found[2] - (found[:2] / spread) @ middle))


def fitted(boundary: Boundary) -> Pick:
    """Returns a rule that picks the ring that a fitted line says is faster (appendix D)."""
    return lambda times, work, seconds: (
        "pass_kv" if boundary(work.cached, work.tokens) > 0 else "pass_q"
    )


def equal_miss(heads: Heads) -> float:
    """Share of new tokens at which queries are as long as keys and values (Eq. 1)."""
    return heads.kv_bytes / heads.query_bytes


def hides_pass_kv(times: ExchangeTimes, tokens: int) -> bool:
    """Returns whether attention of `tokens` new tokens lasts as long as the hops of pass-KV,
    whatever is cached (Eq. 2)."""
    heads = times.heads
    rates = times.rates
    return (
        tokens * 4 * heads.heads * heads.head_dim * rates.hop.bytes_per_s
        >= times.lanes * rates.flops_per_s * heads.kv_bytes
    )


def hides_pass_q(times: ExchangeTimes, context: int) -> bool:
    """Returns whether attention lasts as long as the hops of pass-Q, by the length of the whole
    context (Eq. 3)."""
    rates = times.rates
    return context * 4 * rates.hop.bytes_per_s >= times.lanes * times.heads.item * rates.flops_per_s
