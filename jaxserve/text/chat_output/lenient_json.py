"""Reads objects and lists as models write them, and writes the JSON that they stand for.

Models leave out brackets, quotes and commas, write too many of them, line breaks within strings,
literals of Python, single quotes, or stop in the middle. What `LenientJson` returns is JSON,
whatever it reads; JSON itself keeps its values to the letter, also numbers of many digits.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from jaxserve.text.chat_output.json_values import escape_at, json_text, json_word

MAX_DEPTH = 64  # brackets within brackets; opening ones beyond are left out
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_JSON_BRACKETS = {"{": "{}", "[": "[]", "(": "[]"}
# what follows a string, and one that is a name
_BEHIND_STRINGS = {False: (",", ";", "}", "]", ")"), True: (":", "=", "}")}


@dataclasses.dataclass(frozen=True, slots=True)
class JsonSyntax:
    """The notation of strings. quotes: texts that begin and end strings, and whether these have
    escapes; those without may hold anything."""

    quotes: Mapping[str, bool]


JSON = JsonSyntax(MappingProxyType({'"': True, "'": True}))

State = Literal["key", "colon", "value", "after", "string"]


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


class LenientJson:
    """Reads one object or list, in pieces; the text of the first piece must begin with it.

    ends: texts at which it ends at the latest, but for those within strings. closed: whether its
    end was there.
    """

    def __init__(self, syntax: JsonSyntax = JSON, ends: Sequence[str] = ()):
        self.closed = False
        self._ends = tuple(ends)
        self._marks = (*ends, *syntax.quotes)
        self._quotes = syntax.quotes
        self._text = ""
        self._at = 0
        self._ended = False
        self._stack: list[_Open] = []
        self._state: State = "value"
        self._quote = ""
        self._key: str | None = None  # of a member whose value has not begun
        self._reads_key = False
        self._members: set[str] = set()  # those whose values were begun
        self._member: str | None = None  # the one whose value is read
        self._output: list[Piece] = []

    @property
    def rest(self) -> str:
        """Text behind the end."""
        return self._text[self._at :]

    def push(self, text: str) -> list[Piece]:
        """Reads further text; returns the JSON that is certain now."""
        self._text = self.rest + text
        self._at = 0
        while not self.closed and self._step():
            pass
        output = self._output
        self._output = []
        return output

    def finish(self) -> list[Piece]:
        """Ends the text; returns the JSON that is left, with what was open closed."""
        self._ended = True
        output = self.push("")
        if not self.closed:
            self._close_all()
        output += self._output
        self._output = []
        return output

    def _step(self) -> bool:
        """Reads on; returns False where that needs more text."""
        if self._state == "string":
            return self._read_string()
        self._skip_spaces()
        if self._at == len(self._text) or self._begins_one_of(self._marks):
            return False
        if any(self._text.startswith(end, self._at) for end in self._ends):
            self._close_all()
            self.closed = True
            return False
        steps = {
            "key": self._read_key,
            "colon": self._read_colon,
            "value": self._read_value,
            "after": self._read_after,
        }
        return steps[self._state]()

    def _begins_one_of(self, texts: Sequence[str]) -> bool:
        """Returns True if the text ends in the middle of one of these."""
        left = len(self._text) - self._at
        return not self._ended and any(
            left < len(text) and text.startswith(self._text[self._at :]) for text in texts
        )

    def _skip_spaces(self) -> None:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1

    def _read_key(self) -> bool:
        char = self._text[self._at]
        if self._begin_string(is_key=True):
            return True
        if char in "}])":
            self._close(char)
        elif char in ",;:=[{(":
            self._at += 1
        else:
            word = self._word(":=,{}[]\n\"'")
            if word is None:
                return False
            self._key = word
            self._state = "colon"
        return True

    def _read_colon(self) -> bool:
        char = self._text[self._at]
        if char in ":=":
            self._at += 1
            self._state = "value"
        elif char in ",}])":  # a name without a value
            self._key = None
            self._state = "key"
        else:
            self._state = "value"
        return True

    def _read_value(self) -> bool:
        char = self._text[self._at]
        if self._begin_string(is_key=False):
            return True
        if char in "{[(":
            self._open(char)
        elif char in "}])":
            self._key = None
            self._close(char)
        elif char in ",;:=":
            self._at += 1
            if char in ",;":
                self._key = None
                self._expect_entry()
        else:
            word = self._word(",}]\n" + ")" * self._has_open("("), r"\s[\"']")
            if word is None:
                return False
            self._begin_value()
            self._emit(json_word(word))
            self._end_value()
        return True

    def _read_after(self) -> bool:
        char = self._text[self._at]
        if char in "}])":
            self._close(char)
        else:
            self._at += char in ",;:="
            self._expect_entry()
        return True

    def _expect_entry(self) -> None:
        self._state = "value"
        if self._stack and self._stack[-1].bracket == "{":
            self._state = "key"

    def _word(self, stops: str, *patterns: str) -> str | None:
        """Takes a text without quotes, up to one of some characters, patterns or ends; None where
        more text is needed."""
        pattern = "|".join([f"[{re.escape(stops)}]", *patterns, *map(re.escape, self._ends)])
        match = re.compile(pattern).search(self._text, self._at + 1)
        if match is None and not self._ended:
            return None
        end = match.start() if match else len(self._text)
        word = self._text[self._at : end].strip()
        self._at = end
        return word

    def _begin_string(self, is_key: bool) -> bool:
        """Takes a quote, if one comes next."""
        for quote in self._quotes:
            if self._text.startswith(quote, self._at):
                self._at += len(quote)
                self._quote = quote
                self._reads_key = is_key
                self._state = "string"
                if is_key:
                    self._key = ""
                else:
                    self._begin_value()
                    self._emit('"')
                return True
        return False

    def _read_string(self) -> bool:
        escapes = self._quotes[self._quote]
        stop = re.escape(self._quote[0]) + r"\\" * escapes
        match = re.compile(f"[{stop}]").search(self._text, self._at)
        end = match.start() if match else len(self._text)
        self._write(json.dumps(self._text[self._at : end], ensure_ascii=False)[1:-1])
        self._at = end
        if match is None:
            return False
        if match[0] == "\\":
            return self._read_escape()
        return self._read_quote()

    def _write(self, escaped: str) -> None:
        """Adds to a string: to a name, or to the output."""
        if self._reads_key:
            assert self._key is not None
            self._key += escaped
        elif escaped:
            self._emit(escaped)

    def _read_escape(self) -> bool:
        escape = escape_at(self._text, self._at, self._ended)
        if escape is None:
            return False
        written, length = escape
        self._at += length
        self._write(written)
        return True

    def _read_quote(self) -> bool:
        """Reads what may be the end of a string: for it to be, what follows must be what follows
        strings, else it is a quote that was not escaped."""
        if not self._text.startswith(self._quote, self._at):
            if self._begins_one_of((self._quote,)):
                return False
            return self._keep_quote()
        ends = not self._quotes[self._quote] or self._ends_string()
        if ends is None:
            return False
        if not ends:
            return self._keep_quote()
        self._at += len(self._quote)
        if self._reads_key:
            self._state = "colon"
            self._key = json.loads(f'"{self._key}"')
        else:
            self._emit('"')
            self._end_value()
        return True

    def _keep_quote(self) -> bool:
        self._write(json.dumps(self._text[self._at])[1:-1])
        self._at += 1
        return True

    def _ends_string(self) -> bool | None:
        """Returns whether a quote ends a string; None where that needs more text."""
        begin = self._at
        self._at += 1
        self._skip_spaces()
        following = self._at
        undecided = following == len(self._text) or self._begins_one_of(self._ends)
        self._at = begin
        followers = _BEHIND_STRINGS[self._reads_key]
        if self._text.startswith((*followers, *self._ends), following):
            return True
        if undecided and not self._ended:
            return None
        return following == len(self._text)

    def _open(self, char: str) -> None:
        self._at += 1
        if len(self._stack) < MAX_DEPTH:
            if self._stack:
                self._begin_value()
            self._emit(_JSON_BRACKETS[char][0])
            self._stack.append(_Open(char))
            self._expect_entry()

    def _has_open(self, bracket: str) -> bool:
        return any(each.bracket == bracket for each in self._stack)

    def _close(self, char: str) -> None:
        """Closes the innermost bracket that this one may close, with those in it; none if there is
        none."""
        self._at += 1
        opening = next(opening for opening, closing in _CLOSING.items() if closing == char)
        if self._has_open(opening):
            while self._close_one() != opening:
                pass
            self.closed = not self._stack

    def _close_one(self) -> str:
        bracket = self._stack.pop().bracket
        self._emit(_JSON_BRACKETS[bracket][1])
        self._end_value()
        return bracket

    def _close_all(self) -> None:
        if self._state == "string" and not self._reads_key:
            self._emit('"')
            self._end_value(whole=False)
        self._key = None
        while self._stack:
            self._close_one()

    def _begin_value(self) -> None:
        """Writes what stands before a value: a comma, a name."""
        inner = self._stack[-1]
        separator = ", " * (inner.entries > 0)
        inner.entries += 1
        if inner.bracket == "{":
            key = self._key or ""
            self._key = None
            self._emit(f"{separator}{json_text(key)}: ")
            if len(self._stack) == 1 and key not in self._members:
                self._members.add(key)
                self._member = key
        else:
            self._emit(separator)

    def _end_value(self, whole: bool = True) -> None:
        self._state = "after"
        if len(self._stack) == 1:
            self._output.append(Piece("", self._member, ends=whole))
            self._member = None

    def _emit(self, text: str) -> None:
        self._output.append(Piece(text, self._member))


def repaired(text: str) -> str:
    """Returns the JSON of an object or list that a text begins with; '' if it begins with none."""
    text = text.strip()
    if text[:1] not in ("{", "["):
        return ""
    reader = LenientJson()
    pieces = reader.push(text) + reader.finish()
    return "".join(piece.text for piece in pieces)
