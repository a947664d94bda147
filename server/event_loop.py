"""The server's event loop. It is asyncio's, but hears few sockets in each of its turns.

asyncio hears all sockets that have something, and then does all that they ask for, before it looks at the time or at anything else. A crowd
of callers who come at once, each of whom costs half a millisecond, would hold up those who are served already.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

AT_ONCE = 8                                             # sockets that are heard in a turn, at most
T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` with this loop."""
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(FewAtOnce())) as runner:
        return runner.run(main)


class FewAtOnce(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        first = random.randrange(len(ready)) if len(ready) > AT_ONCE else 0          # else the same ones might come first each time
        return (ready + ready)[first : first + min(AT_ONCE, len(ready))]
