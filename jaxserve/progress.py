"""The progress bar of everything that takes a while and goes in steps with names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

STYLE = "{desc} {bar:30} {n}/{total} {elapsed}<{remaining} {postfix}"
OPEN_STYLE = "{desc} {n} {elapsed} {postfix}"


@contextlib.contextmanager
def progress_bar(name: str, total: int | None, show: bool) -> Iterator[Callable[[str], None]]:
    """A bar; calling what it gives moves it on by one, with the name of what is done. total: None
    where nobody knows."""
    from tqdm import tqdm

    style = OPEN_STYLE if total is None else STYLE
    with tqdm(total=total, desc=f"{name:10}", disable=not show, bar_format=style) as bar:

        def step(name: str = "") -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update()

        yield step
