"""Terminal output of commands: tables, and several streams of text at once."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import TextIO

LINE_CHARS = 76  # of a line of a stream
REDRAW_SECONDS = 0.1
WAITING_LINE_SECONDS = 10.0
LIVE_ROWS = 2  # of text for each stream that is drawn in place


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats a table, its first column aligned to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(headers, *rows)]
    lines = [
        [h.ljust(w) if i == 0 else h.rjust(w) for i, (h, w) in enumerate(zip(row, widths))]
        for row in (headers, *rows)
    ]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("  ".join(line).rstrip() for line in lines)


class Waiting:
    """Shows for how long something takes: in place on a terminal, else a line now and then."""

    def __init__(self, what: str, out: TextIO | None = None):
        self._out = sys.stdout if out is None else out
        self._live = self._out.isatty()
        self._what = what
        self._began = time.monotonic()
        self._shown = 0.0
        self._show()

    def __call__(self) -> None:
        """Updates the display; called while the work goes on."""
        if self.seconds - self._shown >= (1.0 if self._live else WAITING_LINE_SECONDS):
            self._show()

    def done(self) -> None:
        """Shows a last time for how long it took."""
        self._show(end="\n")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def _show(self, end: str = "") -> None:
        self._shown = self.seconds
        line = f"{self._what}: {self._shown:.0f} s"
        self._out.write(f"\r\x1b[2K{line}{end}" if self._live else f"{line}\n")
        self._out.flush()


class Streams:
    """Shows texts that grow at the same time: drawn in place on a terminal, else written line by
    line after the name of each."""

    def __init__(self, names: Sequence[str], out: TextIO | None = None):
        self._out = sys.stdout if out is None else out
        self._live = self._out.isatty()
        self._texts = dict.fromkeys(names, "")
        self._notes = dict.fromkeys(names, "")
        self._width = max(map(len, names))
        self._drawn = 0
        self._at = 0.0

    def note(self, name: str, note: str) -> None:
        """Shows what a stream is doing."""
        self._notes[name] = note
        if self._live:
            self._draw()
        else:
            self._write(name, f"[{note}]")

    def add(self, name: str, text: str) -> None:
        """Adds text to a stream."""
        self._texts[name] += text
        if self._live:
            self._draw()
            return
        *lines, last = _lines(self._texts[name])
        for line in lines:
            self._write(name, line)
        self._texts[name] = last

    def end(self, name: str, note: str) -> None:
        """Ends a stream: shows its last text and a note."""
        if not self._live and self._texts[name]:
            self._write(name, self._texts[name])
        self.note(name, note)

    def close(self) -> None:
        """Draws all streams a last time, with all of each text."""
        if self._live:
            self._draw(last=True)

    def _write(self, name: str, line: str) -> None:
        print(f"{name:{self._width}} | {line}", file=self._out, flush=True)

    def _draw(self, last: bool = False) -> None:
        if not last and time.monotonic() - self._at < REDRAW_SECONDS:
            return
        self._at = time.monotonic()
        width = shutil.get_terminal_size().columns - self._width - 4
        lines = []
        for name, text in self._texts.items():
            body = textwrap.wrap(" ".join(text.split()), width)
            shown = [
                self._notes[name],
                *(body if last else body[-LIVE_ROWS:] + [""] * (LIVE_ROWS - len(body))),
            ]
            lines += [
                f"{name if i == 0 else '':{self._width}} | {line}" for i, line in enumerate(shown)
            ]
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        self._out.write(up + "".join(f"\x1b[2K{line}\n" for line in lines) + "\x1b[J")
        self._out.flush()
        self._drawn = len(lines)


def _lines(text: str) -> list[str]:
    """Splits a text into whole lines, long ones broken at a space, and the rest."""
    lines = []
    for line in (parts := text.split("\n"))[:-1]:
        lines += textwrap.wrap(line, LINE_CHARS) or [""]
    remainder = parts[-1]
    while len(remainder) > LINE_CHARS and " " in remainder[1:LINE_CHARS]:
        cut = remainder.rindex(" ", 1, LINE_CHARS)
        lines.append(remainder[:cut])
        remainder = remainder[cut + 1 :]
    return [*lines, remainder]
