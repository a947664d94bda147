"""Reads objects and lists as models write them, and writes the JSON that they stand for.

Models leave out brackets, quotes and commas, write too many of them, line breaks within strings,
literals of Python, single quotes, or stop in the middle. What `LenientJson` returns is JSON,
whatever it reads; JSON itself keeps its values to the letter, also numbers of many digits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from jaxserve.text.chat_output.json_strings import JSON, JsonString, JsonSyntax
from jaxserve.text.chat_output.json_values import json_word
from jaxserve.text.chat_output.json_writer import JsonWriter, Piece

MAX_DEPTH = 64  # brackets within brackets; opening ones beyond are left out
MAX_WORD = 2**16  # characters without quotes that are one value
_OPENING = {"}": "{", "]": "[", ")": "("}
_SPACES = re.compile(r"\s*")

State = Literal["key", "colon", "value", "after", "string"]


class LenientJson:
    """Reads one object or list, in pieces; the text of the first piece must begin with it.

    ends: texts at which it ends at the latest, but for those within strings. closed: whether its
    end was there.
    """

    def __init__(self, syntax: JsonSyntax = JSON, ends: Sequence[str] = ()):
        self.closed = False
        self._syntax = syntax
        self._ends = tuple(ends)
        self._marks = (*ends, *syntax.quotes)
        self._longest = max(map(len, self._marks))
        marks = "|".join(map(re.escape, self._ends)) or "(?!)"
        self._key_end = re.compile(rf"[:=,{{}}\[\]\n\"']|{marks}")
        self._word_end = re.compile(rf"[,}}\]\n]|\s[\"']|{marks}")
        self._word_end_in_tuple = re.compile(rf"[,}})\]\n]|\s[\"']|{marks}")
        self._text = ""
        self._at = 0
        self._searched = 1  # characters in which the word that comes next does not end
        self._ended = False
        self._writer = JsonWriter()
        self._state: State = "value"
        self._key = ""  # of the member whose value has not begun
        self._string = JsonString(syntax, "")  # the one that is read
        self._reads_key = False  # it is a name
        self._steps = {
            "key": self._read_key,
            "colon": self._read_colon,
            "value": self._read_value,
            "after": self._read_after,
        }

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
        return self._writer.take()

    def finish(self) -> list[Piece]:
        """Ends the text; returns the JSON that is left, with what was open closed."""
        self._ended = True
        pieces = self.push("")
        if not self.closed:
            self._close_all()
        return pieces + self._writer.take()

    def _step(self) -> bool:
        """Reads on; returns False where that needs more text."""
        if self._state == "string":
            return self._read_string()
        spaces = _SPACES.match(self._text, self._at)
        assert spaces is not None
        self._at = spaces.end()
        if self._at == len(self._text) or self._ends_in_mark():
            return False
        if self._text.startswith(self._ends, self._at):
            self._close_all()
            self.closed = True
            return False
        return self._steps[self._state]()

    def _ends_in_mark(self) -> bool:
        """Returns True if the text ends in the middle of a mark."""
        left = len(self._text) - self._at
        if self._ended or left >= self._longest:
            return False
        rest = self._text[self._at :]
        return any(left < len(mark) and mark.startswith(rest) for mark in self._marks)

    # --- what an object or a list consists of

    def _read_key(self) -> bool:
        char = self._text[self._at]
        if self._begin_string(is_key=True):
            return True
        if char in "}])":
            self._close(char)
        elif char in ",;:=[{(":
            self._at += 1
        else:
            return self._read_bare_key()
        return True

    def _read_bare_key(self) -> bool:
        word = self._word(self._key_end)
        if word is None:
            return False
        self._key = word
        self._state = "colon"
        return True

    def _read_colon(self) -> bool:
        char = self._text[self._at]
        self._state = "value"
        if char in ":=":
            self._at += 1
        elif char in ",}])":  # a name without a value
            self._key = ""
            self._state = "key"
        return True

    def _read_value(self) -> bool:
        char = self._text[self._at]
        if self._begin_string(is_key=False):
            return True
        if char in "{[(":
            self._open(char)
        elif char in "}])":
            self._key = ""
            self._close(char)
        elif char in ",;":
            self._at += 1
            self._key = ""
            self._expect_entry()
        elif char in ":=":
            self._at += 1
        else:
            return self._read_bare_value()
        return True

    def _read_bare_value(self) -> bool:
        in_tuple = self._writer.has_open("(")
        word = self._word(self._word_end_in_tuple if in_tuple else self._word_end)
        if word is None:
            return False
        self._begin_value()
        self._writer.write(json_word(word))
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
        self._state = "key" if self._writer.in_object else "value"

    def _word(self, end: re.Pattern[str]) -> str | None:
        """Takes a text without quotes, up to its end; None where more text is needed."""
        latest = self._at + MAX_WORD
        match = end.search(self._text, self._at + self._searched, latest)
        if match is None and not self._ended and len(self._text) < latest:
            self._searched = max(1, len(self._text) - self._at - self._longest)
            return None
        self._searched = 1
        stop = match.start() if match else latest
        word = self._text[self._at : stop].strip()
        self._at = min(stop, len(self._text))
        return word

    # --- strings

    def _begin_string(self, is_key: bool) -> bool:
        """Takes a quote, if one comes next."""
        for quote in self._syntax.quotes:
            if self._text.startswith(quote, self._at):
                self._at += len(quote)
                self._string = JsonString(self._syntax, quote, is_key, self._ends)
                self._reads_key = is_key
                self._state = "string"
                if not is_key:
                    self._begin_value()
                    self._writer.write('"')
                return True
        return False

    def _read_string(self) -> bool:
        written, self._at = self._string.read(self._text, self._at, self._ended)
        if not self._reads_key:
            self._writer.write(written)
        if not self._string.closed:
            return False
        if self._reads_key:
            self._key = self._string.value
            self._state = "colon"
        else:
            self._writer.write('"')
            self._end_value()
        return True

    # --- brackets and values

    def _begin_value(self) -> None:
        self._writer.begin_value(self._key)
        self._key = ""

    def _end_value(self) -> None:
        self._writer.end_value()
        self._state = "after"

    def _open(self, char: str) -> None:
        self._at += 1
        if self._writer.depth < MAX_DEPTH:
            self._writer.open(char, self._key)
            self._key = ""
            self._expect_entry()

    def _close(self, char: str) -> None:
        """Closes the innermost bracket that this one may close, with those in it; none if there is
        none."""
        self._at += 1
        if self._writer.has_open(_OPENING[char]):
            self._writer.close(_OPENING[char])
            self._state = "after"
            self.closed = self._writer.depth == 0

    def _close_all(self) -> None:
        if self._state == "string" and not self._reads_key:
            self._writer.write('"')
            self._writer.end_value(whole=False)
        self._writer.close_all()


def repaired(text: str) -> str:
    """Returns the JSON of an object or list that a text begins with; '' if it begins with none."""
    text = text.strip()
    if text[:1] not in ("{", "["):
        return ""
    reader = LenientJson()
    pieces = reader.push(text) + reader.finish()
    return "".join(piece.text for piece in pieces)
