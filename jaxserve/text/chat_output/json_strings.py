"""Reads strings as models write them: with line breaks, and quotes that were not escaped."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from jaxserve.text.chat_output.json_values import escape_at

MAX_GAP = 256  # characters of white space behind a quote, with which it ends a string
# what follows a string, and one that is a name
_BEHIND_STRINGS = {False: (",", ";", "}", "]", ")"), True: (":", "=", "}")}
_SPACES = re.compile(r"\s*")


@dataclasses.dataclass(frozen=True, slots=True)
class JsonSyntax:
    """The notation of strings. quotes: texts that begin and end strings, and whether these have
    escapes; those without may hold anything."""

    quotes: Mapping[str, bool]


JSON = JsonSyntax(MappingProxyType({'"': True, "'": True}))


class JsonString:
    """Reads one string behind its first quote, in pieces. closed: whether its end was there."""

    def __init__(
        self, syntax: JsonSyntax, quote: str, is_key: bool = False, ends: Sequence[str] = ()
    ) -> None:
        self.closed = False
        self._quote = quote
        self._escapes = syntax.quotes.get(quote, False)
        self._plain = _plain(quote[:1], self._escapes)
        self._ends = tuple(ends)
        self._followers = (*_BEHIND_STRINGS[is_key], *ends)
        self._read: list[str] | None = [] if is_key else None  # all of it, in JSON

    @property
    def value(self) -> str:
        """The string that a name is."""
        return str(json.loads(f'"{"".join(self._read or ())}"'))

    def read(self, text: str, at: int, ended: bool) -> tuple[str, int]:
        """Reads a text from an index on. Returns what that is in JSON, and the index up to which it
        was read: not all of it where that needs more text, which may come unless `ended`."""
        written: list[str] = []
        while at < len(text) and not self.closed:
            plain = self._plain.match(text, at)
            if plain is not None:
                written.append(plain[0])
                at = plain.end()
                continue
            piece = self._special(text, at, ended)
            if piece is None:
                break
            written.append(piece[0])
            at += piece[1]
        if self._read is not None:
            self._read += written
        return "".join(written), at

    def _special(self, text: str, at: int, ended: bool) -> tuple[str, int] | None:
        """JSON of a character that is not plain, and the number of those that were read; None where
        more text is needed."""
        char = text[at]
        if char == "\\" and self._escapes:
            return escape_at(text, at, ended)
        if text.startswith(self._quote, at):
            ends = self._ends_string(text, at, ended)
            if ends is None:
                return None
            if ends:
                self.closed = True
                return "", len(self._quote)
        elif not ended and self._quote.startswith(text[at:]):
            return None
        return json.dumps(char)[1:-1], 1

    def _ends_string(self, text: str, at: int, ended: bool) -> bool | None:
        """Returns whether a quote ends the string: what follows must be what follows strings, else
        it is a quote that was not escaped. None where that needs more text."""
        if not self._escapes:
            return True
        spaces = _SPACES.match(text, at + len(self._quote))
        assert spaces is not None
        following = spaces.end()
        if text.startswith(self._followers, following) or following - at > MAX_GAP:
            return True
        rest = text[following : following + MAX_GAP]
        if not ended and (not rest or any(end.startswith(rest) for end in self._ends)):
            return None
        return not rest


@functools.cache
def _plain(quote: str, escapes: bool) -> re.Pattern[str]:
    """Pattern of text that is the same within a JSON string."""
    chars = rf'[^"\\\x00-\x1f{re.escape(quote)}]++'
    if escapes:
        return re.compile(rf'(?:{chars}|\\["\\/bfnrt])++')
    return re.compile(chars)
