"""Stops an engine's loop for changes of weights, and has it begin again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from jaxserve.api.errors import RequestError
from jaxserve.engine.command import DeviceError, WorkersLost
from jaxserve.engine.steps import Steps
from jaxserve.engine.watchdog import lost_error, request_error
from jaxserve.replica.weights import Loop
from jaxserve.scheduling import Scheduler
from jaxserve.scheduling.batch_reader import Events

T = TypeVar("T")


class WeightLoop(Loop):
    """An engine's loop. run: see `exclusively_when_free`. now: the clock. notify: hands events to
    the sinks of their requests. changed: see `weights_changed`."""

    def __init__(
        self,
        scheduler: Scheduler,
        steps: Steps,
        run: Callable[[Callable[[], T]], T],
        now: Callable[[], float],
        notify: Callable[[Events], None],
        changed: Callable[[], None],
    ):
        self._scheduler = scheduler
        self._steps = steps
        self._run = run
        self._now = now
        self._notify = notify
        self._changed = changed

    def exclusively_when_free(self, work: Callable[[], T]) -> T:
        return self._run(work)  # type: ignore[arg-type, return-value]

    def end_begun(self, error: RequestError | None = None) -> None:
        reason = "cancelled" if error is None else "error"
        for id in self._scheduler.requests.begun():
            self._notify(self._scheduler.cancel(id, self._now(), reason, error=error))

    def begin_again(self) -> None:
        self._steps.lose(lambda sequence: False, RequestError("", "it goes on", "INTERNAL"))

    def weights_changed(self) -> None:
        self._changed()

    def reset_devices(self) -> None:
        try:
            self._steps.reset_devices()
        except DeviceError as error:
            raise request_error(error) from None
        except WorkersLost as lost:
            raise lost_error(lost) from None
