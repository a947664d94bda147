"""Fits the forms of `jaxserve.costs.coefficients.Costs` by robust least squares of relative
errors.

A part is a matrix of inputs, one row per measured point, and its seconds. All forms but the smooth
maximum of the linear parts are sums, so their coefficients are found without a start; none is below
0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.optimize import least_squares, nnls

from jaxserve.costs.coefficients import LINEAR_POWER

FOLDS = 5  # of cross-validation
OUTLIER = 0.05  # relative error from which a point counts less than by its square
# inputs [points, coefficients], seconds [points] -> coefficients
Fit = Callable[[np.ndarray, np.ndarray], np.ndarray]
Form = Callable[[np.ndarray, np.ndarray], np.ndarray]  # coefficients, inputs -> seconds


def total(c: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The sum of all columns, each times its coefficient."""
    return x @ c


def fit_total(x: np.ndarray, seconds: np.ndarray, slack: float = 0.0) -> np.ndarray:
    """Coefficients of `total`. An error counts relative to `seconds + slack`: what lasts much less
    than `slack` hardly counts."""
    weight = _even(seconds) / (seconds + slack)
    scale = np.linalg.norm(x * weight[:, None], axis=0)
    scale[scale == 0] = 1.0
    robust = np.ones(len(seconds))
    c = np.zeros(x.shape[1])
    for _ in range(30):
        c = nnls(x / scale * (weight * robust)[:, None], seconds * weight * robust)[0] / scale
        error = (x @ c - seconds) / (seconds + slack)
        robust = (1 + (error / OUTLIER) ** 2) ** -0.25
    return c


def smooth_max_form(c: np.ndarray, x: np.ndarray, power: float = LINEAR_POWER) -> np.ndarray:
    """The norm of floor and use: the first half of the columns add up to the one, the second half
    to the other. power: of the norm; infinite for the greater of both."""
    half = x.shape[1] // 2
    return norm(x[:, :half] @ c[:half], x[:, half:] @ c[half:], power)


def norm(a: np.ndarray, b: np.ndarray, power: float) -> np.ndarray:
    """(a^power + b^power)^(1/power), none of which overflows."""
    most = np.maximum(np.maximum(a, b), 1e-300)
    if np.isinf(power):
        return most
    return most * ((a / most) ** power + (b / most) ** power) ** (1 / power)


def fit_smooth_max(x: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Coefficients of `smooth_max_form`, from those of the sum of both halves."""
    return fit_form(smooth_max_form, x, seconds, fit_total(x, seconds))


def fit_form(form: Form, x: np.ndarray, seconds: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Coefficients of a form that is no sum, found from `start`."""
    weight = _even(seconds)
    scale = 1 / np.maximum(
        np.linalg.norm(x / seconds[:, None], axis=0) / np.sqrt(len(seconds)), 1e-300
    )
    return (
        least_squares(
            lambda c: weight * (form(c * scale, x) / seconds - 1),
            np.maximum(start / scale, 1e-3),
            bounds=(0, np.inf),
            loss="soft_l1",
            f_scale=OUTLIER,
        ).x
        * scale
    )


def held_out(fit: Fit, form: Form, x: np.ndarray, seconds: np.ndarray) -> float:
    """Mean relative error of points that were not fitted, over five folds."""
    folds = np.arange(len(seconds)) % FOLDS
    errors = []
    for fold in range(FOLDS):
        kept = folds != fold
        errors.append(np.abs(form(fit(x[kept], seconds[kept]), x[~kept]) / seconds[~kept] - 1))
    return float(np.concatenate(errors).mean())


def mape(predicted: np.ndarray, seconds: np.ndarray, above: float = 0.0) -> float:
    """Mean relative error of the points that last longer than `above`; nan without any."""
    kept = seconds > above
    return float(np.abs(predicted[kept] / seconds[kept] - 1).mean()) if kept.any() else float("nan")


def _even(seconds: np.ndarray) -> np.ndarray:
    """Weights with which each factor of two in time counts the same, however many points it
    holds."""
    _, where, counts = np.unique(
        np.floor(np.log2(seconds)), return_inverse=True, return_counts=True
    )
    return np.sqrt(len(seconds) / len(counts) / counts[where])
