"""Writes JSON in pieces: brackets, separators, names, and what each piece is part of."""

from __future__ import annotations

import dataclasses

from jaxserve.text.chat_output.json_values import json_text

_BRACKETS = {"{": "{}", "[": "[]", "(": "[]"}  # written for a bracket that was read


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A piece of JSON.

    member: name of the outermost object's member whose value it is part of; None for what is
    between these, and for members of a name that was there before. ends: whether it is that
    value's last.
    """

    text: str
    member: str | None = None
    ends: bool = False


@dataclasses.dataclass(slots=True)
class _Open:
    """A bracket that is open. entries: those in it that were written."""

    bracket: str
    entries: int = 0


class JsonWriter:
    """Writes one object or list."""

    def __init__(self) -> None:
        self._stack: list[_Open] = []
        self._members: set[str] = set()  # those whose values were begun
        self._member: str | None = None  # the one whose value is written
        self._pieces: list[Piece] = []
        self._texts: list[str] = []  # of the piece that is written

    @property
    def depth(self) -> int:
        """Number of brackets that are open."""
        return len(self._stack)

    @property
    def in_object(self) -> bool:
        """True directly within an object, where names come before values."""
        return bool(self._stack) and self._stack[-1].bracket == "{"

    def has_open(self, bracket: str) -> bool:
        """Returns whether a bracket is open, which may be an outer one."""
        return any(each.bracket == bracket for each in self._stack)

    def take(self) -> list[Piece]:
        """Removes and returns what was written."""
        self._end_piece()
        pieces = self._pieces
        self._pieces = []
        return pieces

    def write(self, text: str) -> None:
        """Writes a text as it is, as part of the value that was begun."""
        self._texts.append(text)

    def begin_value(self, name: str) -> None:
        """Writes what stands before a value: a comma, and its name in an object."""
        inner = self._stack[-1]
        separator = ", " * (inner.entries > 0)
        inner.entries += 1
        if inner.bracket != "{":
            self.write(separator)
            return
        self.write(f"{separator}{json_text(name)}: ")
        if len(self._stack) == 1 and name not in self._members:
            self._end_piece()
            self._members.add(name)
            self._member = name

    def end_value(self, whole: bool = True) -> None:
        """Ends a value. whole: False for one that was cut off."""
        if len(self._stack) == 1:
            self._end_piece(ends=whole)
            self._member = None

    def open(self, bracket: str, name: str) -> None:
        """Opens a bracket, which is a value of this name unless it is the first."""
        if self._stack:
            self.begin_value(name)
        self.write(_BRACKETS[bracket][0])
        self._stack.append(_Open(bracket))

    def close(self, bracket: str) -> None:
        """Closes a bracket that is open, with those in it."""
        while self.close_one() != bracket:
            pass

    def close_one(self) -> str:
        """Closes the innermost bracket, and returns it."""
        bracket = self._stack.pop().bracket
        self.write(_BRACKETS[bracket][1])
        self.end_value()
        return bracket

    def close_all(self) -> None:
        """Closes all brackets."""
        while self._stack:
            self.close_one()

    def _end_piece(self, ends: bool = False) -> None:
        if self._texts or ends:
            self._pieces.append(Piece("".join(self._texts), self._member, ends))
            self._texts = []
