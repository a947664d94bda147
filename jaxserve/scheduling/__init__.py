"""The scheduler: makes batches of decodes and prefill chunks out of requests, with four verbs and
time as an argument.

A request is `add`ed and waits. `start` makes a batch: every decoding sequence, then prefill chunks
in the order of the policy, as far as the step's time, the slots and the pages go. The device runs
batches in the order they were started; `finish` takes the sampled tokens of the oldest one and
turns them into events. `cancel` (and `expire`, for deadlines) ends what is not wanted any more.
Several batches may be in flight; a sequence's slot and pages are given back when no batch in flight
contains it. Nothing here knows text, devices or threads.

    scheduler        Scheduler: the four verbs
    admission        AdmissionController: refuses requests that would be late, by `forecast`
    prefill_times    PrefillTimes: predicted and due first tokens
    request_table    RequestTable: live requests and how they end; `sequence`: one completion
    slots            SlotTable: running sequences, and `waiting_queue` those that wait;
                     `prefill_line` says how long, in seconds of prefill
    packing          BatchPacker: decodes, preemption, and the batch as arrays
    prefill_packing  PrefillPacker: prefill chunks, in the order of `prefill_order` and `policies`;
                     `prefill_chunks` finds where one would run, and gives it pages
    interruption     InterruptionRule: prompts for which a step is interrupted between its layers
    batch_reader     BatchReader: results of a batch as events
    fetches          Fetches: blocks brought from lower tiers instead of computed
    prefetch         QueuePrefetch: what waiting prompts will hit comes up from slower tiers
    page_admission   PageAdmission: whether there are pages for a waiting prompt
    pacing           Pacer: what a step may take, by when the tokens of decodes are due
    budget           StepBudget: tokens and seconds of a step, and how long a chunk may be
    pool             the control plane of a pool of KV over lanes (TokenLake)
"""

from jaxserve.api.batch import Batch
from jaxserve.scheduling.scheduler import Load, Scheduler

__all__ = ["Batch", "Load", "Scheduler"]
