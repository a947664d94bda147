"""Threads and staging memory for calls of a library that may hang.

A call that misses its deadline cannot be ended, and may still write to the memory it was given. Its
thread and memory are therefore left alone until the call returns; while all threads are left so,
nothing is asked of the library any more.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import numpy as np


class CallThread:
    """A thread, and staging memory `rows` [rows, row_bytes] uint8, each row on pages of its own;
    `memory` is all of it, contiguous. A borrower makes one call at a time."""

    def __init__(self, rows: int, row_bytes: int):
        stride = -(-row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory = np.frombuffer(mmap.mmap(-1, rows * stride), np.uint8)
        self.rows = self.memory.reshape(rows, stride)[:, :row_bytes]
        self._last: Future | None = None
        self._jobs: SimpleQueue[tuple[Future, Callable[..., Any], tuple] | None] = SimpleQueue()
        threading.Thread(target=self._work, name="store-thread", daemon=True).start()

    def call(self, function: Callable[..., Any], *arguments: Any, deadline: float) -> Any:
        """Calls a function on this thread and returns its result. deadline: in seconds of
        `time.monotonic`. Errors: TimeoutError; what the function raises."""
        self._last = Future()
        self._jobs.put((self._last, function, arguments))
        return self._last.result(max(0.0, deadline - time.monotonic()))

    def when_idle(self, then: Callable[[], None]) -> None:
        """Calls `then` once the last call has ended: now, or on this thread."""
        if self._last is None:
            then()
        else:
            self._last.add_done_callback(lambda _: then())

    def end(self) -> None:
        """Ends the thread after its call."""
        self._jobs.put(None)

    def _work(self) -> None:
        while job := self._jobs.get():
            future, function, arguments = job
            try:
                future.set_result(function(*arguments))
            except Exception as error:
                future.set_exception(error)


class CallThreads:
    """Threads that are borrowed for one call, or a few, by any thread."""

    def __init__(self, count: int, rows: int, row_bytes: int):
        self.all = [CallThread(rows, row_bytes) for _ in range(count)]
        self._free = list(self.all)
        self._borrowed = 0
        self._closed = False
        self._changed = threading.Condition()

    @contextmanager
    def borrow(self, deadline: float) -> Iterator[CallThread | None]:
        """Lends a free thread; None where none is free in time, where all hang, and after
        `close`."""
        thread = self._take(deadline)
        try:
            yield thread
        finally:
            if thread is not None:
                self._return(thread)

    def close(self, seconds: float) -> bool:
        """Lends no more, and ends the threads. Returns whether all calls ended in this time."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            idle = self._changed.wait_for(lambda: len(self._free) == len(self.all), seconds)
        for thread in self.all:
            thread.end()
        return idle

    def _take(self, deadline: float) -> CallThread | None:
        def settled() -> bool:
            return bool(self._free) or not self._borrowed or self._closed

        with self._changed:
            self._changed.wait_for(settled, max(0.0, deadline - time.monotonic()))
            if self._closed or not self._free:
                return None
            self._borrowed += 1
            return self._free.pop()

    def _return(self, thread: CallThread) -> None:
        """Takes a thread back, at once or when its call has ended."""

        def idle() -> None:
            with self._changed:
                self._free.append(thread)
                self._changed.notify_all()

        thread.when_idle(idle)
        with self._changed:
            self._borrowed -= 1
            self._changed.notify_all()
