"""Compiles constraints on outputs to token masks, with llguidance.

The lexer of a compiled grammar grows while it is used, up to a limit, and copies of a matcher share
it. So every request compiles a grammar of its own, in well under the time of a step: nothing that
one request does to its grammar affects another.
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
from jaxserve.api.log_once import LogOnce
from jaxserve.text import Tokenizer
from jaxserve.text.structured_output.sandbox import Sandbox, compiled
from jaxserve.text.structured_output.spec import Guided

log = logging.getLogger(__name__)
COMPILE_THREADS = 2
QUEUE_SECONDS = 2.0  # a request that has waited longer for a thread is refused
MAX_ERROR_CHARS = 300  # of the library's text about a faulty grammar


class Matcher:
    """Follows one completion. done: it is complete, and no token may follow. vocab: number of ids
    that the model has."""

    def __init__(self, native: Any, vocab: int):
        self.done = False
        self._native = native
        self._vocab = vocab

    def fill(self, row: np.ndarray) -> None:
        """Sets `row`, int32 of at least ceil(vocab / 32) words, to the tokens that may come next:
        token i is bit i % 32 of word i // 32.

        Errors: RequestError where the guide has become too complex to follow.
        """
        try:
            mask = np.frombuffer(self._native.compute_bitmask(), np.int32)
        except BaseException as error:  # a panic of native code is no Exception
            raise _matcher_error(error) from None
        self._check()
        size = min(len(mask), -(-self._vocab // 32))  # a tokenizer may have more ids than the model
        row[:size] = mask[:size]
        row[size:] = 0
        if used := self._vocab % 32:
            row[self._vocab // 32] &= (1 << used) - 1
        if mask.any() and not row.any():
            raise RequestError("guided", "goes on with tokens that the model does not have")

    def push(self, token: int) -> None:
        """Takes the completion's next token. Errors: RequestError, as of `fill`, and for a token
        that may not come here."""
        try:
            taken = self._native.consume_token(token)
        except BaseException as error:
            raise _matcher_error(error) from None
        self._check()
        if not taken:
            raise RequestError("", "a token that the guide rules out was sampled", "INTERNAL")
        self.done = self._native.is_stopped()

    def count_valid(self, tokens: list[int]) -> int:
        """Returns how many of the first of these tokens may come next, one after the other; none if
        that cannot be found out."""
        try:
            return self._native.validate_tokens(tokens)
        except BaseException:  # a panic of native code is no Exception
            return 0

    def ahead(self) -> LookAhead:
        """Returns what follows the completion with proposed tokens."""
        return LookAhead(Matcher(self._native.deep_copy(), self._vocab))

    def _check(self) -> None:
        if self._native.is_error():
            raise RequestError(
                "guided", f"is too complex to follow: {_one_line(self._native.get_error())}"
            )


class LookAhead:
    """Follows a completion with proposed tokens, of which each may turn out to be wrong."""

    def __init__(self, matcher: Matcher):
        self._matcher: Matcher | None = matcher

    def fill(self, token: int, row: np.ndarray) -> None:
        """Takes the next proposed token, and sets `row` to those that may come behind it, as
        `Matcher.fill` does. The row stays as it is behind a token that may not come, and at the
        end; none may come where the guide has become too complex to follow."""
        matcher = self._matcher
        self._matcher = None
        if matcher is None or not matcher.count_valid([token]):
            return
        try:
            matcher.push(token)
            if matcher.done:
                return
            matcher.fill(row)
        except RequestError:
            row[:] = 0
            return
        self._matcher = matcher


class Guide:
    """A compiled `Guided`, for the completions of one request: makes a matcher for each.

    spec: what was compiled, so that another process can compile it again. vocab: number of ids that
    the model has.
    """

    def __init__(self, spec: Guided, native: Any, vocab: int):
        self.spec = spec
        self._native = native
        self._vocab = vocab

    def matcher(self) -> Matcher:
        return Matcher(self._native.deep_copy(), self._vocab)


class Guides:
    """Compiles guides for one model, on threads of its own.

    vocab: number of ids that the model has; eos_ids: those that end a completion.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab: int, eos_ids: Sequence[int]):
        self._native: llguidance.LLTokenizer | str | None = None
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._eos_ids = list(eos_ids)
        self._preparing = threading.Lock()
        self._notes = LogOnce(log)
        self._sandboxes: list[Sandbox] = []
        # those without work, on the right the ones whose process runs
        self._idle: collections.deque[Sandbox] = collections.deque()
        self._threads = concurrent.futures.ThreadPoolExecutor(COMPILE_THREADS, "guides")

    def prepare(self) -> llguidance.LLTokenizer | str:
        """Returns the library's form of the tokenizer, or what is wrong with it. It is made once;
        other threads wait for that."""
        with self._preparing:
            if self._native is None:
                self._native = self._made()
            return self._native

    def submit(self, spec: Guided, field: str = "") -> concurrent.futures.Future[Guide]:
        """Begins to compile the guide of one request; any thread may call it. An ordinary schema
        takes milliseconds, the first one longer.

        Errors: RequestError that names `field` (else the kind) for a spec that is wrong, cannot be
        met or is too complex, with status FAILED_PRECONDITION for a model without a tokenizer or an
        end token, and RESOURCE_EXHAUSTED where others take too long.
        """
        try:
            return self._threads.submit(
                self._compiled, spec, field, time.monotonic() + QUEUE_SECONDS
            )
        except RuntimeError:  # it was closed
            raise internal_error() from None

    def compile(self, spec: Guided, field: str = "") -> Guide:
        """Compiles the guide of one request. Errors: RequestError, as of `submit`."""
        return self.submit(spec, field).result()

    def close(self) -> None:
        """Ends the processes that compile; further requests are refused."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for sandbox in self._sandboxes:
            sandbox.close()

    def _compiled(self, spec: Guided, field: str, latest: float) -> Guide:
        if time.monotonic() > latest:
            raise RequestError("", "too many guides are being compiled", "RESOURCE_EXHAUSTED")
        grammar = spec.grammar(field)
        field = field or spec.kind
        tokenizer = self.prepare()
        if isinstance(tokenizer, str):
            raise RequestError(field, tokenizer, "FAILED_PRECONDITION")
        sandbox = self._idle.pop()
        native = None
        try:
            grammar, error = grammar.tried(lambda each: sandbox.error_of(each.text, each.is_regex))
            if not error:
                native, error = compiled(tokenizer, grammar.text, grammar.is_regex)
        except OSError:
            log.exception("a guide was not compiled")
            raise internal_error() from None
        finally:
            if sandbox.running:
                self._idle.append(sandbox)
            else:
                self._idle.appendleft(sandbox)
        if error:
            raise RequestError(field, _one_line(error))
        for each in grammar.unenforced:
            self._notes.warning(
                "%s of a tool that is not strict cannot be enforced and has no effect on its calls",
                each.keyword,
            )
        return Guide(spec, native, self._vocab)

    def _made(self) -> llguidance.LLTokenizer | str:
        if self._tokenizer is None or not self._eos_ids:
            return f"this model has no {'end token' if self._tokenizer else 'tokenizer'}"
        text = self._tokenizer.to_json()
        # ids beyond the model's vocabulary are masked in `Matcher.fill`
        size = max(self._vocab, self._tokenizer.vocab)
        try:
            native = llguidance.LLTokenizer(text, n_vocab=size, eos_token=self._eos_ids)
        except BaseException as error:  # a panic of native code is no Exception
            return f"this model's tokenizer cannot be used: {_one_line(str(error))}"
        self._sandboxes = [Sandbox(text, size, self._eos_ids) for _ in range(COMPILE_THREADS)]
        self._idle.extend(self._sandboxes)
        return native


def _matcher_error(error: BaseException) -> RequestError:
    return RequestError("guided", f"cannot be followed: {_one_line(str(error))}", "INTERNAL")


def _one_line(text: str) -> str:
    """A text of the library as one short line."""
    return " ".join(text.replace("<non-verbose/>", "").split())[:MAX_ERROR_CHARS]
