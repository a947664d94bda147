"""Steps that hang or fail: how long the devices may hold the loop, and what callers hear of a step
that failed."""

from __future__ import annotations

from jaxserve.api.errors import RequestError
from jaxserve.engine.command import WorkersLost
from jaxserve.scheduling import Batch

STARTING_ANEW = "the workers start anew: send the request again in a moment"
SLOW = 10  # times its predicted seconds that a step may take in any case
FAULTS = 3  # failed steps in a row, with none that was read, after which the engine gives up


class Watchdog:
    """Detects hung steps: `watch(batch)` before blocking on a device, `clear()` after it,
    `success()` once tokens were read. Written by the engine's thread; `overdue()` takes no lock."""

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._held: tuple[Batch, float] | None = None  # until which clock second
        self._faults = 0  # in a row

    def watch(self, batch: Batch, now: float) -> None:
        """Begins to watch: the loop issues a batch, or waits for it."""
        self._held = batch, now + max(SLOW * batch.seconds, self._timeout)

    def clear(self) -> None:
        """Ends the watch: the devices gave the loop back."""
        self._held = None

    def success(self) -> None:
        """Ends the watch; failures before it no longer count."""
        self._held = None
        self._faults = 0

    def overdue(self, now: float) -> float | None:
        """Seconds by which the devices should have given the loop back; None where that is not
        so."""
        held = self._held
        return None if held is None or now <= held[1] else now - held[1]

    def failed(self) -> Batch | None:
        """The batch that failed; None where there is none, or where too many did."""
        self._faults += 1
        held = self._held
        self._held = None
        return None if held is None or self._faults >= FAULTS else held[0]


def lost_error(error: WorkersLost) -> RequestError:
    """What the callers hear whose requests end because workers are lost."""
    return RequestError("", f"{error}; {STARTING_ANEW}", "UNAVAILABLE", reason="workers")


def request_error(error: Exception) -> RequestError:
    """Makes of an error of the devices what callers hear."""
    if "RESOURCE_EXHAUSTED" in str(error):
        return RequestError(
            "", "the devices ran out of memory in a step", "RESOURCE_EXHAUSTED", reason="memory"
        )
    return RequestError("", "a step failed on the devices; the server's log tells more", "INTERNAL")
