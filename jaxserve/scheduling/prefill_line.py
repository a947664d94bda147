"""The line of prompts by age, in predicted seconds of prefill: how much was prefilled since a
prompt came, and how long the line was that prompts found lately. By that policies know how long
first come, first served would keep a prompt waiting.

A line of 20 s is one that takes 20 s of prefill, whatever decodes and other lanes do meanwhile; the
same clock says how much of that has passed.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxserve.scheduling.sequence import Sequence

FADING = 0.01  # seconds by which the longest line is forgotten in each second of prefill


class PrefillLine:
    """The seconds of prefill that were `done` so far, and the longest line of each tenant."""

    def __init__(self) -> None:
        self.done = 0.0
        # by number of the tenant: the longest line that its prompts found, when nothing was done
        self._longest = np.zeros(1)

    def joined(self, tenant: int) -> None:
        """Forgets what a tenant of this number found before: it is another one now."""
        if tenant == len(self._longest):
            self._longest = np.append(self._longest, 0.0)
        self._longest[tenant] = 0.0

    def came(self, sequences: Iterable[Sequence]) -> None:
        """Notes that these sequences come now."""
        for sequence in sequences:
            sequence.came = self.done

    def found(self, tenant: int, seconds: float) -> None:
        """Notes that a prompt of this tenant stands in a line of `seconds`, its own among them."""
        self._longest[tenant] = max(self._longest[tenant], seconds + FADING * self.done)

    def longest(self, tenants: np.ndarray) -> np.ndarray:
        """Returns the longest line [n] that prompts of these tenants [n] found lately."""
        return self._longest[tenants] - FADING * self.done
