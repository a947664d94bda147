"""The prefill part of one step, while it is packed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxserve.scheduling.budget import StepBudget
from jaxserve.scheduling.sequence import Sequence
from jaxserve.settings.schema import SchedulerConfig


class PrefillChunk(NamedTuple):
    """Tokens `start` to before `stop` of a prompt, which have pages and go into the batch."""

    slot: int
    start: int
    stop: int
    admitted: bool  # the sequence got its slot in this step
    group_size: int  # lanes that meet, see Batch
    dealt: range | None = None  # lanes that compute it, where these are not all that meet


@dataclass(slots=True)
class PrefillStep:
    """The state of the step, and the chunks that it has so far."""

    config: SchedulerConfig
    now: float  # clock seconds
    budget: StepBudget
    reserve: int  # pages that are kept for decodes
    pending: list[float]  # seconds of prefill that each lane has to do
    chunks: list[PrefillChunk] = field(default_factory=list)
    # lanes over which chunks are dealt, by number of the sequence, where a plan of the step says so
    dealt: dict[int, range] = field(default_factory=dict)
    # lanes of which one is to be home, by number of the sequence, where some are better than others
    homes: dict[int, range] = field(default_factory=dict)
    out_of_pages: bool = False  # a sequence that is partly prefilled found no page

    def open_lanes_for(self, sequence: Sequence) -> list[int]:
        """Returns the lanes that can take more tokens, of those that may be the sequence's home;
        of all lanes, where none of these can."""
        lanes = [lane for lane, left in enumerate(self.budget.tokens_left) if left]
        homes = self.homes.get(sequence.number)
        if homes is None:
            return lanes
        return [lane for lane in lanes if lane in homes] or lanes

    def count_pending(self, sequence: Sequence, lanes: Iterable[int]) -> None:
        """Counts what is left of a prompt as work of each lane that will take part: all that are
        part of its plan, until that has ended; `lanes` where it has none (Medha 4.3)."""
        for lane in sequence.plan[-1].lanes if sequence.plan else lanes:
            self.pending[lane] += sequence.prefill_seconds_left

    def seconds_left(self, sequence: Sequence, start: int) -> float:
        """Predicts seconds of a prompt's prefill from token `start` on, as it is planned."""
        chunk = self.config.chunk_tokens
        predictor = self.budget.predictor
        if not sequence.plan:
            return predictor.prefill(start, sequence.prefill_len, chunk)
        seconds = 0.0
        for part in sequence.plan:
            seconds += predictor.prefill_on(len(part.lanes), start, part.stop, chunk)
            start = max(start, part.stop)
        return seconds
