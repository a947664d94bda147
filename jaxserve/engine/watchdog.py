"""Steps that hang or fail: how long the loop may wait for the devices, and the errors of requests
whose step failed."""

from __future__ import annotations

from jaxserve.api.errors import RequestError
from jaxserve.engine.command import WorkersLost
from jaxserve.scheduling import Batch

RESTARTING = "the workers are restarting: send the request again in a moment"
SLOW = 10  # a step that takes less than this number of times its predicted seconds does not hang
FAULTS = 3  # failed steps in a row, with none read between, after which the engine gives up


class Watchdog:
    """Detects hung steps: `watch(batch)` before blocking on a device, None where that is the draft
    model's, `clear()` after it, `success()` once tokens were read. Written by the engine's thread;
    `overdue()` takes no lock."""

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._watched: tuple[Batch | None, float] | None = None  # and its latest clock second
        self._faults = 0  # in a row

    def watch(self, batch: Batch | None, now: float) -> None:
        """Begins to watch: the loop issues a batch, or waits for it; None: one is decided, with
        tokens of a draft model."""
        seconds = self._timeout
        if batch is not None:
            seconds = max(SLOW * batch.seconds, seconds)
        self._watched = batch, now + seconds

    def clear(self) -> None:
        """Ends the watch: the devices gave the loop back."""
        self._watched = None

    def success(self) -> None:
        """Ends the watch; failures before it no longer count."""
        self._watched = None
        self._faults = 0

    def overdue(self, now: float) -> float | None:
        """Seconds by which the step that the loop waits for is overdue; None where none is."""
        watched = self._watched
        if watched is None:
            return None
        _, latest = watched
        return now - latest if now > latest else None

    def failed(self) -> Batch | None:
        """Ends the watch after a failure. Returns the batch that failed; None where no batch was
        watched, or where FAULTS failed."""
        self._faults += 1
        watched = self._watched
        self._watched = None
        if watched is None or self._faults >= FAULTS:
            return None
        batch, _ = watched
        return batch


def lost_error(error: WorkersLost) -> RequestError:
    """Makes the error of requests that end because workers are lost."""
    return RequestError("", f"{error}; {RESTARTING}", "UNAVAILABLE", reason="workers")


def request_error(error: Exception) -> RequestError:
    """Makes the error of requests whose step failed on the devices."""
    if "RESOURCE_EXHAUSTED" in str(error):
        return RequestError(
            "", "the devices ran out of memory in a step", "RESOURCE_EXHAUSTED", reason="memory"
        )
    return RequestError("", "a step failed on the devices; see the server's log", "INTERNAL")
