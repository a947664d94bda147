"""One completion of a request, from the queue to its end, and what is kept per slot while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jaxserve.cache.prefix import Chain
from jaxserve.request import Finished, Logprobs, Request, RequestError, Timing, Usage

EMPTY, PREFILL, DECODE, LEAVING, ENDED = range(5)     # phases of a slot; from LEAVING on nothing more is issued


class History:
    """The tokens of a sequence: the prompt's and those put out so far."""

    def __init__(self, prompt: np.ndarray):
        self.prompt = prompt
        self.output: list[int] = []

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)

    def __call__(self, first: int, last: int) -> np.ndarray:
        """Token ids [last - first] int32."""
        prompt = len(self.prompt)
        if last <= prompt:
            return self.prompt[first:last]
        output = np.array(self.output[max(first - prompt, 0):last - prompt], np.int32)
        return np.concatenate([self.prompt[first:], output]) if first < prompt else output


class Sequence:
    """One completion. Only the scheduler changes it.

    `limit` is the most tokens it may put out, `end` the most positions to compute: the last token is never fed. `target` is how many
    tokens were known when it was last queued: these are prefilled, and what is sampled after the last of them is fed on the device.
    """

    def __init__(self, number: int, index: int, request: Request, limit: int, stops: frozenset[int], root: tuple[bytes, int]):
        self.number, self.index, self.request, self.id = number, index, request, request.id
        self.limit, self.end, self.stops = limit, len(request.prompt) + limit - 1, stops
        self.history = History(request.prompt)
        self.output = self.history.output
        self.chain = Chain(*root, self.history)
        self.target = len(request.prompt)
        self.slot: int | None = None
        self.cached = 0
        self.started: float | None = None
        self.first: float | None = None
        wanted = request.sampling.prompt_logprobs is not None
        self.prompt_logprobs: list[Logprobs | None] | None = [None] * len(request.prompt) if wanted else None

    @property
    def reads_cache(self) -> bool:
        return not self.request.bypass_prefix_cache and self.prompt_logprobs is None

    def note_prompt_logprobs(self, start: int, entries: list[Logprobs]) -> None:
        """`entries` belong to the tokens after position `start`; told again after a preemption, they take the same places."""
        if self.prompt_logprobs is not None:
            entries = entries[:max(len(self.prompt_logprobs) - start - 1, 0)]
            self.prompt_logprobs[start + 1:start + 1 + len(entries)] = entries

    def stopped_by(self, token: int) -> bool:
        """Whether the token just put out ends the text."""
        return token in self.stops and len(self.output) >= self.request.sampling.min_tokens

    def finished(self, reason: str, now: float, error: RequestError | None = None) -> Finished:
        arrival = self.request.arrival
        started = now if self.started is None else self.started
        timing = Timing(started - arrival, (now if self.first is None else self.first) - arrival, now - arrival)
        usage = Usage(len(self.request.prompt), self.cached, len(self.output))
        logprobs = None if self.prompt_logprobs is None else tuple(self.prompt_logprobs)
        return Finished(self.index, reason, usage, timing, logprobs, error)


@dataclass(slots=True)
class Entry:
    """A request with completions that have not ended; `later` are those that wait for the first one's prefill."""

    request: Request
    number: int                                       # of its first sequence
    alive: dict[int, Sequence]                        # by index
    later: list[Sequence] = field(default_factory=list)


class Slots:
    """What every step needs to know of every running sequence, as arrays by slot: 256 of them cost a few numpy calls."""

    def __init__(self, count: int):
        self.phase = np.full(count, EMPTY, np.int8)
        self.number = np.full(count, -1, np.int64)
        self.issued = np.zeros(count, np.int32)       # positions that are part of a batch
        self.end = np.zeros(count, np.int32)
        self.flying = np.zeros(count, np.int32)       # batches in flight that contain it
        self.last = np.zeros(count, np.int64)         # batch it was last part of
        self.sequence: list[Sequence | None] = [None] * count
        self.free = list(range(count - 1, -1, -1))

    def enter(self, sequence: Sequence, issued: int) -> int:
        slot = self.free.pop()
        sequence.slot, self.sequence[slot] = slot, sequence
        self.phase[slot], self.number[slot], self.issued[slot], self.end[slot] = PREFILL, sequence.number, issued, sequence.end
        return slot

    def leave(self, slot: int) -> None:
        self.sequence[slot].slot, self.sequence[slot] = None, None
        self.phase[slot], self.number[slot] = EMPTY, -1
        self.free.append(slot)
