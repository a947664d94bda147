"""Events of a replica, published once for all subscribers.

The scheduler and the replica around it publish; metrics, the journal, the admission controller,
the predictor's correction and benchmarks subscribe. Handlers run at once, on the publisher's
thread, in the order in which they subscribed: they must be short and must not publish. Events are
per step or per request, never per token: a step over 256 sequences is a handful of calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from jaxserve.api.batch import Batch
from jaxserve.api.errors import RequestError
from jaxserve.api.events import Finished
from jaxserve.api.request import Request
from jaxserve.scheduling.sequence import Sequence

E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sequence got a slot."""

    sequence: Sequence
    slot: int


@dataclass(frozen=True, slots=True)
class BatchPacked:
    """The scheduler made a batch. backlog_before: predicted seconds of prefill that were left to do
    before it."""

    batch: Batch
    backlog_before: float


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A sequence got its first token, or its prompt's embedding, at clock second `now`. of_request:
    the first completion of its request to get one; ttft_deadline: when it was due."""

    sequence: Sequence
    now: float
    of_request: bool
    ttft_deadline: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a batch were read. slots [n]: those that got one; further [m]: the slots of
    those that came with it because proposed ones were right, each as often. sampled: how many were
    sampled for sequences that still run, damaged and further ones included; ended: completions that
    ended by them."""

    batch: Batch
    slots: np.ndarray
    further: np.ndarray
    sampled: int
    ended: int
    now: float


@dataclass(frozen=True, slots=True)
class DraftsChecked:
    """Proposed tokens of a batch were checked. right [m]: whether each of them, and those before it
    of its sequence, are what was sampled; in the order of `batch.drafts`."""

    batch: Batch
    right: np.ndarray


@dataclass(frozen=True, slots=True)
class CompletionEnded:
    """A completion ended. ttft_deadline (clock seconds) and tpot (seconds per token) are the
    objectives of its request. of_request: the ends of all its completions where this was the last
    one, else empty. had_token: whether any of them got a token."""

    request: Request
    event: Finished
    ttft_deadline: float
    tpot: float
    of_request: tuple[Finished, ...]
    had_token: bool


@dataclass(frozen=True, slots=True)
class Rejected:
    """A request was refused, for this reason (see observe.metric_rows.REJECTIONS)."""

    reason: str
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class StepIssued:
    """A step was handed to the devices, from clock second `now` on. exchanges: by which
    sequences on several lanes meet in it. Host seconds: to decide what is in it, to
    write its command, and to dispatch that."""

    batch: Batch
    command: Any  # engine.command.StepCommand; None in a simulation
    now: float
    exchanges: tuple[str, ...] = ()
    schedule: float = 0.0
    build: float = 0.0
    dispatch: float = 0.0


@dataclass(frozen=True, slots=True)
class StepRead:
    """A step's tokens were read at clock second `now`. seconds: since the step before it was read,
    or since it was issued where that was later; comparable: whether that is what the predictor
    speaks of (no program was compiled meanwhile)."""

    batch: Batch
    now: float
    seconds: float
    comparable: bool


@dataclass(frozen=True, slots=True)
class StepFinished:
    """The scheduler took a step's tokens and callers were notified. Host seconds of both."""

    batch: Batch
    finish: float
    notify: float


@dataclass(frozen=True, slots=True)
class StepsLost:
    """No step in flight will be read: one of them failed."""


class EventBus:
    """Subscribers by kind of event."""

    def __init__(self) -> None:
        self._handlers: dict[type, list[Callable[[Any], None]]] = defaultdict(list)

    def subscribe(self, kind: type[E], handler: Callable[[E], None]) -> None:
        """Calls `handler` with every event of exactly this kind from now on."""
        self._handlers[kind].append(handler)

    def unsubscribe(self, kind: type[E], handler: Callable[[E], None]) -> None:
        """Ends a subscription. Errors: ValueError without one."""
        self._handlers[kind].remove(handler)

    def has_subscribers(self, kind: type) -> bool:
        """Returns whether events of this kind have a subscriber: else none need be made."""
        return bool(self._handlers.get(kind))

    def publish(self, event: object) -> None:
        """Passes an event to its subscribers."""
        for handler in self._handlers.get(type(event), ()):
            handler(event)
