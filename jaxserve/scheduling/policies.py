"""In what order requests are prefilled: one function per policy, smallest first, recomputed before
every step.

A policy sees arrays over all sequences that wait or are partly prefilled: when they came, when
their first token is due, and how long the rest of their prefill will take. Ties go to the older
sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

PATIENCE = 8.0  # times what it was given that a request waits behind those that can be in time
Policy = Callable[[float, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def fcfs(now: float, arrival: np.ndarray, due: np.ndarray, work: np.ndarray) -> np.ndarray:
    """First come, first served."""
    return arrival


def edf(now: float, arrival: np.ndarray, due: np.ndarray, work: np.ndarray) -> np.ndarray:
    """Earliest deadline first."""
    return due


def llf(now: float, arrival: np.ndarray, due: np.ndarray, work: np.ndarray) -> np.ndarray:
    """Least laxity first: by slack in seconds, what is left of the time to the deadline once the
    work is done."""
    return due - now - work


def slack(now: float, arrival: np.ndarray, due: np.ndarray, work: np.ndarray) -> np.ndarray:
    """Least relative slack, the papers' LRS: slack as a share of all the time the request was given, so that a
    long request, which is given much, and a short one, which is given little, press alike (Medha
    4.2, Eq. 7).

    One that can no longer be in time makes way for those that can: its slack counts against as much
    time again, and twice that, behind all others. Once it needs `PATIENCE` times what it was given
    it goes first, so that nothing starves.
    """
    left = relative_slack(now, arrival, due, work)
    if not left.size or left.min() >= 0:
        return left
    need = 1 - left  # of the time it was given
    again, _ = np.frexp(need)  # need over a power of two, in [1/2, 1)
    return np.where(left >= 0, left, np.where(need < PATIENCE, 2 - again, -need))


def relative_slack(now: float, arrival: Any, due: Any, work: Any) -> Any:
    """(due - now - work) / (due - arrival), of arrays or numbers: 1 with all time left, below 0
    where it is too late (Medha, Eq. 7)."""
    return (due - now - work) / np.maximum(due - arrival, 1e-9)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "edf": edf, "llf": llf, "slack": slack}
