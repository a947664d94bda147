"""What runs next: batches of chunks out of requests, with four verbs and time as an argument.

A request is `add`ed and waits. `start` makes a batch: every decoding sequence, then prefill chunks
of the oldest sequences, as far as the budget of each lane, the slots and the pages go. The device
runs batches in the order they were started; `finish` takes the sampled tokens of the oldest one and
turns them into events. `cancel` (and `expire`, for deadlines) ends what is not wanted any more.
Several batches may be in flight; a sequence's slot and pages are given back when no batch in flight
contains it.

Imports cache, request and config only; knows no text, no device and no threads.
"""

from jaxserve.api.batch import Batch
from jaxserve.scheduling.scheduler import Load, Scheduler

__all__ = ["Batch", "Load", "Scheduler"]
