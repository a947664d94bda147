"""For what happens on other threads, soon, and for what takes its time."""

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any


def eventually(condition, seconds: float = 60.0) -> None:
    """Waits until a condition holds. seconds: most that may take where others have the cores."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


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
