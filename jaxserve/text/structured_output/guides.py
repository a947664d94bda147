"""From what a caller asks for to a mask of tokens, by llguidance.

The lexer of a compiled grammar grows while it is used, up to a limit, and copies of a matcher share
it. So every request compiles its own, in well under the time of a step: what one request does to
its guide, no other one can feel or see.
"""

from __future__ import annotations

import collections
import concurrent.futures
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np

from jaxserve.api.errors import RequestError, internal_error
from jaxserve.text import Tokenizer
from jaxserve.text.structured_output.sandbox import Trial, compiled
from jaxserve.text.structured_output.spec import Guided

log = logging.getLogger(__name__)
COMPILES = 2  # at a time
TURN_SECONDS = 2.0  # who has waited longer for others to compile is refused
SAID_CHARS = 300  # of what the library says about a faulty grammar


class Matcher:
    """Follows one completion. `done`: it is complete, and no token may follow."""

    def __init__(self, native: Any):
        self.done = False
        self._native = native

    def fill(self, row: np.ndarray) -> None:
        """Sets `row`, int32 of at least ceil(vocab / 32) words, to the tokens that may come next:
        token i is bit i % 32 of word i // 32.

        Errors: RequestError where the guide has become too complex to follow.
        """
        try:
            mask = np.frombuffer(self._native.compute_bitmask(), np.int32)
        except BaseException as error:  # a panic of native code is no Exception
            raise _fault(error) from None
        self._check()
        size = min(len(mask), len(row))  # the library may add a word, as callers may
        row[:size] = mask[:size]
        row[size:] = 0

    def push(self, token: int) -> None:
        """One more token of the completion. Errors: RequestError, as of `fill`, and for a token
        that may not come here."""
        try:
            taken = self._native.consume_token(token)
        except BaseException as error:
            raise _fault(error) from None
        self._check()
        if not taken:
            raise RequestError("", "a token that the guide rules out was sampled", "INTERNAL")
        self.done = self._native.is_stopped()

    def _check(self) -> None:
        if self._native.is_error():
            raise RequestError(
                "guided", f"is too complex to follow: {_said(self._native.get_error())}"
            )


class Guide:
    """A compiled `Guided`, for the completions of one request."""

    def __init__(self, native: Any):
        self._native = native

    def matcher(self) -> Matcher:
        return Matcher(self._native.deep_copy())


class Guides:
    """Compiles for one model: its tokenizer, its number of ids, the ids that end a completion."""

    def __init__(self, tokenizer: Tokenizer | None, vocab: int, eos_ids: Sequence[int]):
        self._native: llguidance.LLTokenizer | str | None = None
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._eos_ids = list(eos_ids)
        self._preparing = threading.Lock()
        self._trials: list[Trial] = []
        self._idle: collections.deque[Trial] = collections.deque()  # on the right those that run
        self._threads = concurrent.futures.ThreadPoolExecutor(COMPILES, "guides")

    def prepare(self) -> llguidance.LLTokenizer | str:
        """The library's form of the tokenizer, or what is wrong with it. Made once; every other
        thread waits for that."""
        with self._preparing:
            if self._native is None:
                self._native = self._made()
            return self._native

    def submit(self, spec: Guided, field: str = "") -> concurrent.futures.Future[Guide]:
        """The guide of a spec, for one request, to come. Takes milliseconds for an ordinary schema,
        longer for the first; on threads of its own, lest others wait for what takes long. Any
        thread may call it.

        Errors: RequestError that names `field` (else the kind) for a spec that is wrong, cannot be
        met or is too complex, with status FAILED_PRECONDITION for a model without a tokenizer or an
        end token, and RESOURCE_EXHAUSTED where others take too long.
        """
        try:
            return self._threads.submit(
                self._compiled, spec, field, time.monotonic() + TURN_SECONDS
            )
        except RuntimeError:  # it was closed
            raise internal_error() from None

    def compile(self, spec: Guided, field: str = "") -> Guide:
        """Waits for what `submit` gives."""
        return self.submit(spec, field).result()

    def close(self) -> None:
        """Ends the processes that compile, and takes no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for trial in self._trials:
            trial.close()

    def _compiled(self, spec: Guided, field: str, latest: float) -> Guide:
        if time.monotonic() > latest:
            raise RequestError("", "too many guides are being compiled", "RESOURCE_EXHAUSTED")
        grammar = spec.grammar(field)
        field = field or spec.kind
        regex = spec.kind in ("regex", "choice")
        tokenizer = self.prepare()
        if isinstance(tokenizer, str):
            raise RequestError(field, tokenizer, "FAILED_PRECONDITION")
        trial = self._idle.pop()
        try:
            said = trial.said(grammar, regex)
            native, said = (None, said) if said else compiled(tokenizer, grammar, regex)
        except OSError:
            log.exception("a guide was not compiled")
            raise internal_error() from None
        finally:
            (self._idle.append if trial.running else self._idle.appendleft)(trial)
        if said:
            raise RequestError(field, _said(said))
        return Guide(native)

    def _made(self) -> llguidance.LLTokenizer | str:
        if self._tokenizer is None or not self._eos_ids:
            return f"this model has no {'end token' if self._tokenizer else 'tokenizer'}"
        text = self._tokenizer.to_json()
        try:
            native = llguidance.LLTokenizer(text, n_vocab=self._vocab, eos_token=self._eos_ids)
        except BaseException as error:  # a panic of native code is no Exception
            return f"this model's tokenizer cannot be used: {_said(str(error))}"
        self._trials = [Trial(text, self._vocab, self._eos_ids) for _ in range(COMPILES)]
        self._idle.extend(self._trials)
        return native


def _fault(error: BaseException) -> RequestError:
    return RequestError("guided", f"cannot be followed: {_said(str(error))}", "INTERNAL")


def _said(text: str) -> str:
    """What the library says, in one short line."""
    return " ".join(text.replace("<non-verbose/>", "").split())[:SAID_CHARS]
