"""Cross-validates fits to measured steps: each step's error is that of a fit to other steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

FOLDS = 3  # into which the steps are divided
Step = TypeVar("Step")


class GroupedStep(Protocol):
    """A measured step of groups of lanes that meet by an exchange."""

    @property
    def exchange(self) -> str: ...
    @property
    def group_size(self) -> int: ...


def errors_of_unseen(
    steps: Sequence[Step], trained: Callable[[Sequence[Step]], Callable[[Step], float]]
) -> list[float]:
    """Returns each step's relative error under what is trained on the other folds. Points of one
    exchange and group follow each other, so that a fold has some of all. trained: returns the
    error of a step, trained on some."""
    errors = [0.0] * len(steps)
    for fold in range(FOLDS):
        others = [step for index, step in enumerate(steps) if index % FOLDS != fold]
        error = trained(others or steps)
        for index in range(fold, len(steps), FOLDS):
            errors[index] = abs(error(steps[index]))
    return errors


def mean_by_group(
    steps: Sequence[GroupedStep], errors: Sequence[float]
) -> dict[tuple[str, int], float]:
    """Returns the mean of the steps' errors by exchange and size of group."""
    groups: dict[tuple[str, int], list[float]] = {}
    for step, error in zip(steps, errors):
        groups.setdefault((step.exchange, step.group_size), []).append(error)
    return {pair: float(np.mean(found)) for pair, found in sorted(groups.items())}
