"""The order in which sequences are prefilled: one function per policy.

A policy returns a key per sequence; the smallest goes first, and of equal ones the older sequence.
Keys are computed before every step, of all sequences that wait or are partly prefilled, from
arrays [n]: clock seconds of their arrival, clock seconds at which their first token is due, and
predicted seconds of the rest of their prefill (`work`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

# multiple of its TTFT budget after which a late request no longer waits for those in time
PATIENCE = 8.0
Numbers = TypeVar("Numbers", float, np.ndarray)
Policy = Callable[[float, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def fcfs(now: float, arrival: np.ndarray, due: np.ndarray, work: np.ndarray) -> np.ndarray:
    """First come, first served."""
    return arrival


def edf(now: float, arrival: np.ndarray, due: np.ndarray, work: np.ndarray) -> np.ndarray:
    """Earliest deadline first."""
    return due


def llf(now: float, arrival: np.ndarray, due: np.ndarray, work: np.ndarray) -> np.ndarray:
    """Least laxity first: by slack in seconds, the time that is left to the deadline once the work
    is done."""
    return due - now - work


def slack(now: float, arrival: np.ndarray, due: np.ndarray, work: np.ndarray) -> np.ndarray:
    """Least relative slack first (the papers' LRS): slack as a share of the TTFT budget, so that a
    long request, whose budget is large, and a short one are equally urgent (Medha 4.2, Eq. 7).

    A request that can no longer be in time goes behind those that can, by its slack against twice
    the budget, then four times, and so on. Once it needs `PATIENCE` times its budget it goes first,
    so that nothing starves.
    """
    relative = relative_slack(now, arrival, due, work)
    if not relative.size or relative.min() >= 0:
        return relative
    need = 1 - relative  # multiples of the budget until the first token
    against, _ = np.frexp(need)  # need over the next power of two, in [1/2, 1)
    late = np.where(need < PATIENCE, 2 - against, -need)
    return np.where(relative >= 0, relative, late)


def relative_slack(now: float, arrival: Numbers, due: Numbers, work: Numbers) -> Numbers:
    """Slack as a share of the TTFT budget, (due - now - work) / (due - arrival): 1 with all time
    left, below 0 where it is too late (Medha, Eq. 7)."""
    return (due - now - work) / np.maximum(due - arrival, 1e-9)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "edf": edf, "llf": llf, "slack": slack}
