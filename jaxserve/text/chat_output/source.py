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

MAX_HEAD = 1024  # characters of what stands before a call's arguments


class Source:
    """Text that no parser has taken yet. ended: no more will come.

    A parser may try whether the text is what it reads: what it took after `begin_trial` comes back
    by `end_trial`, unless it called `commit`. commits: how often that was called.
    """

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        self.commits = 0
        self._trial: str | None = None

    @property
    def is_trial(self) -> bool:
        """True between `begin_trial` and `commit` or `end_trial`."""
        return self._trial is not None

    @property
    def exhausted(self) -> bool:
        """True if all of the text was taken."""
        return self.ended and not self.text

    def take(self, length: int) -> str:
        """Removes and returns the first characters."""
        taken = self.text[:length]
        self.text = self.text[length:]
        if self._trial is not None:
            self._trial += taken
        return taken

    def take_to(self, end: int) -> str:
        """Removes and returns the characters before an index; all of them if it is negative."""
        return self.take(end if end >= 0 else len(self.text))

    def put_back(self, text: str) -> None:
        """Puts back what was taken last."""
        self.text = text + self.text
        if self._trial is not None:
            self._trial = self._trial[: len(self._trial) - len(text)]

    def begin_trial(self) -> None:
        self._trial = ""

    def commit(self) -> None:
        self._trial = None
        self.commits += 1

    def end_trial(self) -> None:
        if self._trial is not None:
            self.text = self._trial + self.text
            self._trial = None


def before(source: Source, marks: Sequence[str], part: Callable[[str], Part]) -> Parser[str]:
    """Yields the text before the first of some marks, as parts, and takes the mark. Returns it; ''
    where the text ends without one."""
    yield from up_to(source, marks, part)
    return (yield from take_one_of(source, marks))


def up_to(source: Source, marks: Sequence[str], part: Callable[[str], Part]) -> Parser[None]:
    """Yields the text before the first of some marks, as parts; all of it without one."""
    found = re.compile("|".join(map(re.escape, marks)) or "$.")
    while True:
        match = found.search(source.text)
        if match:
            end = match.start()
        elif source.ended:
            end = -1
        else:  # what may begin a mark is kept back
            end = len(source.text) - held(source.text, marks)
        text = source.take_to(end)
        if text:
            yield part(text)
        if match or source.ended:
            return
        yield None


def held(text: str, marks: Sequence[str]) -> int:
    """Counts the characters at the end of a text that may begin one of some marks."""
    longest = min(len(text), max(map(len, marks), default=1) - 1)
    sizes = range(longest, 0, -1)
    return next((n for n in sizes if any(m.startswith(text[len(text) - n :]) for m in marks)), 0)


def everything(source: Source, part: Callable[[str], Part]) -> Parser[None]:
    """Yields all of the text as parts."""
    yield from up_to(source, (), part)


def spaces(source: Source) -> Parser[str]:
    """Takes and returns white space, up to what follows it or the end."""
    taken = ""
    while True:
        taken += source.take(len(source.text) - len(source.text.lstrip()))
        if source.text or source.ended:
            return taken
        yield None


def next_char(source: Source) -> Parser[str]:
    """Takes white space; returns the character that follows, which stays, or '' at the end."""
    yield from spaces(source)
    return source.text[:1]


def next_mark(source: Source, marks: Sequence[str]) -> Parser[str]:
    """Returns the mark that comes next, the longest of several, which stays; '' if none does."""
    while True:
        longer = any(m.startswith(source.text) and m != source.text for m in marks)
        if source.ended or not longer:
            return max(filter(source.text.startswith, marks), key=len, default="")
        yield None


def take_one_of(source: Source, marks: Sequence[str]) -> Parser[str]:
    """Takes and returns the mark that comes next, the longest of several; '' if none does."""
    return source.take(len((yield from next_mark(source, marks))))


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


def take_match(
    source: Source, pattern: re.Pattern[str], begun: re.Pattern[str]
) -> Parser[re.Match[str] | None]:
    """Takes what a pattern matches at the beginning; None where it does not.

    begun: pattern of whole texts that may match once more text has come; one that was cut off there
    is taken.
    """
    while True:
        if len(source.text) > MAX_HEAD or not begun.fullmatch(source.text):
            match = pattern.match(source.text)
            if match:
                source.take(match.end())
            return match
        if source.ended:
            source.take_to(-1)
            return None
        yield None
