"""The progress of everything that takes a while and goes in steps with names: a bar on a terminal,
else a line of the log now and then."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator

STYLE = "{desc} {bar:30} {n}/{total} {elapsed}<{remaining} {postfix}"
OPEN_STYLE = "{desc} {n} {elapsed} {postfix}"
LINE_SECONDS = 10.0

log = logging.getLogger(__name__)


@contextlib.contextmanager
def progress_bar(name: str, total: int | None, show: bool) -> Iterator[Callable[[str], None]]:
    """Yields a function that moves a bar on by one, with the name of what is done. total: None if
    it is unknown. show: False for lines of the log in its place."""
    if not show:
        yield _log_lines(name, total)
        return
    from tqdm import tqdm

    style = OPEN_STYLE if total is None else STYLE
    with tqdm(total=total, desc=f"{name:10}", bar_format=style) as bar:

        def step(name: str = "") -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update()

        yield step


@contextlib.contextmanager
def terminal_bar(name: str, total: int | None) -> Iterator[Callable[[str], None]]:
    """Shows a bar on a terminal and nothing elsewhere, for commands whose output is a table."""
    if not sys.stderr.isatty():
        yield lambda name: None
        return
    with progress_bar(name, total, True) as step:
        yield step


def _log_lines(name: str, total: int | None) -> Callable[[str], None]:
    """Logs how far it is: at the beginning and the end, where that is known, and each ten seconds
    between them."""
    began = told = time.monotonic()
    count = 0
    if total:
        log.info("%s: 0 of %d", name, total)

    def step(name_of_step: str = "") -> None:
        nonlocal count, told
        count += 1
        now = time.monotonic()
        seconds = now - began
        if count == total:
            log.info("%s: all %d in %.0f s", name, total, seconds)
        elif now - told >= LINE_SECONDS:
            told = now
            log.info("%s: %d%s", name, count, _left(count, total, seconds))

    return step


def _left(count: int, total: int | None, seconds: float) -> str:
    """Describes the total, and how long the remaining steps will take."""
    if total is None:
        return ""
    return f" of {total}, about {seconds / count * (total - count):.0f} s left"
