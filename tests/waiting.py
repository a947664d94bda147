"""For what happens on other threads, soon, and for what takes its time."""

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

SOON = 60.0  # seconds that may pass, where others have the cores, for what takes none by itself


def eventually(condition, seconds: float = SOON) -> None:
    """Waits until a condition holds, for `seconds` at most."""
    deadline = time.monotonic() + seconds
    pause = 0.001
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(pause)
        pause = min(1.2 * pause, 0.01)  # a condition of what takes long may cost much


def tried(times: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test that measures seconds up to `times` times, since others may have the cores
    meanwhile: it must pass once."""

    def wrapper(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **fields: Any) -> None:
            for _ in range(times - 1):
                with contextlib.suppress(AssertionError):
                    return test(*args, **fields)
            return test(*args, **fields)

        return run

    return wrapper
