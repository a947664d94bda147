"""Policies: the order in which prompts are prefilled.

A policy is one object and one row of `POLICIES`, from which the settings take their choices. Its
`rank` gives the order of the next step, its `forecast` the order in which the prompts that wait
now will have been prefilled in the end, by which admission control predicts first tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np

# multiple of its TTFT budget after which a late request no longer waits for those in time
PATIENCE = 8.0
# added to the key of a forecast, in seconds: the prompt goes behind all others, whatever their size
LAST = 1e14
Numbers = TypeVar("Numbers", float, np.ndarray)
UNKNOWN = np.empty(0)


class PromptView(NamedTuple):
    """The prompts that wait or are partly prefilled, as a policy sees them. Arrays are [n]: first
    the partly prefilled prompts, then those that wait, each by age."""

    now: float  # clock seconds
    arrival: np.ndarray  # clock seconds
    deadline: np.ndarray  # clock seconds at which the first token is due
    work: np.ndarray  # predicted seconds of the rest of the prefill
    # [0] where the caller does not know them
    tokens: np.ndarray = UNKNOWN  # of the prompt, and of what was put out before a preemption
    priority: np.ndarray = UNKNOWN  # as requested; smaller is more urgent
    class_index: np.ndarray = UNKNOWN  # place of the request's class in `class_names`
    class_names: tuple[str | None, ...] = ()  # None: requests that name no class
    tenant: np.ndarray = UNKNOWN  # number of the request's tenant, see scheduling.shares
    turn: np.ndarray = UNKNOWN  # of the tenant: its prompts go before those of a later turn

    def at(self, places: np.ndarray | slice) -> PromptView:
        """Returns the view of the prompts at these places [m], in their order."""
        return self._replace(
            arrival=self.arrival[places],
            deadline=self.deadline[places],
            work=self.work[places],
            tokens=self.tokens[places] if len(self.tokens) else UNKNOWN,
            priority=self.priority[places] if len(self.priority) else UNKNOWN,
            class_index=self.class_index[places] if len(self.class_index) else UNKNOWN,
            tenant=self.tenant[places] if len(self.tenant) else UNKNOWN,
            turn=self.turn[places] if len(self.turn) else UNKNOWN,
        )

    @property
    def relative_slack(self) -> np.ndarray:
        """Slack of each as a share of its TTFT budget [n], see `relative_slack`."""
        return relative_slack(self.now, self.arrival, self.deadline, self.work)


Key = Callable[[PromptView], np.ndarray]


def relative_slack(now: float, arrival: Numbers, deadline: Numbers, work: Numbers) -> Numbers:
    """Slack as a share of the TTFT budget, (deadline - now - work) / (deadline - arrival): 1 with
    all time left, below 0 where it is too late (Medha, Eq. 7)."""
    return (deadline - now - work) / np.maximum(deadline - arrival, 1e-9)


class Policy:
    """An order of prefill.

    Both functions give a key per prompt [n] of a `PromptView`; the smallest goes first, and of
    equal ones the older prompt.

    help: what goes first, for the help of settings. rank: the order of the next step. forecast: the
    order in the end, as far as it is known now; keys are compared among prompts of similar size,
    as much shorter ones may share a long one's steps, but those near `LAST` go behind prompts
    of any size. It is `rank` by default, which is right for keys that do not change with time, such
    as those made of arrival or tokens. by_deadlines: whether a prompt that would be late may go
    before the rest of a step that has begun, see `scheduling.interruption`.
    """

    def __init__(
        self, help: str, rank: Key, forecast: Key | None = None, by_deadlines: bool = False
    ):
        self.help = help
        self.rank = rank
        self.forecast = forecast or rank
        self.by_deadlines = by_deadlines

    def order(self, view: PromptView) -> np.ndarray:
        """Returns a key per prompt [n] of the next step: `rank`, within the turns of tenants."""
        return in_turn(self.rank(view), view.turn)


def in_turn(key: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Returns a key [n] by which the smallest `turn` [n or 0] goes first, and in each turn the
    smallest `key` [n]: that itself where all have the same turn."""
    if not turn.size or (turn == turn[0]).all():
        return key
    places = np.empty(len(key))
    places[np.lexsort((key, turn))] = np.arange(len(key))
    return places


def by_deadline(view: PromptView) -> np.ndarray:
    """Ranks by deadline: the order in which policies that look at deadlines end up, as long as
    there is time."""
    return view.deadline


def demoting_late(view: PromptView) -> np.ndarray:
    """Ranks by relative slack (Medha 4.2, Eq. 7), with late requests behind those in time: a long
    request, whose budget is large, and a short one are equally urgent.

    A request that can no longer be in time is ranked by its slack against twice the budget, then
    four times, and so on. Once it needs `PATIENCE` times its budget it goes first, so that nothing
    starves.
    """
    relative = view.relative_slack
    if not relative.size or relative.min() >= 0:
        return relative
    need = 1 - relative  # multiples of the budget until the first token
    against, _ = np.frexp(need)  # need over the next power of two, in [1/2, 1)
    late = np.where(need < PATIENCE, 2 - against, -need)
    return np.where(relative >= 0, relative, late)


def late_apart(view: PromptView, shift: float) -> np.ndarray:
    """Ranks by deadline; prompts that can no longer be in time come `shift` seconds later."""
    left = view.deadline - view.now
    return np.where(left < view.work, left + shift, left)


POLICIES: dict[str, Policy] = {
    "fcfs": Policy("first come, first served", lambda view: view.arrival),
    "edf": Policy("earliest deadline first", by_deadline, by_deadlines=True),
    "llf": Policy(
        "least slack in seconds",
        lambda view: view.deadline - view.now - view.work,
        by_deadline,
        by_deadlines=True,
    ),
    "relative-slack": Policy(
        "least slack as a share of the time to the deadline",
        lambda view: view.relative_slack,
        lambda view: late_apart(view, -LAST),  # before those in time
        by_deadlines=True,
    ),
    "slack": Policy(
        "the same, but prompts that can no longer be in time make way for those that can",
        demoting_late,
        lambda view: late_apart(view, LAST),  # behind all others
        by_deadlines=True,
    ),
}
