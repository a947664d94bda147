"""How commands show things in a terminal: tables, and several streams of text at once."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import TextIO

LINE = 76  # characters after which a line of a stream is written
REDRAW = 0.1  # seconds between pictures
ROWS = 2  # of text for each stream in the live view


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns, the first one to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(headers, *rows)]
    lines = [
        [h.ljust(w) if i == 0 else h.rjust(w) for i, (h, w) in enumerate(zip(row, widths))]
        for row in (headers, *rows)
    ]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("  ".join(line).rstrip() for line in lines)


class Streams:
    """Texts that grow at the same time: drawn in place on a terminal, else written line by line
    with the name of each."""

    def __init__(self, names: Sequence[str], out: TextIO | None = None):
        self._out = sys.stdout if out is None else out
        self._live = self._out.isatty()
        self._texts = dict.fromkeys(names, "")
        self._notes = dict.fromkeys(names, "")
        self._width = max(map(len, names))
        self._drawn = 0
        self._at = 0.0

    def note(self, name: str, note: str) -> None:
        """What a stream is doing."""
        self._notes[name] = note
        if self._live:
            self._draw()
        else:
            self._write(name, f"[{note}]")

    def add(self, name: str, text: str) -> None:
        self._texts[name] += text
        if self._live:
            self._draw()
            return
        *lines, rest = _lines(self._texts[name])
        for line in lines:
            self._write(name, line)
        self._texts[name] = rest

    def end(self, name: str, note: str) -> None:
        """A stream has ended: its last text, and a note."""
        if not self._live and self._texts[name]:
            self._write(name, self._texts[name])
        self.note(name, note)

    def close(self) -> None:
        """The last picture, with all of each text."""
        if self._live:
            self._draw(last=True)

    def _write(self, name: str, line: str) -> None:
        print(f"{name:{self._width}} | {line}", file=self._out, flush=True)

    def _draw(self, last: bool = False) -> None:
        if not last and time.monotonic() - self._at < REDRAW:
            return
        self._at = time.monotonic()
        width = shutil.get_terminal_size().columns - self._width - 4
        lines = []
        for name, text in self._texts.items():
            body = textwrap.wrap(" ".join(text.split()), width)
            shown = [
                self._notes[name],
                *(body if last else body[-ROWS:] + [""] * (ROWS - len(body))),
            ]
            lines += [
                f"{name if i == 0 else '':{self._width}} | {line}" for i, line in enumerate(shown)
            ]
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        self._out.write(up + "".join(f"\x1b[2K{line}\n" for line in lines) + "\x1b[J")
        self._out.flush()
        self._drawn = len(lines)


def _lines(text: str) -> list[str]:
    """Whole lines of a text, long ones broken at a space, and what is left."""
    lines = []
    for line in (parts := text.split("\n"))[:-1]:
        lines += textwrap.wrap(line, LINE) or [""]
    rest = parts[-1]
    while len(rest) > LINE and " " in rest[1:LINE]:
        cut = rest.rindex(" ", 1, LINE)
        lines.append(rest[:cut])
        rest = rest[cut + 1 :]
    return [*lines, rest]
