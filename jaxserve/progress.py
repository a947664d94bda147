"""The progress bar of everything that takes a while and goes in steps with names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

STYLE = "{desc} {bar:30} {n}/{total} {elapsed} {postfix}"


@contextlib.contextmanager
def progress_bar(name: str, total: int, show: bool) -> Iterator[Callable[[str], None]]:
    """A bar; calling what it gives moves it on by one, with the name of what is done."""
    from tqdm import tqdm

    with tqdm(total=total, desc=f"{name:10}", disable=not show, bar_format=STYLE) as bar:

        def step(name: str = "") -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update()

        yield step
