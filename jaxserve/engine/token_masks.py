"""Masks of the tokens that guided sequences of a batch may sample.

A batch is issued before the tokens of the one before it are read, but what a guided sequence may
say depends on its last token. So the forward pass of a batch runs ahead as ever, and only its
sampling waits until the guides have heard of all tokens before: the masks are made while the
devices compute. Nothing is issued behind a batch that waits, so at most the newest one does.

Behind proposed tokens the masks are those that follow them, should they turn out to be right.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxserve.api.errors import RequestError
from jaxserve.api.request import LookAhead
from jaxserve.scheduling import Batch, Scheduler
from jaxserve.scheduling.batch_reader import Events


def behind(batch: Batch, unread: Iterable[Batch]) -> bool:
    """Returns whether tokens of sequences that the batch samples for are in batches that were not
    read yet."""
    mine = batch.seq[batch.sample]
    return any(np.isin(mine, other.seq[other.sample]).any() for other in unread)


def masks(
    scheduler: Scheduler, batch: Batch, place: np.ndarray, shape: tuple[int, int, int], now: float
) -> tuple[np.ndarray, Events]:
    """Makes bits [lanes, S, words] of the tokens that may be sampled, all of them for sequences
    without a guide; and the ends of those whose guide cannot be followed. place [n]: where each
    chunk's token is among its lane's S."""
    out = np.full(shape, -1, np.int32)
    events = []
    ahead: dict[int, LookAhead] = {}
    for row in np.flatnonzero(batch.sample).tolist():
        number = int(batch.seq[row])
        matcher = scheduler.sequences[number].matcher
        if matcher is None or not scheduler.alive(number):
            continue
        mask = out[batch.lane[row], place[row]]
        if row in batch.drafts:
            if number not in ahead:
                ahead[number] = matcher.ahead()
            ahead[number].fill(int(batch.tokens[row - batch.drafts.start]), mask)
            continue
        try:
            matcher.fill(mask)
        except RequestError as error:
            events += scheduler.fail(number, now, error)
    return out, events
