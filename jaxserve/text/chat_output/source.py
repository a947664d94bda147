"""Text that comes in pieces, and generators that parse it.

A parser is a generator: it takes text from its `Source`, yields parts, and yields None when it
needs more text before it can go on. Parsers call each other by `yield from`, so that each reads as
if all of the text were there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from jaxserve.text.chat_output.parts import Part

T = TypeVar("T")
Parser = Generator[Part | None, None, T]


class Source:
    """Text that no parser has taken yet. ended: no more will come."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False

    def take(self, length: int) -> str:
        """Removes and returns the first characters."""
        taken = self.text[:length]
        self.text = self.text[length:]
        return taken

    def take_to(self, end: int) -> str:
        """Removes and returns the characters before an index; all of them if it is negative."""
        return self.take(end if end >= 0 else len(self.text))


def before(source: Source, marks: Sequence[str], part: Callable[[str], Part]) -> Parser[str]:
    """Yields the text before the first of some marks, as parts, and takes the mark. Returns it; ''
    where the text ends without one."""
    found = re.compile("|".join(map(re.escape, marks)))
    while True:
        match = found.search(source.text)
        if match:
            end = match.start()
        elif source.ended:
            end = -1
        else:  # what may begin a mark is kept back
            end = len(source.text) - max(_held(source.text, mark) for mark in marks)
        text = source.take_to(end)
        if text:
            yield part(text)
        if match:
            return source.take(len(match[0]))
        if source.ended:
            return ""
        yield None


def _held(text: str, mark: str) -> int:
    """Counts the characters at the end of a text that may begin a mark."""
    longest = min(len(mark) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)


def everything(source: Source, part: Callable[[str], Part]) -> Parser[None]:
    """Yields all of the text as parts."""
    while True:
        if source.text:
            yield part(source.take_to(-1))
        if source.ended:
            return
        yield None


def next_char(source: Source) -> Parser[str]:
    """Takes white space; returns the character that follows, which stays, or '' at the end."""
    while True:
        source.text = source.text.lstrip()
        if source.text or source.ended:
            return source.text[:1]
        yield None


def take_mark(source: Source, mark: str) -> Parser[bool]:
    """Takes white space and a mark if they come next; returns whether they did, else takes
    nothing."""
    while True:
        text = source.text.lstrip()
        if text.startswith(mark):
            source.take(len(source.text) - len(text) + len(mark))
            return True
        if source.ended or not mark.startswith(text):
            return False
        yield None


def until(source: Source, mark: str) -> Parser[str]:
    """Takes the text before a mark, and the mark, once it is there; or all of it once it has ended
    without the mark ('' is none)."""
    searched = 0
    while True:
        at = source.text.find(mark, searched) if mark else -1
        if at >= 0:
            text = source.take(at)
            source.take(len(mark))
            return text
        if source.ended:
            return source.take_to(-1)
        searched = max(0, len(source.text) - len(mark))
        yield None


def take_match(source: Source, pattern: re.Pattern[str], end: str) -> Parser[re.Match[str] | None]:
    """Takes what a pattern matches at the beginning; None, and nothing is taken, once the text has
    ended or holds `end` ('' is none) without a match."""
    while True:
        match = pattern.match(source.text)
        if match:
            source.take(match.end())
            return match
        if source.ended or (end and end in source.text):
            return None
        yield None


class Nesting:
    """Finds where a bracket that was opened is closed, in text that comes in pieces. quotes: the
    characters that begin and end strings. depth: brackets that are open."""

    def __init__(self, quotes: str = '"', depth: int = 0):
        self.depth = depth
        self._quote = ""
        self._escaped = False
        self._marks = re.compile(rf"[{quotes}\\()\[\]{{}}]")
        self._quotes = quotes

    def end(self, text: str) -> int:
        """Reads further text; returns the position behind the bracket that closes the outermost,
        -1 where it is not in this text."""
        if self._escaped and text:
            start = 1
            self._escaped = False
        else:
            start = 0
        while match := self._marks.search(text, start):
            start = match.end()
            char = match[0]
            if char == "\\":
                self._escaped = bool(self._quote) and start == len(text)
                start += bool(self._quote)
            elif self._quote:
                if char == self._quote:
                    self._quote = ""
            elif char in self._quotes:
                self._quote = char
            else:
                self.depth += 1 if char in "([{" else -1
                if self.depth <= 0:
                    return start
        return -1


def nested(source: Source, nesting: Nesting, part: Callable[[str], Part] | None) -> Parser[bool]:
    """Takes text up to the bracket that closes the outermost, as parts (None: as nothing). Returns
    whether it was closed."""
    while True:
        end = nesting.end(source.text)
        text = source.take_to(end)
        if text and part is not None:
            yield part(text)
        if end >= 0 or source.ended:
            return end >= 0
        yield None
