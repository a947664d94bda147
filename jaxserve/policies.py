"""Policies: the order in which prompts are prefilled.

A policy is one object and one row of `POLICIES`, from which the settings take their choices. Its
`rank` gives the order of the next step, its `forecast` the order in which the prompts that wait
now will have been prefilled in the end, by which admission control predicts first tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np

# a late prompt is put off until this many times the longest line was prefilled since it came: by
# first come, first served the unluckiest prompt waits once that long
PATIENCE = 1.18
# more seconds than anything takes; added to the key of a forecast, it puts the prompt behind all
# others, whatever their size
LAST = 1e9
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
    # in predicted seconds of prefill, see `scheduling.prefill_line`
    passed: np.ndarray = UNKNOWN  # that were done since the prompt came
    longest: np.ndarray = UNKNOWN  # line that a prompt of its tenant found lately

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
            passed=self.passed[places] if len(self.passed) else UNKNOWN,
            longest=self.longest[places] if len(self.longest) else UNKNOWN,
        )

    @property
    def relative_slack(self) -> np.ndarray:
        """Slack of each as a share of its TTFT budget [n], see `relative_slack`."""
        return relative_slack(self.now, self.arrival, self.deadline, self.work)

    @property
    def waited(self) -> np.ndarray:
        """Seconds of prefill that each has waited for [n]; of the clock where these are not
        known."""
        return self.passed if len(self.passed) else self.now - self.arrival

    @property
    def patience(self) -> np.ndarray:
        """Seconds of prefill until each must have been prefilled, late or not [n]: what is left of
        `PATIENCE` times the longest line."""
        if not len(self.longest):
            return np.full(len(self.arrival), math.inf)
        longest = self.longest
        if not self.turn.size:  # what one finds that comes now
            longest = np.maximum(longest, self.work.sum())
        return PATIENCE * longest - self.waited


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


def sparing_late(view: PromptView) -> np.ndarray:
    """Ranks by relative slack (Medha 4.2, Eq. 7), with late requests behind those in time, by age:
    a long request, whose budget is large, and a short one are equally urgent.

    A late one is put off only while it can still have its turn within its `patience`. Then it goes
    first, so that nothing starves.
    """
    relative = view.relative_slack
    late = relative < 0
    if not late.any():
        return relative
    key = np.where(late, LAST - view.waited, relative)
    key[overdue(view, late)] -= 2 * LAST
    return key


def overdue(view: PromptView, late: np.ndarray, first: np.ndarray | float = 0.0) -> np.ndarray:
    """Returns which late prompts can be put off no longer [n] bool: those whose `patience` leaves
    no time for more than what came before them, and all that are older. None of later turns, which
    wait for the first one.

    late: [n] bool. first: seconds of prefill [n] that go before late prompts in any case.
    """
    found = np.zeros(len(late), bool)
    places = (view.turn == view.turn.min()).nonzero()[0] if view.turn.size else np.arange(len(late))
    places = places[np.argsort(-view.waited[places], kind="stable")]
    spare = view.patience[places] - np.cumsum(view.work[places])
    first = np.broadcast_to(first, late.shape)[places]
    younger = first.sum() - np.cumsum(first)
    out = (late[places] & (spare <= younger)).nonzero()[0]
    if out.size:
        found[places[: out[-1] + 1]] = True
    return found & late


def late_by_patience(view: PromptView) -> np.ndarray:
    """Ranks by deadline. Prompts that can no longer be in time come last, but those that cannot be
    put off for so long as if due when their patience ends."""
    left = view.deadline - view.now
    late = left < view.work
    if not late.any():
        return left
    before = overdue(view, late, np.where(late, 0.0, view.work))
    return np.where(before, view.patience, np.where(late, left + LAST, left))


def late_first(view: PromptView) -> np.ndarray:
    """Ranks by deadline; prompts that can no longer be in time go first."""
    left = view.deadline - view.now
    return np.where(left < view.work, left - LAST, left)


# with what it costs in an overload, simulated as docs/overload.md says
POLICIES: dict[str, Policy] = {
    "fcfs": Policy(
        "first come, first served: of prompts of 8 callers 6 % in time, P99 of TTFT 20 s",
        lambda view: view.arrival,
    ),
    "edf": Policy("earliest deadline first: 8 %, 23 s", by_deadline, by_deadlines=True),
    "llf": Policy(
        "least slack in seconds",
        lambda view: view.deadline - view.now - view.work,
        by_deadline,
        by_deadlines=True,
    ),
    "relative-slack": Policy(
        "least slack as a share of the time to the deadline: 7 %, 29 s",
        lambda view: view.relative_slack,
        late_first,
        by_deadlines=True,
    ),
    "slack": Policy(
        "the same, but prompts that can no longer be in time make way for those that can, until "
        f"{PATIENCE} times the longest line was prefilled: 41 %, 23 s; simulated, docs/overload.md",
        sparing_late,
        late_by_patience,
        by_deadlines=True,
    ),
}
