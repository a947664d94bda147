"""Drafters, which propose the next tokens of sequences: each is one class and one row of
`DRAFTERS`, from which the settings take their choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from jaxserve.api.request import Request
from jaxserve.drafts.acceptance import Judged, rising
from jaxserve.drafts.lookup import GRADES, NOTHING, Lookup, Proposal


class Tokens(Protocol):
    """The tokens of a sequence: those of the prompt, then those put out so far."""

    def __len__(self) -> int: ...

    def __call__(self, first: int, last: int) -> np.ndarray:
        """Ids of the tokens `first` to before `last`, int32."""


class Drafted(Protocol):
    """A sequence for which tokens are proposed. number: of all sequences of its scheduler. slot:
    where it runs; negative where it does not. index: of the completion, among those of its
    request."""

    number: int
    slot: int
    index: int
    request: Request
    output: list[int]

    @property
    def history(self) -> Tokens: ...


class Offer(NamedTuple):
    """Tokens that can be proposed for a sequence: their number, and a grade, at least 1, of how
    sure the first is; each further one is a grade surer if those before it were right. tokens
    [size]; None where they are made once it is decided how many are wanted. once: predicted seconds
    in which it takes in the text before the first of them."""

    size: int
    grade: int
    tokens: np.ndarray | None = None
    once: float = 0.0


class Source(Protocol):
    """Proposes the tokens of one sequence."""

    def offer(self, count: int) -> Offer:
        """Offers up to `count` tokens that may follow those put out so far."""


class Wanted(NamedTuple):
    """Tokens that are wanted of a source that offered them without making them."""

    source: Source
    size: int


class Drafter(Protocol):
    """Proposes tokens of all sequences. first_rates [grades]: how often its tokens are right, by
    grade, until that is known. waits: it proposes nothing behind tokens that are still on their
    way."""

    first_rates: np.ndarray
    waits: bool

    def begin(self, sequence: Drafted) -> Source:
        """Returns what proposes the tokens of a sequence."""

    def seconds(self, sequences: int, tokens: int) -> float:
        """Predicts the seconds in which it makes tokens of that many sequences, `tokens` of the one
        that wants most."""

    def make(self, wanted: list[Wanted], seconds: float) -> list[np.ndarray]:
        """Makes the tokens that are wanted of each source, or none of some: those whose texts it
        has not seen, and would need more than `seconds` for."""


class Proposer(Protocol):
    """Proposes the tokens of one sequence, which are there at once."""

    def propose(self, count: int) -> Proposal:
        """Returns up to `count` tokens that may follow those put out so far."""


class _Alone:
    def __init__(self, proposer: Proposer):
        self._proposer = proposer

    def offer(self, count: int) -> Offer:
        tokens, grade = self._proposer.propose(count)
        return Offer(len(tokens), grade, tokens)


class EachAlone:
    """Drafter whose sources know nothing of each other and make tokens at once. source: makes that
    of a prompt [n] int32 and the list to which its output is appended."""

    waits = False

    def __init__(self, grades: int, source: Callable[[np.ndarray, list[int]], Proposer]):
        self.first_rates = rising(grades)
        self._source = source

    def begin(self, sequence: Drafted) -> Source:
        """See `Drafter.begin`."""
        return _Alone(self._source(sequence.request.prompt, sequence.output))

    def seconds(self, sequences: int, tokens: int) -> float:
        """Returns 0: it takes microseconds of the host's time."""
        return 0.0

    def make(self, wanted: list[Wanted], seconds: float) -> list[np.ndarray]:
        """Refuses to make any: all that is offered is there. Errors: AssertionError."""
        raise AssertionError("what is offered is made already")


class Silent:
    """Proposes nothing: in place of a draft model, until its devices are there."""

    def __init__(self, prompt: np.ndarray, output: list[int]):
        """prompt, output: as of `EachAlone`; they are not read."""

    def propose(self, count: int) -> Proposal:
        """Returns no tokens."""
        return NOTHING


class SequenceDrafts(NamedTuple):
    """The source of a sequence's proposed tokens, and how often they were right."""

    source: Source
    judged: Judged


class DrafterKind(NamedTuple):
    """A way to propose tokens. help: for the help of settings. make: makes the drafter of a
    scheduler. weights: it has some, which `draft_model` names."""

    help: str
    make: Callable[[], Drafter]
    weights: bool = False


DRAFTERS: Mapping[str, DrafterKind] = {
    "ngram": DrafterKind(
        "what followed the last tokens where they came before, in the prompt or the output",
        lambda: EachAlone(GRADES, Lookup),
    ),
    "model": DrafterKind(
        "what a smaller model with the same tokenizer would say, see draft_model",
        lambda: EachAlone(1, Silent),
        weights=True,
    ),
    "eagle3": DrafterKind(
        "what an EAGLE-3 draft head of the model says, see draft_model",
        lambda: EachAlone(1, Silent),
        weights=True,
    ),
}
