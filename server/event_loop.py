"""The server's asyncio event loop, whose selector reports only a few ready sockets at a time.

Stock asyncio handles every ready socket before it looks at timers or at work posted by other
threads. A burst of new connections, each costing 1 to 2 ms, would then stall streams in progress.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

MAX_READY_SOCKETS = 4  # handled in one iteration of the loop
T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end, like `asyncio.run`, on a loop with `FairSelector`."""
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(FairSelector())) as runner:
        return runner.run(main)


async def run_in_thread_if(large: bool, work: Callable[[], T]) -> T:
    """Runs `work()` inline if small, else in a thread; returns its result."""
    return await asyncio.to_thread(work) if large else work()


class FairSelector(selectors.DefaultSelector):
    """A selector that reports at most MAX_READY_SOCKETS ready sockets, longest waiting first."""

    def __init__(self) -> None:
        super().__init__()
        self._iteration = 0
        # by file descriptor: the iteration since which it has been ready but not reported
        self._ready_since: dict[int, int] = {}
        # by which signals and other threads wake the loop: asyncio registers it first
        self._wakeup_fd: int | None = None

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = super().register(fileobj, events, data)
        if self._wakeup_fd is None:
            self._wakeup_fd = key.fd
        return key

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        if len(ready) <= MAX_READY_SOCKETS:
            self._ready_since.clear()
            return ready
        self._iteration += 1
        since = {key.fd: self._ready_since.get(key.fd, self._iteration) for key, _ in ready}
        if self._wakeup_fd in since:
            since[self._wakeup_fd] = 0
        ready.sort(key=lambda one: since[one[0].fd])
        reported = ready[:MAX_READY_SOCKETS]
        for key, _ in reported:
            del since[key.fd]
        self._ready_since = since
        return reported
