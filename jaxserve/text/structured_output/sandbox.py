"""Compiles guides in a process that may end: one with little memory, which is killed when it takes
too long.

Limits of a schema's or grammar's size do not tell what the library llguidance will make of it:
alternatives that are combined multiply, and native code that runs out of stack or memory takes its
whole process along. So everything that a caller asks for is compiled here first, and where that
went well, once more where it is used. The process imports nothing of ours, and ends when its input
does.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import llguidance

START_SECONDS = 60.0  # for the process to begin and read the tokenizer
SECONDS = 2  # to compile something
ROOM = 512 << 20  # bytes of memory for that
STACK_BYTES = 64 << 20  # of the thread that compiles, whatever the system gives threads
LIMITS: dict[str, Any] = dict(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=16_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
T = TypeVar("T")


class Trial:
    """One such process, begun when it is first needed. `said` is for one thread at a time; any may
    `close`.

    tokenizer: as JSON; vocab: ids that the model has; eos_ids: those that end a completion.
    """

    def __init__(self, tokenizer: str, vocab: int, eos_ids: list[int]):
        self._first = {"tokenizer": tokenizer, "vocab": vocab, "eos_ids": eos_ids}
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._lock = threading.Lock()

    @property
    def running(self) -> bool:
        return self._process is not None

    def said(self, grammar: str, regex: bool) -> str:
        """What is wrong with a grammar, or with a regular expression; '' where it compiles and a
        first token can be taken.

        Errors: OSError where there is no such process.
        """
        fresh = not self.running
        question = _line({"grammar": grammar, "regex": regex})
        if fresh and self._asked(self._begun(), _line(self._first), START_SECONDS) != "":
            raise OSError("no process that compiles guides could be started")
        try:
            answer = self._asked(self._process, question, SECONDS)
        except TimeoutError:
            return f"takes more than {SECONDS} s to compile"
        # memory that was used before may have been what was missing
        if answer is None and not fresh:
            return self.said(grammar, regex)
        return f"takes more than {ROOM >> 20} MiB to compile" if answer is None else answer

    def close(self) -> None:
        """Ends the process for good."""
        self._closed = True
        self._end()

    def _begun(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise OSError("no more guides are compiled")
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            return self._process

    def _end(self) -> None:
        with self._lock:
            process = self._process
            self._process = None
        if process is not None:
            process.kill()
            process.communicate()

    def _asked(
        self, process: subprocess.Popen[bytes] | None, question: bytes, seconds: float
    ) -> str | None:
        """The answer to a question; None where the process ended. Without an answer it is made to.
        Errors: TimeoutError."""
        answer: str | None = None
        if process is None or process.stdin is None or process.stdout is None:
            return None
        try:
            process.stdin.write(question)
            process.stdin.flush()
            news = select.poll()  # not `select`, which knows the first 1024 descriptors only
            news.register(process.stdout, select.POLLIN)
            if not news.poll(1000 * seconds):
                raise TimeoutError
            answer = json.loads(process.stdout.readline())
        except (BrokenPipeError, ValueError):  # it ended, maybe in the middle of a line
            pass
        finally:
            # also where the caller was interrupted: the next one must not get this answer
            if answer is None:
                self._end()
        return answer


def compiled(tokenizer: llguidance.LLTokenizer, grammar: str, regex: bool) -> tuple[Any, str]:
    """The native matcher and what is wrong with it, made on a thread with room for deep
    recursion."""
    return _on_a_deep_stack(lambda: _compiled(tokenizer, grammar, regex))


def _compiled(tokenizer: llguidance.LLTokenizer, grammar: str, regex: bool) -> tuple[Any, str]:
    try:
        native = llguidance.LLMatcher(
            tokenizer,
            llguidance.LLMatcher.grammar_from_regex(grammar) if regex else grammar,
            log_level=0,
            limits=llguidance.LLParserLimits(**LIMITS),
        )
        return native, native.get_error() or _first_token(native)
    except BaseException as error:  # a panic of native code is no Exception
        return None, f"cannot be compiled: {error}"


def _first_token(native: Any) -> str:
    """What is wrong with the first token. A lexer that breaks in one copy is seen to be broken in
    the next."""
    for copy in (native.deep_copy(), native.deep_copy()):
        mask = int.from_bytes(copy.compute_bitmask(), "little")
        if not copy.is_error():
            copy.consume_token((mask & -mask).bit_length() - 1)
        if copy.is_error():
            return f"nothing can match it, or it is too complex: {copy.get_error()}"
    return ""


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


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _answer_all() -> None:
    """Reads questions, one a line, and writes the answers."""
    first = json.loads(sys.stdin.readline())
    tokenizer = llguidance.LLTokenizer(
        first["tokenizer"], n_vocab=first["vocab"], eos_token=first["eos_ids"]
    )
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        most = int(file.read().split()[0]) * resource.getpagesize() + ROOM
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(
            resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
        )
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps(""), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        signal.alarm(SECONDS + 1)  # ends the process also where nobody is left to kill it
        said = compiled(tokenizer, question["grammar"], question["regex"])[1]
        signal.alarm(0)
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    _answer_all()
