"""JSON of single values: of a word without quotes, of an escape within a string."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

_ESCAPES = '"\\/bfnrt'
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_LITERALS = {"true": "true", "false": "false", "null": "null"} | {
    "True": "true", "False": "false", "None": "null",
}  # fmt: skip
_UNICODE = re.compile(r"\\u[0-9a-fA-F]{4}")
_UNICODE_BEGUN = re.compile(r"\\u[0-9a-fA-F]{0,3}")
_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_PAIR_BEGUN = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F].?)?)?)?)?")
_HALF = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


def escape_at(text: str, at: int, ended: bool) -> tuple[str, int] | None:
    """Returns the JSON of the escape that a backslash begins, and its length; None where that needs
    more text, which may come unless `ended`."""
    begun = text[at : at + 12]
    if len(begun) == 1:
        return ("", 1) if ended else None
    if begun[1] in _ESCAPES:
        return begun[:2], 2
    if begun[1] == "'":
        return "'", 2
    pair = _PAIR.match(begun)
    if pair:
        return pair[0], pair.end()
    if not ended and (_UNICODE_BEGUN.fullmatch(begun) or _PAIR_BEGUN.fullmatch(begun)):
        return None
    single = _UNICODE.match(begun)
    if single is None:  # as in a regular expression whose backslashes were not doubled
        return r"\\", 1
    if _HALF.match(begun):
        return "\\ufffd", single.end()
    return single[0], single.end()


def json_word(word: str) -> str:
    """JSON of a value that was written without quotes."""
    if _NUMBER.fullmatch(word):
        return word
    return _LITERALS.get(word) or json_text(_python_number(word))


def _python_number(word: str) -> Any:
    try:
        value = ast.literal_eval(word)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return word
    if isinstance(value, (int, float)) and value * 0 == 0:  # finite
        return value
    return word


def json_text(value: Any) -> str:
    """Returns the JSON of a value. Errors: TypeError, ValueError for what has none."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if text.isascii() or not re.search("[\ud800-\udfff]", text):
        return text
    return json.dumps(value)  # halves of pairs, which UTF-8 cannot hold
