"""Interface of drafters that have weights on a device: a draft model, or a draft head."""

from __future__ import annotations

from typing import Protocol

from jaxserve.drafts.drafter import Drafter
from jaxserve.engine.executor import CommandExecutor
from jaxserve.replica.registry import Registry
from jaxserve.replica.weights import WeightsHolder, WeightSource
from jaxserve.scheduling import Scheduler


class DeviceDrafter(Drafter, Protocol):
    """Proposes tokens by weights on a device. A fault of it or of its device ends its proposals,
    and nothing else. spent: seconds of the host in which it made tokens."""

    spent: float

    def follow(self, registry: Registry, scheduler: Scheduler, worker: CommandExecutor) -> None:
        """Draws by the seeds of these requests from now on, and sees what this worker computes for
        this scheduler."""

    def sleep(self) -> None:
        """Takes its weights and what it holds of sequences from the device; the weights go to host
        memory, whence `wake` brings them."""

    def wake(self) -> None:
        """Brings back what sleeps, if it does."""

    def close(self) -> None:
        """Ends what it began."""


class WeightsWithDraft(WeightsHolder):
    """Weights of a replica with a drafter, which sleeps and wakes with it; new weights are the
    replica's alone."""

    def __init__(self, own: WeightsHolder, draft: DeviceDrafter):
        self._own = own
        self._draft = draft

    def read(self, source: WeightSource) -> str:
        return self._own.read(source)

    def use(self) -> None:
        self._own.use()
        self._draft.wake()

    def forget(self) -> None:
        self._own.forget()

    def sleep(self, level: int) -> None:
        self._draft.sleep()
        self._own.sleep(level)

    def wake(self) -> None:
        self._own.wake()
        self._draft.wake()
