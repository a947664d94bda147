"""The spread of step times around their prediction, for simulations: schedulers and planners know
predictions alone, and what steps then take is drawn."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.settings.schema import ConfigError

# Sigma of served decode steps around our prediction, one engine and mesh at a time, pooled over
# 351 points of H100 (aiconfigurator); `python -m experiments.profiles.noise` prints it.
SERVED = 0.13
# Sigma of a layer's kernels when they are repeated (Vidur, A100 and H100); printed by the same.
REPEATED = 0.02


@dataclass(frozen=True)
class Noise:
    """Spread of step times: a step takes its prediction times a lognormal factor of mean 1.

    sigma: standard deviation of the factor's logarithm; 0: steps take what is predicted. seed: of
    the draws."""

    sigma: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks sigma. Errors: ConfigError."""
        if not 0 <= self.sigma <= 1:
            raise ConfigError("noise", f"must be from 0 to 1, not {self.sigma}")

    def of(self, number: int) -> Noise:
        """Returns the same spread with draws of its own, for one of several servers."""
        return Noise(self.sigma, self.seed * 2**16 + number)

    def draws(self) -> Callable[[], float]:
        """Returns a function that draws the factor of one step after another."""
        if not self.sigma:
            return lambda: 1.0
        drawn = random.Random(self.seed)
        mean = -(self.sigma**2) / 2
        return lambda: math.exp(drawn.gauss(mean, self.sigma))


NO_NOISE = Noise()
