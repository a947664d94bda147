"""One completion of a request, from the queue to its end: its tokens, objectives and times."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from jaxserve.api.attainment import Promise, in_time
from jaxserve.api.errors import RequestError
from jaxserve.api.events import Finished, Logprobs, Timing, Usage
from jaxserve.api.request import Request
from jaxserve.cache import NO_MATCH
from jaxserve.cache.hashes import BlockHashes
from jaxserve.cache.prefix_match import BlockPage
from jaxserve.cache.tiers import Lookup
from jaxserve.drafts.drafter import SequenceDrafts
from jaxserve.lanes.planner import PlanPart, part_at

NO_SLOT = -1


class History:
    """The tokens of a sequence: those of the prompt, then those put out so far."""

    def __init__(self, prompt: np.ndarray):
        self.prompt = prompt
        self.output: list[int] = []

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)

    def __call__(self, first: int, last: int) -> np.ndarray:
        """Ids of the tokens `first` to before `last`, int32."""
        prompt = len(self.prompt)
        if last <= prompt:
            return self.prompt[first:last]
        output = np.array(self.output[max(first - prompt, 0) : last - prompt], np.int32)
        if first >= prompt:
            return output
        return np.concatenate([self.prompt[first:], output])


class SequenceLimits(NamedTuple):
    """Bounds of one completion."""

    max_new_tokens: int
    stops: frozenset[int]  # ids of tokens that end it
    ttft_deadline: float  # clock seconds at which its first token should come
    tpot: float  # objective, seconds per output token
    tbt: float | None = None  # objective, seconds between two reads that give it tokens


class Sequence:
    """One completion of a request. Only the scheduler changes it.

    `number` counts all sequences of a scheduler, `index` those of the request. `max_positions` is
    the most positions to compute: the last token is never fed. `prefill_len` is how many tokens
    were known when it was last queued: these are prefilled, and what is sampled after the last of
    them is fed on the device. The KV of the first `received` of them comes with the request, once.
    `tenant` is the number of the request's tenant, see `TenantShares`.
    """

    def __init__(
        self,
        number: int,
        index: int,
        request: Request,
        limits: SequenceLimits,
        hashes: Callable[[str, History], BlockHashes],
        received: int = 0,
        tenant: int = 0,
    ):
        self.number = number
        self.tenant = tenant
        self.index = index
        self.request = request
        self.id = request.id
        self.max_new_tokens, self.stops, self.ttft_deadline, self.tpot, self.tbt = limits
        self.max_positions = len(request.prompt) + self.max_new_tokens - 1
        self.history = History(request.prompt)
        self.output = self.history.output
        self.block_hashes = hashes(request.key_salt, self.history)
        self.prefix_match = NO_MATCH  # pages of its first blocks when that was last asked
        self.prefill_len = len(request.prompt)
        self.received = received
        # the last part ends where the prompt does; empty: the cache chooses lanes block by block
        self.plan: tuple[PlanPart, ...] = ()
        self.prefill_seconds_left = 0.0  # predicted seconds of the rest of its prefill
        self.came = 0.0  # predicted seconds of prefill that were done when its request came
        self.slot = NO_SLOT
        self.quiet = False  # whether only its end is an event: neither progress nor tokens are
        self.cached_tokens = 0
        # tiers below were asked for its blocks while it waited, and until when it waits for that
        self.lookup: Lookup | None = None
        self.lookup_until = 0.0  # clock second
        self.ticket: int | None = None  # of the fetch that it waits for, in its slot
        self.fetched: list[BlockPage] = []  # what that brings, in this order
        self.fetched_pages = 0  # of these, those that are on their pages
        self.failed_fetches = 0  # after which it was admitted again
        self.fetch_seconds = 0.0  # until the next piece of it must have come
        self.fetch_deadline = 0.0  # the same, as clock seconds
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None  # clock seconds at which its last token came
        self.longest_gap = 0.0  # seconds between two reads that gave it tokens
        self.slow_gaps = 0  # of these, how many were longer than the objective
        self.without_gap = 1  # tokens that came in a read with others, or first
        self._notable_gap = 0.0  # seconds; shorter gaps change none of these
        self.drafts: SequenceDrafts | None = None  # where tokens were proposed for it
        self.matcher = None if request.guide is None else request.guide.matcher()
        self.prompt_logprobs: list[Logprobs | None] | None = None
        if request.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(request.prompt)
        self._go_on(request.output(index))

    def _go_on(self, output: Iterable[int]) -> None:
        """Takes the tokens that another replica has put out. Errors: RequestError where no token
        follows the structured output's grammar."""
        for token in output:
            self.output.append(token)
            if self.matcher is not None:
                self.matcher.push(token)
        if self.output:
            begun = self.request.continuation
            assert begun is not None
            self.started_at = self.first_token_at = begun.first_token
            self.last_token_at = begun.last_token
            self.without_gap = len(self.output)

    def plan_at(self, start: int) -> PlanPart:
        """Returns the part of the plan with the token at `start`, see `part_at`."""
        return part_at(self.plan, start, self.prefill_len)

    @property
    def reads_cache(self) -> bool:
        """True if its first blocks may be taken from the prefix cache: not if the request wants
        log-probabilities of its prompt, which must be computed."""
        return not self.request.bypass_prefix_cache and self.prompt_logprobs is None

    def renew_hashes(self, hashes: Callable[[str, History], BlockHashes]) -> None:
        """Takes other keys for its blocks, of which none was found or computed yet."""
        self.block_hashes = hashes(self.request.key_salt, self.history)
        self.prefix_match = NO_MATCH
        self.lookup = None

    def note_prompt_logprobs(self, start: int, entries: list[Logprobs]) -> None:
        """Notes log-probabilities of the prompt's tokens from position `start + 1` on; after a
        preemption they replace those noted before."""
        if self.prompt_logprobs is not None:
            entries = entries[: max(len(self.prompt_logprobs) - start - 1, 0)]
            self.prompt_logprobs[start + 1 : start + 1 + len(entries)] = entries

    def append_token(self, token: int, now: float) -> str | None:
        """Appends a token that came at clock second `now`; returns the reason where it is the last
        one. Errors: RequestError where no token follows the structured output's grammar."""
        self.output.append(token)
        last = self.last_token_at
        if last is not None and now - last > self._notable_gap:
            self._note_gap(now - last)
        self.last_token_at = now
        if self.first_token_at is None:
            self.first_token_at = now
        if self.matcher is not None:
            self.matcher.push(token)
            if self.matcher.done:
                return "stop"
        if token in self.stops and len(self.output) >= self.request.sampling.min_tokens:
            return "stop"
        if len(self.output) >= self.max_new_tokens:
            return "length"
        return None

    def _note_gap(self, seconds: float) -> None:
        """Notes a gap that is longer than all before it, or than the objective."""
        self.longest_gap = max(self.longest_gap, seconds)
        self._notable_gap = self.longest_gap
        if self.tbt is not None:
            self.slow_gaps += seconds > self.tbt
            self._notable_gap = min(self.longest_gap, self.tbt)

    def _timing(self, now: float) -> Timing:
        """Returns the times of an end at clock second `now`."""
        arrival = self.request.arrival
        started = now if self.started_at is None else self.started_at
        first_token = now if self.first_token_at is None else self.first_token_at
        slow_gaps = self.slow_gaps / max(1, len(self.output) - self.without_gap)
        return Timing(
            started - arrival, first_token - arrival, now - arrival, self.longest_gap, slow_gaps
        )

    def _kept(self, timing: Timing) -> bool:
        """Returns whether what came of it was in time. timing: of its end."""
        promise = Promise(self.ttft_deadline - self.request.arrival, self.tpot, self.tbt)
        tpot = 0.0
        if self.last_token_at is not None and self.first_token_at is not None:
            tpot = (self.last_token_at - self.first_token_at) / max(1, len(self.output) - 1)
        return promise.kept(timing.first_token, tpot, timing.slow_gaps)

    def finished(
        self,
        reason: str,
        now: float,
        error: RequestError | None = None,
        embedding: np.ndarray | None = None,
        weight_version: str = "",
    ) -> Finished:
        """Returns the event of its end at clock second `now`; what had not happened counts as
        then."""
        timing = self._timing(now)
        prompt = len(self.request.prompt)
        # what was put out before it went on may be cached too
        usage = Usage(prompt, min(self.cached_tokens, prompt), len(self.output))
        logprobs = None if self.prompt_logprobs is None else tuple(self.prompt_logprobs)
        return Finished(
            self.index,
            reason,
            usage,
            timing,
            logprobs,
            error=error,
            embedding=embedding,
            weight_version=weight_version,
            in_time=None if self.request.job else in_time(reason, self._kept(timing)),
        )
