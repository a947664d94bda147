"""Compiles grammars for trial in a sandbox: a process with a limit on memory, which is killed when
it takes too long.

Limits on the size of a schema or grammar do not bound what the library llguidance makes of it:
combined alternatives multiply, and native code that runs out of stack or memory ends its whole
process. So everything that a caller asks for is compiled in a sandbox first and, if that went well,
once more in the process that uses it. The sandbox imports nothing of jaxserve, and ends when its
input does, also where its parent was killed.
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

START_SECONDS = 60.0  # for the process to start and read the tokenizer
COMPILE_SECONDS = 2
COMPILE_BYTES = 512 << 20  # of memory, besides what the process has when it is idle
STACK_BYTES = 64 << 20  # of the thread that compiles: native code recurses over the grammar
LIMITS: dict[str, Any] = dict(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=16_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
T = TypeVar("T")


class Sandbox:
    """A process that compiles grammars, started when it is first needed and after it was killed.

    One thread at a time may call `error_of`, any may `close`. tokenizer: as JSON; vocab: number of
    ids that the model has; eos_ids: those that end a completion.
    """

    def __init__(self, tokenizer: str, vocab: int, eos_ids: list[int]):
        self._tokenizer = {"tokenizer": tokenizer, "vocab": vocab, "eos_ids": eos_ids}
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._lock = threading.Lock()

    @property
    def running(self) -> bool:
        return self._process is not None

    def error_of(self, grammar: str, regex: bool) -> str:
        """Compiles a grammar (regex: a regular expression) and takes a first token; returns what is
        wrong with it, '' where nothing is.

        Errors: OSError where no process can be started.
        """
        fresh = not self.running
        if fresh and self._ask(self._start(), self._tokenizer, START_SECONDS) != "":
            raise OSError("no process that compiles guides could be started")
        try:
            answer = self._ask(self._process, {"grammar": grammar, "regex": regex}, COMPILE_SECONDS)
        except TimeoutError:
            return f"takes more than {COMPILE_SECONDS} s to compile"
        if answer is not None:
            return answer
        # earlier grammars may have used up the memory: it is tried once in a fresh process
        if not fresh:
            return self.error_of(grammar, regex)
        return f"takes more than {COMPILE_BYTES >> 20} MiB to compile"

    def close(self) -> None:
        """Ends the process; no other is started."""
        self._closed = True
        self._kill()

    def _start(self) -> subprocess.Popen[bytes]:
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

    def _kill(self) -> None:
        with self._lock:
            process = self._process
            self._process = None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(
        self, process: subprocess.Popen[bytes] | None, question: dict[str, Any], seconds: float
    ) -> str | None:
        """Sends a question and waits for the answer; None where the process has ended. A process
        that does not answer is killed. Errors: TimeoutError."""
        answer: str | None = None
        if process is None or process.stdin is None or process.stdout is None:
            return None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            readable = select.poll()  # `select.select` cannot take descriptors above 1023
            readable.register(process.stdout, select.POLLIN)
            if not readable.poll(1000 * seconds):
                raise TimeoutError
            answer = json.loads(process.stdout.readline())
        except (BrokenPipeError, ValueError):  # the process ended, maybe in the middle of a line
            pass
        finally:
            # also where the caller was interrupted: the next question must not get this answer
            if answer is None:
                self._kill()
        return answer


def compiled(tokenizer: llguidance.LLTokenizer, grammar: str, regex: bool) -> tuple[Any, str]:
    """Compiles on a thread with a deep stack; returns the native matcher and what is wrong with
    it."""
    return _with_deep_stack(lambda: _compiled(tokenizer, grammar, regex))


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
    """Takes a first token in two copies of a matcher; returns what is wrong. The copies share a
    lexer: what one breaks, the other reports."""
    for copy in (native.deep_copy(), native.deep_copy()):
        mask = int.from_bytes(copy.compute_bitmask(), "little")
        if not copy.is_error():
            copy.consume_token((mask & -mask).bit_length() - 1)
        if copy.is_error():
            return f"nothing can match it, or it is too complex: {copy.get_error()}"
    return ""


_starting = threading.Lock()


def _with_deep_stack(work: Callable[[], T]) -> T:
    """Calls `work` on a thread of `STACK_BYTES`. The size of stacks is a setting of the whole
    process, so it is restored at once."""
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


def _answer_all() -> None:
    """The sandbox's main loop: reads a tokenizer, then questions, a line of JSON each, and answers
    each with a line."""
    first = json.loads(sys.stdin.readline())
    tokenizer = llguidance.LLTokenizer(
        first["tokenizer"], n_vocab=first["vocab"], eos_token=first["eos_ids"]
    )
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + COMPILE_BYTES
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps(""), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        signal.alarm(COMPILE_SECONDS + 1)  # ends the process also where its parent is gone
        error = compiled(tokenizer, question["grammar"], question["regex"])[1]
        signal.alarm(0)
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    _answer_all()
