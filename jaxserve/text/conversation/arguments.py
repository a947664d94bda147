"""Reads the arguments of a call that a model made earlier, whatever they have become since."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pydantic_core

MAX_LEVELS = 100  # of lists and objects within each other; deeper ones stay text
MAX_ENCODINGS = 4  # of JSON in a string of JSON
TEXT = "arguments"  # name of what is no object, as templates take objects only
_STRING = re.compile(r'"(?:[^"\\]|\\.)*', re.DOTALL)
_ESCAPES = {code: f"\\u{code:04x}" for code in range(0x20)}


def read_arguments(given: Any) -> tuple[dict[str, Any], bool]:
    """Returns the arguments of a call as an object, and whether they were one already or in JSON.

    Nothing is an empty object; JSON that was cut off loses its last part; what cannot be read, or
    is no object, is the object's only value, under the name TEXT.
    """
    value = given
    for _ in range(MAX_ENCODINGS):
        if not isinstance(value, str):
            break
        value = _parsed(value)
    if isinstance(value, Mapping):
        sound = isinstance(given, Mapping) or _is_json_object(given)
        return _whole_characters(dict(value)), sound
    if value is None or value == "":
        return {}, given is None or not str(given).strip()
    return {TEXT: _whole_characters(value)}, False


def _is_json_object(text: Any) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (TypeError, ValueError, RecursionError):
        return False


def _parsed(text: str) -> Any:
    """The value of a text of JSON, or the text itself where it cannot be read."""
    if not text.strip():
        return None
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        value = _begun(text)
    if _levels(value) > MAX_LEVELS:
        return text
    return value


def _begun(text: str) -> Any:
    """The value that a text of JSON begins with, which may be cut off; else the text itself."""
    escaped = _STRING.sub(lambda found: found[0].translate(_ESCAPES), text)
    try:
        value = pydantic_core.from_json(escaped, allow_partial="trailing-strings")
    except (ValueError, TypeError):
        return text
    return value if isinstance(value, (dict, list)) else text


def _levels(value: Any) -> int:
    """Counts the levels of lists and objects within each other."""
    levels = 0
    inner = [value]
    while inner := [part for part in inner if isinstance(part, (dict, list))]:
        levels += 1
        if levels > MAX_LEVELS:
            break
        inner = [entry for part in inner for entry in _entries(part)]
    return levels


def _entries(part: dict[str, Any] | list[Any]) -> Iterable[Any]:
    if isinstance(part, dict):
        return part.values()
    return part


def _whole_characters(value: Any) -> Any:
    """A value without halves of characters, which JSON can write and tokenizers cannot take."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    return value
