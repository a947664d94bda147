"""From what a caller asks for to a mask of tokens, by llguidance.

The lexer of a compiled grammar grows while it is used, up to a limit, and copies of a matcher share it. So every request compiles its own,
in well under the time of a step: what one request does to its guide, no other one can feel or see.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np

from jaxserve.guide.spec import Guided
from jaxserve.request import RequestError
from jaxserve.tokenizer import Tokenizer

COMPILE_SECONDS = 2.0                                # most that a caller waits; the limits below make it a small part of that
COMPILES = 2                                         # at a time
STACK_BYTES = 64 << 20                               # of the thread that compiles, whatever the system gives threads
SAID_CHARS = 300                                     # of what the library says about a faulty grammar
LIMITS: dict[str, Any] = dict(initial_lexer_fuel=200_000, step_lexer_fuel=50_000, step_max_items=20_000, max_lexer_states=16_000,
                              max_grammar_size=100_000, verbose_errors=False)


class Matcher:
    """Follows one completion. `done`: it is complete, and no token may follow."""

    def __init__(self, native: Any):
        self.done = False
        self._native = native

    def fill(self, row: np.ndarray) -> None:
        """Sets `row`, int32 of at least ceil(vocab / 32) words, to the tokens that may come next: token i is bit i % 32 of word i // 32.

        Errors: RequestError where the guide has become too complex to follow.
        """
        try:
            mask = np.frombuffer(self._native.compute_bitmask(), np.int32)
        except BaseException as error:               # a panic of native code is no Exception
            raise _fault(error) from None
        self._check()
        size = min(len(mask), len(row))              # the library may add a word, as callers may
        row[:size], row[size:] = mask[:size], 0

    def push(self, token: int) -> None:
        """One more token of the completion. Errors: RequestError, as of `fill`, and for a token that may not come here."""
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
            raise RequestError("guided", f"is too complex to follow: {_said(self._native.get_error())}")


class Guide:
    """A compiled `Guided`, for the completions of one request."""

    def __init__(self, native: Any):
        self._native = native

    def matcher(self) -> Matcher:
        return Matcher(self._native.deep_copy())


class Guides:
    """Compiles for one model: its tokenizer, its number of ids, the ids that end a completion."""

    def __init__(self, tokenizer: Tokenizer | None, vocab: int, eos_ids: Sequence[int]):
        self._made: llguidance.LLTokenizer | None = None
        self._tokenizer, self._vocab, self._eos_ids = tokenizer, vocab, list(eos_ids)
        self._making, self._slots = threading.Lock(), threading.Semaphore(COMPILES)

    def compile(self, spec: Guided, field: str = "") -> Guide:
        """The guide of a spec, for one request. Takes a millisecond for an ordinary schema; any thread may call it.

        Errors: RequestError that names `field` (else the kind) for a spec that is wrong, cannot be met or is too complex, and, with status
        FAILED_PRECONDITION, for a model without a tokenizer or an end token.
        """
        grammar, field = spec.grammar(field), field or spec.kind
        tokenizer = self._native(field)
        if not self._slots.acquire(timeout=COMPILE_SECONDS):
            raise RequestError("", "too many guides are being compiled", "RESOURCE_EXHAUSTED")
        out: list[Any] = []
        _start(lambda: self._compile(spec.kind, grammar, tokenizer, out)).join(COMPILE_SECONDS)
        native, said = out or (None, f"takes more than {COMPILE_SECONDS:g} s to compile")
        if said:
            raise RequestError(field, _said(said))
        return Guide(native)

    def _native(self, field: str) -> llguidance.LLTokenizer:
        """The library's form of the tokenizer: made once, when it is first needed."""
        if self._tokenizer is None or not self._eos_ids:
            raise RequestError(field, f"this model has no {'end token' if self._tokenizer else 'tokenizer'}", "FAILED_PRECONDITION")
        with self._making:
            if self._made is None:
                try:
                    self._made = llguidance.LLTokenizer(self._tokenizer.to_json(), n_vocab=self._vocab, eos_token=self._eos_ids)
                except ValueError as error:
                    said = f"this model's tokenizer cannot be used: {_said(str(error))}"
                    raise RequestError(field, said, "FAILED_PRECONDITION") from None
            return self._made

    def _compile(self, kind: str, grammar: str, tokenizer: llguidance.LLTokenizer, out: list[Any]) -> None:
        """Puts into `out` the native matcher and what is wrong with it; on a thread of its own, which gives the slot back."""
        try:
            if kind in ("regex", "choice"):
                grammar = llguidance.LLMatcher.grammar_from_regex(grammar)
            native = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))
            out.extend((native, native.get_error() or _trial(native)))
        except BaseException as error:               # a panic of native code is no Exception
            out.extend((None, f"cannot be compiled: {error}"))
        finally:
            self._slots.release()


def _trial(native: Any) -> str:
    """What is wrong with the first token. A lexer that breaks in one copy is seen to be broken in the next."""
    for copy in (native.deep_copy(), native.deep_copy()):
        mask = np.frombuffer(copy.compute_bitmask(), np.uint8)
        if not copy.is_error():
            copy.consume_token(int(np.unpackbits(mask, bitorder="little").argmax()))
        if copy.is_error():
            return f"nothing can match it, or it is too complex: {copy.get_error()}"
    return ""


_starting = threading.Lock()


def _start(target: Any) -> threading.Thread:
    """A running thread with room for deep recursion. The size is a setting of the process: it is put back at once."""
    thread = threading.Thread(target=target, name="guide", daemon=True)
    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


def _fault(error: BaseException) -> RequestError:
    return RequestError("guided", f"cannot be followed: {_said(str(error))}", "INTERNAL")


def _said(text: str) -> str:
    """What the library says, in one short line."""
    return " ".join(text.replace("<non-verbose/>", "").split())[:SAID_CHARS]
