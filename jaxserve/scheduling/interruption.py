"""Interrupts long steps between two groups of their layers, for prompts that would be late.

A long step need not hold up a prompt that could be in time: it is issued by groups of layers, and
between two of them the prompt's own step can run, after which the long one goes on. Whether it does
is decided here, by predicted times, for live and for virtual replicas: for prompts that would be
late after the step and are in time before its rest, as long as no token of the step becomes late by
that. (FlowPrefill, arXiv 2602.16603, stops prefill between operators, on replicas without decodes.)
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jaxserve.api.batch import Batch
from jaxserve.policies import POLICIES
from jaxserve.scheduling.pacing import Pacer
from jaxserve.scheduling.prefill_step import PrefillChunk
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slots import LEAVING, SlotTable
from jaxserve.scheduling.waiting_queue import smallest_first
from jaxserve.settings.schema import SchedulerConfig


@dataclasses.dataclass
class PartialStep:
    """A step of which some groups of layers are still to be issued. chunks: of its prompts; what
    they compute serves others once all groups are issued. issued: groups so far;
    interrupted_after: how many were issued when another step last ran before the rest."""

    batch: Batch
    chunks: list[PrefillChunk]
    groups: int
    issued: int = 1
    interrupted_after: int = 0

    @property
    def group_seconds(self) -> float:
        """Predicted seconds of one group."""
        return self.batch.seconds / self.groups

    @property
    def seconds_left(self) -> float:
        """Predicted seconds of the groups that are still to be issued."""
        return self.group_seconds * (self.groups - self.issued)


class InterruptionRule:
    """Decides which steps are issued by groups of layers, and which prompts interrupt them."""

    def __init__(self, config: SchedulerConfig, slots: SlotTable, pacer: Pacer):
        predictor = pacer.predictor
        self.config = config
        self.slots = slots
        self.pacer = pacer
        self.predictor = predictor
        self.policy = POLICIES[config.policy]
        # with several stages another batch is in each of them
        self.groups = predictor.costs.layer_groups if predictor.mesh.spp == 1 else 1

    def applies(self, batch: Batch) -> bool:
        """Returns whether a batch is issued by groups of layers: it has prompts, and each group
        takes longer than the host needs for the next decision. Not where it moves pages, which
        others could take before all layers have read them, and not while other replicas wait for
        blocks, which they get from each group as it runs."""
        if self.groups == 1 or not self.policy.by_deadlines or not batch.is_chunk.any():
            return False
        if len(batch.moves) or self.slots.cache.stores.wanted:
            return False
        seconds = batch.seconds / self.groups
        return seconds > self.predictor.early(seconds)

    def prompts(self, step: PartialStep, begins: float, now: float) -> list[Sequence]:
        """Returns the prompts that interrupt a step at clock second `now`, by rank; none directly
        after others did, so that it goes on. begins: seconds until the devices have run what is
        issued."""
        if step.interrupted_after == step.issued:
            return []
        slots = self.slots
        prompts = slots.prompts(now)
        start = now + begins
        urgent = start + prompts.work <= prompts.deadline
        urgent &= start + step.seconds_left + self._next_step(step, prompts.work) > prompts.deadline
        if not urgent.any():
            return []
        inside = set(step.batch.slot.tolist())
        sequences = [*slots.prefilling, *slots.queue]
        latest = start + self._spare(step, start)
        end = start
        chosen = []
        for place in smallest_first(np.where(urgent, self.policy.order(prompts), math.inf)):
            sequence = sequences[place]
            if not urgent[place]:
                break
            seconds = float(prompts.work[place])
            due = min(latest, float(prompts.deadline[place]))
            if sequence.slot not in inside and end + seconds <= due:
                chosen.append(sequence)
                end += seconds
                latest = due
        return chosen

    def _next_step(self, step: PartialStep, work: np.ndarray) -> np.ndarray:
        """Predicts seconds [n] of the step after this one, which prompts of `work` seconds [n]
        would share: what is left to do beside them, as far as a step goes."""
        return np.maximum(work, min(step.batch.seconds, self.slots.backlog))

    def _spare(self, step: PartialStep, start: float) -> float:
        """Returns the seconds by which a step may end later, so that no token of it becomes late
        that would be in time if the step went on at clock second `start`."""
        slots = self.slots
        batch = step.batch
        end = start + step.seconds_left
        spare = math.inf
        for row in np.flatnonzero(slots.phase[batch.slot] < LEAVING).tolist():
            sequence = slots.by_slot[int(batch.slot[row])]
            position = int(batch.start[row] + batch.length[row])
            left = self._due(sequence, position, bool(batch.sample[row]), start) - end
            if left >= 0:
                spare = min(spare, left)
        return spare

    def _due(self, sequence: Sequence, position: int, sampled: bool, now: float) -> float:
        """Returns the clock second at which a step must end that computes a sequence's tokens to
        before `position`: its next token is due then, or what is left of its prompt must begin."""
        later_tokens = position - len(sequence.request.prompt)
        if later_tokens > 0 and sampled:
            return self.pacer.due(sequence.slot, now)
        return sequence.ttft_deadline - sequence.prefill_seconds_left
