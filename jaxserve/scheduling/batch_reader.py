"""Turns the results of a batch into events: tokens, progress of prompts, ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxserve.api.batch import Batch
from jaxserve.api.errors import RequestError
from jaxserve.api.events import Event, Finished, Logprobs, Progress, Token
from jaxserve.cache import CacheManager
from jaxserve.scheduling.events import DraftsChecked, EventBus, Tokens
from jaxserve.scheduling.prefill_times import PrefillTimes
from jaxserve.scheduling.request_table import RequestTable
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slots import ENDED, SlotTable

Events = list[tuple[str, Event]]  # request id, event
NOT_FINITE = RequestError("", "the model's logits were not finite", "INTERNAL")
NO_SLOTS = np.empty(0, np.intp)
NO_EMBEDDING = RequestError("", "the prompt's embedding was not finite", "INTERNAL")


class StepResults(NamedTuple):
    """Results of the devices for a batch of n chunks.

    A negative token stands for logits that were not finite, and ends its completion with an error,
    as does an embedding that is not finite; its blocks serve no other.
    """

    tokens: np.ndarray  # [n] sampled ids, which count where `batch.sample`
    logprobs: list[Logprobs | None] | None = None  # per chunk, of its sampled token
    # by number of the sequence: of the prompt's tokens from position `start + 1` on
    prompt_logprobs: Mapping[int, list[Logprobs]] = {}
    # by number of the sequence: of embedded prompts that end in the batch, [D]; none in simulations
    embeddings: Mapping[int, np.ndarray] = {}


class BatchReader:
    """Reads one batch after another; what belongs to sequences that have ended is dropped."""

    def __init__(
        self,
        cache: CacheManager,
        slots: SlotTable,
        requests: RequestTable,
        times: PrefillTimes,
        bus: EventBus,
    ):
        self.cache = cache
        self.slots = slots
        self.requests = requests
        self.times = times
        self.bus = bus

    def read(self, batch: Batch, results: StepResults, now: float) -> Events:
        """Returns the events of a batch that was read at clock second `now`."""
        live = self.slots.phase[batch.slot.astype(np.intp)] != ENDED
        counts = live
        if batch.drafts:
            right = _right(batch, np.asarray(results.tokens))
            self._take_back(batch, right)
            counts = live & right
        self._publish_decoded(batch, live)
        if results.prompt_logprobs:
            self._note_prompt_logprobs(batch, live, results.prompt_logprobs)
        events = self._progress(batch, live, now, results.embeddings)
        return events + self._sampled(batch, counts, results, now)

    def _take_back(self, batch: Batch, right: np.ndarray) -> None:
        """Takes back the positions of proposed tokens that are not `right` [n]."""
        rows = np.array(batch.drafts)
        slots, place = np.unique(batch.slot[rows], return_inverse=True)
        wrong = np.bincount(place, ~right[rows]).astype(np.int32)
        self.slots.take_back(slots, wrong)
        self.bus.publish(DraftsChecked(batch, right[rows]))

    def _publish_decoded(self, batch: Batch, live: np.ndarray) -> None:
        """Publishes the blocks that decodes filled, now that all their tokens were read."""
        decodes = np.count_nonzero(batch.is_decode)  # come first
        size = self.cache.block_size
        for row in (batch.start[:decodes] % size == size - 1).nonzero()[0].tolist():
            if live[row]:
                self._publish_last(int(batch.slot[row]), int(batch.start[row]) + 1)

    def _publish_last(self, slot: int, tokens: int) -> None:
        """Publishes the last block of a slot's first tokens, which fill it."""
        blocks = tokens // self.cache.block_size
        self.cache.publish(slot, blocks - 1, blocks, self.slots.by_slot[slot].block_hashes)

    def _note_prompt_logprobs(
        self, batch: Batch, live: np.ndarray, entries: Mapping[int, list[Logprobs]]
    ) -> None:
        for row in np.flatnonzero(live & np.isin(batch.seq, list(entries))).tolist():
            self.slots.by_slot[batch.slot[row]].note_prompt_logprobs(
                int(batch.start[row]), entries[int(batch.seq[row])]
            )

    def _progress(
        self, batch: Batch, live: np.ndarray, now: float, embeddings: Mapping[int, np.ndarray]
    ) -> Events:
        """Returns how far prompts are, and the ends of those that are embedded."""
        events: Events = []
        if np.count_nonzero(batch.sample) == batch.sample.size:
            return events
        for row in (live & ~batch.sample).nonzero()[0].tolist():
            sequence = self.slots.by_slot[batch.slot[row]]
            if sequence.output or (sequence.quiet and not sequence.request.embed):
                continue
            done = int(batch.start[row] + batch.length[row])
            event: Event
            if sequence.request.embed and done == sequence.prefill_len:
                event = self._embedded(sequence, embeddings.get(sequence.number), now)
            else:
                ttft = self.times.running(sequence, done, now)
                event = Progress(sequence.index, done, sequence.prefill_len, ttft)
            events.append((sequence.id, event))
        return events

    def _embedded(self, sequence: Sequence, embedding: np.ndarray | None, now: float) -> Finished:
        """Ends a sequence whose prompt is computed."""
        if embedding is not None and not np.isfinite(embedding).all():
            self.cache.retract(sequence.slot)
            return self.requests.end(sequence, "error", now, NO_EMBEDDING)
        self.requests.note_first_token(sequence, now)
        sequence.first_token_at = now
        return self.requests.end(sequence, "stop", now, embedding=embedding)

    def _sampled(
        self, batch: Batch, counts: np.ndarray, results: StepResults, now: float
    ) -> Events:
        """Returns the sampled tokens of the rows that count [n], and the ends of completions whose
        last ones they are."""
        rows = (counts & batch.sample).nonzero()[0]
        slots = batch.slot[rows]
        with_token = slots[~np.isin(rows, batch.drafts)] if batch.drafts else slots
        further: list[int] = []
        number = 0
        ended = 0
        by_slot = self.slots.by_slot
        logprobs = results.logprobs
        sampled = np.asarray(results.tokens)[rows].tolist()
        events: Events = []
        drafts = batch.drafts
        for row, slot, token in zip(rows.tolist(), slots.tolist(), sampled):
            proposed = bool(drafts) and row in drafts
            if proposed and not self._goes_on(batch, row, slot):
                continue
            number += 1
            sequence = by_slot[slot]
            if token < 0:
                self.cache.retract(slot)
                if not proposed:
                    with_token = with_token[with_token != slot]
                end = self.requests.end(sequence, "error", now, NOT_FINITE)
                events.append((sequence.id, end))
                ended += 1
                continue
            if proposed:
                further.append(slot)
                sequence.without_gap += 1
            if not sequence.quiet:
                event = Token(sequence.index, token, logprobs[row] if logprobs else None)
                events.append((sequence.id, event))
            if sequence.first_token_at is None:
                self.requests.note_first_token(sequence, now)
            try:
                reason = sequence.append_token(token, now)
                error = None
            except RequestError as fault:
                reason = "error"
                error = fault
            if reason:
                events.append((sequence.id, self.requests.end(sequence, reason, now, error)))
                ended += 1
        others = np.array(further, np.intp) if further else NO_SLOTS
        self.bus.publish(Tokens(batch, with_token, others, number, ended, now))
        return events

    def _goes_on(self, batch: Batch, row: int, slot: int) -> bool:
        """Publishes the block that a proposed token filled, which is part of its sequence now.
        False where the sequence has ended with a token before it."""
        slots = self.slots
        if slots.number[slot] != batch.seq[row] or slots.phase[slot] == ENDED:
            return False
        stop = int(batch.start[row]) + 1
        if stop % self.cache.block_size == 0:
            self._publish_last(slot, stop)
        return True


def _right(batch: Batch, tokens: np.ndarray) -> np.ndarray:
    """Marks rows [n] of which the token is part of its sequence: all but those of proposed tokens
    that are not what was sampled before them. tokens [n]: sampled after each row."""
    right = np.ones(len(batch.slot), bool)
    for row, before, token in zip(
        batch.drafts, batch.before_drafts.tolist(), batch.tokens.tolist()
    ):
        right[row] = right[before] and tokens[before] == token
    return right
