"""Drafters, which propose the next tokens of a sequence: each is one class and one row of
`DRAFTERS`, from which the settings take their choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from jaxserve.drafts.acceptance import Judged
from jaxserve.drafts.lookup import GRADES, Lookup, Proposal


class Drafter(Protocol):
    """Proposes tokens of one sequence."""

    def propose(self, count: int) -> Proposal:
        """Returns up to `count` tokens that may follow those put out so far."""


class JudgedDrafter(NamedTuple):
    """The drafter of a sequence, and how often it was right."""

    drafter: Drafter
    judged: Judged


class DrafterKind(NamedTuple):
    """A way to propose tokens. help: for the help of settings. grades: of proposals, from 1 on: the
    higher, the surer. make: of a prompt [n] int32 and the list to which its output is appended."""

    help: str
    grades: int
    make: Callable[[np.ndarray, list[int]], Drafter]


DRAFTERS: Mapping[str, DrafterKind] = {
    "ngram": DrafterKind(
        "what followed the last tokens where they came before, in the prompt or the output",
        GRADES,
        Lookup,
    ),
}
