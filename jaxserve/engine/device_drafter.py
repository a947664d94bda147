"""Interface of drafters that have weights on a device, a draft model or a draft head, and what they
have in common."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from jaxserve.drafts.drafter import Drafted, Drafter, Offer
from jaxserve.engine.executor import CommandExecutor
from jaxserve.engine.sampling_rows import SamplingAdmission, admissions, fold_seed
from jaxserve.replica.registry import Registry
from jaxserve.replica.weights import WeightsHolder, WeightSource
from jaxserve.scheduling import Scheduler

NO_OFFER = Offer(0, 1)
NOTHING = np.empty(0, np.int32)


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


def admission_of(sequence: Drafted, place: int, registry: Registry) -> SamplingAdmission:
    """Makes a place sample as a sequence does, but for penalties and biases. registry: has the seed
    of its request."""
    request = sequence.request
    seed = fold_seed(registry[request.id].seed, sequence.index)
    (admission,) = admissions(request.sampling, 0, place, NOTHING, [], seed, ())
    return admission


def within(tokens: np.ndarray, vocab: int) -> np.ndarray:
    """Returns the tokens [n] before the first that a model with `vocab` ids does not have."""
    faulty = (tokens < 0) | (tokens >= vocab)
    return tokens[: int(np.argmax(np.append(faulty, True)))]
