"""The work that was routed to one replica and has not ended, as the conductor that routed it knows
it: how long the prefill queue is, and how many sequences decode now or will at a later time.

What others routed there is `other_work`. Times are clock seconds.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass


@dataclass(slots=True)
class DecodeWork:
    """A sequence to be decoded. tokens: of KV that it takes at its end; arrives: when it is or was
    ready to decode; there: whether it is. sent: the replica has it, or is just getting it."""

    tokens: int
    arrives: float
    there: bool = False
    sent: bool = True


class Assignments:
    """Requests by id that one replica prefills, and that it decodes.

    Prompts are taken to be prefilled one after the other, in the order in which they came.
    """

    def __init__(self) -> None:
        self._prefills: dict[str, float] = {}  # predicted seconds
        self._decodes: dict[str, DecodeWork] = {}
        self._head_since = 0.0  # when the oldest prefill became the oldest one

    # --- prefill

    @property
    def prefills(self) -> int:
        """Requests whose prefill has not ended."""
        return len(self._prefills)

    @property
    def requests(self) -> int:
        """Requests that were sent there and have not ended."""
        sent = sum(work.sent for work in self._decodes.values())
        return sent + sum(id not in self._decodes for id in self._prefills)

    def begin_prefill(self, id: str, seconds: float, now: float) -> None:
        """Notes a request that is prefilled there. seconds: of work, predicted."""
        if not self._prefills:
            self._head_since = now
        self._prefills[id] = seconds

    def end_prefill(self, id: str, now: float) -> None:
        """Notes that a request's prefill has ended, or never will; unknown ones are ignored."""
        if self._prefills.pop(id, None) is not None:
            self._head_since = now

    def queue(self, now: float) -> float:
        """Predicted seconds until the prompts there are prefilled."""
        if not self._prefills:
            return 0.0
        head = next(iter(self._prefills.values()))
        done = min(max(now - self._head_since, 0.0), head)
        return math.fsum(self._prefills.values()) - done

    def prefill_ends(self, now: float) -> dict[str, float]:
        """Predicted seconds until each of the prompts there is prefilled, by its request's id."""
        if not self._prefills:
            return {}
        done = min(max(now - self._head_since, 0.0), next(iter(self._prefills.values())))
        ends = itertools.accumulate(self._prefills.values(), initial=-done)
        return dict(zip(self._prefills, itertools.islice(ends, 1, None)))

    # --- decode

    def expect_decode(self, id: str, tokens: int, arrives: float, sent: bool = True) -> None:
        """Notes a request that will decode there from clock second `arrives` on, as predicted.
        sent: False for one that waits elsewhere."""
        self._decodes[id] = DecodeWork(tokens, arrives, sent=sent)

    def begin_decode(self, id: str, now: float) -> None:
        """Notes that an expected request decodes from now on; unknown ones are ignored."""
        work = self._decodes.get(id)
        if work is not None:
            work.arrives = now
            work.there = True

    def end_decode(self, id: str) -> None:
        """Notes that a request has ended, or will not come; unknown ones are ignored."""
        self._decodes.pop(id, None)

    @property
    def decodes(self) -> int:
        """Sequences that decode."""
        return sum(work.there for work in self._decodes.values())

    @property
    def promised(self) -> int:
        """Tokens of KV of sequences that are expected: the virtual usage of transfers under way
        (Tetris, section 5.2)."""
        return sum(work.tokens for work in self._decodes.values() if not work.there)

    def decodes_at(self, at: float, seconds: float) -> tuple[int, int]:
        """Sequences that will decode at clock second `at`, and the tokens of KV that they take,
        where each decodes for `seconds` (Mooncake, section 4.3.4)."""
        there = [
            work.tokens
            for work in self._decodes.values()
            if work.arrives <= at < work.arrives + seconds
        ]
        return len(there), sum(there)
