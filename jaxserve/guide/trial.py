"""Compiles guides in a process that may end: one with little memory, which is killed when it takes too long.

Limits of a schema's or grammar's size do not tell what the library llguidance will make of it: alternatives that are combined multiply, and
native code that runs out of stack or memory takes its whole process along. So everything that a caller asks for is compiled here first, and
where that went well, once more where it is used. The process imports nothing of ours, and ends when its input does.
"""

from __future__ import annotations

import contextlib
import json
import resource
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import llguidance

START_SECONDS = 60.0                                 # for the process to begin and read the tokenizer
SECONDS = 2.0                                        # to compile something
ROOM = 512 << 20                                     # bytes of memory for that
STACK_BYTES = 64 << 20                               # of the thread that compiles, whatever the system gives threads
LIMITS: dict[str, Any] = dict(initial_lexer_fuel=200_000, step_lexer_fuel=50_000, step_max_items=20_000, max_lexer_states=16_000,
                              max_grammar_size=100_000, verbose_errors=False)
T = TypeVar("T")


class Trial:
    """One such process, begun when it is first needed. For one thread at a time.

    tokenizer: as JSON; vocab: ids that the model has; eos_ids: those that end a completion.
    """

    def __init__(self, tokenizer: str, vocab: int, eos_ids: list[int]):
        self._first = {"tokenizer": tokenizer, "vocab": vocab, "eos_ids": eos_ids}
        self._process: subprocess.Popen[bytes] | None = None

    def said(self, grammar: str, regex: bool) -> str:
        """What is wrong with a grammar, or with a regular expression; '' where it compiles and a first token can be taken."""
        fresh = self._process is None
        if (fault := self._begun()) is not None:
            return fault
        answer = self._asked({"grammar": grammar, "regex": regex}, SECONDS)
        if answer is None and not fresh:                 # memory that was used before may have been what was missing
            return self.said(grammar, regex)
        return f"takes more than {SECONDS:g} s or {ROOM >> 20} MiB to compile" if answer is None else answer

    def _begun(self) -> str | None:
        """Begins the process where there is none; returns what is wrong with the tokenizer, if anything."""
        if self._process is not None:
            return None
        self._process = subprocess.Popen([sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=subprocess.DEVNULL, start_new_session=True)
        answer = self._asked(self._first, START_SECONDS)
        if answer:
            self.close()
        return "no process to compile it in could be started" if answer is None else answer or None

    def _asked(self, question: dict[str, Any], seconds: float) -> str | None:
        """The answer to a question; None where none came, which ends the process."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError, ValueError):       # it ended meanwhile, maybe in the middle of a line
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            news = select.poll()                             # not `select`, which knows the first 1024 descriptors only
            news.register(process.stdout, select.POLLIN)
            if news.poll(1000 * seconds):
                return json.loads(process.stdout.readline())
        self.close()
        return None

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def compiled(tokenizer: llguidance.LLTokenizer, grammar: str, regex: bool) -> tuple[Any, str]:
    """The native matcher and what is wrong with it, made on a thread with room for deep recursion."""
    return _on_a_deep_stack(lambda: _compiled(tokenizer, grammar, regex))


def _compiled(tokenizer: llguidance.LLTokenizer, grammar: str, regex: bool) -> tuple[Any, str]:
    try:
        native = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_regex(grammar) if regex else grammar, log_level=0,
                                      limits=llguidance.LLParserLimits(**LIMITS))
        return native, native.get_error()
    except BaseException as error:                       # a panic of native code is no Exception
        return None, f"cannot be compiled: {error}"


_starting = threading.Lock()


def _on_a_deep_stack(work: Callable[[], T]) -> T:
    """The stack's size is a setting of the process: it is put back at once."""
    out: list[T] = []
    thread = threading.Thread(target=lambda: out.append(work()), name="guide", daemon=True)
    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return out[0]


def _tried(tokenizer: llguidance.LLTokenizer, grammar: str, regex: bool) -> str:
    native, said = _compiled(tokenizer, grammar, regex)
    try:
        for copy in () if said else (native.deep_copy(), native.deep_copy()):        # a lexer that breaks in one is seen broken in the next
            mask = int.from_bytes(copy.compute_bitmask(), "little")
            if not copy.is_error():
                copy.consume_token((mask & -mask).bit_length() - 1)
            if copy.is_error():
                return f"nothing can match it, or it is too complex: {copy.get_error()}"
    except BaseException as error:
        return f"cannot be followed: {error}"
    return said


def _answer_all() -> None:
    """Reads questions, one a line, and writes the answers."""
    first = json.loads(sys.stdin.readline())
    try:
        tokenizer = llguidance.LLTokenizer(first["tokenizer"], n_vocab=first["vocab"], eos_token=first["eos_ids"])
    except ValueError as error:
        print(json.dumps(f"this model's tokenizer cannot be used: {error}"), flush=True)
        return
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps(""), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(_on_a_deep_stack(lambda: _tried(tokenizer, question["grammar"], question["regex"]))), flush=True)    # noqa: B023


if __name__ == "__main__":
    _answer_all()
