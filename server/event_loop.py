"""The server's event loop. It is asyncio's, but hears few sockets in each of its turns.

asyncio hears all sockets that have something, and then does all that they ask for, before it looks
at the time or at anything else. A crowd of callers who come at once, each of whom costs a
millisecond or two, would hold up those who are served already.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

AT_ONCE = 4  # sockets that are heard in a turn, at most
T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` with this loop."""
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(FewAtOnce())) as runner:
        return runner.run(main)


async def beside(large: bool, work: Callable[[], T]) -> T:
    """What some work gives: where it is large, on another thread, so that the loop goes on."""
    return await asyncio.to_thread(work) if large else work()


class FewAtOnce(selectors.DefaultSelector):
    """Tells of at most AT_ONCE sockets that are ready: those that have waited longest."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = 0
        # by number of a socket: the turn from which on it has waited
        self._since: dict[int, int] = {}
        # the loop's, where signals come in: the first that is registered
        self._own: int | None = None

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = super().register(fileobj, events, data)
        self._own = key.fd if self._own is None else self._own
        return key

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        if len(ready) <= AT_ONCE:
            self._since.clear()
            return ready
        self._turn += 1
        since = {
            key.fd: 0 if key.fd == self._own else self._since.get(key.fd, self._turn)
            for key, _ in ready
        }
        ready.sort(key=lambda one: since[one[0].fd])
        for key, _ in ready[:AT_ONCE]:
            del since[key.fd]
        self._since = since
        return ready[:AT_ONCE]
