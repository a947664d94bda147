"""JSON of a body, within limits.

Parsers keep the interpreter until everything is Python's: for 16 MiB of ids a fifth of a second, of
empty lists a second, in which no stream and no step goes on. So a large body is parsed by a library
that makes nothing Python's before it is asked for, in less than a tenth of a second, and the rest
is done some of it at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pydantic_core
import simdjson

from jaxserve.api.errors import RequestError

LARGE = 1 << 16  # bytes: more are to be parsed beside the event loop
MAX_FIELDS = 256  # of a body
MAX_KEYS = 4096  # of an object in it
MAX_VALUES = 1 << 16  # of a field: 10,000 messages have some 50,000
MAX_DEPTH = 128
UNCOUNTED = frozenset({"prompt", "tokens"})  # what is in flat lists of these
LISTS = (list, simdjson.Array)
OBJECTS = (dict, simdjson.Object)
SCALARS = frozenset({str, int, float, bool, type(None)})
SLICE = 1 << 14  # entries of a list that are made Python's without a break


def parsed(body: bytes) -> dict[str, Any]:
    """Errors: RequestError for what is no JSON, no object, or beyond a limit."""
    try:
        found = (
            simdjson.Parser().parse(body) if len(body) > LARGE else pydantic_core.from_json(body)
        )
    except (ValueError, RuntimeError) as error:
        raise RequestError(
            "", f"the body is not JSON that can be read: {str(error)[:200]}"
        ) from None
    if not isinstance(found, OBJECTS):
        raise RequestError("", "the body must be a JSON object")
    if len(found) > MAX_FIELDS:
        raise RequestError("", f"the body has {len(found)} fields; the limit is {MAX_FIELDS}")
    return {name: _Field(name).value(part) for name, part in _items(found)}


def _items(found: Any) -> Iterator[tuple[str, Any]]:
    """Not the library's, which makes all that is in them Python's. It finds names only up to a
    NUL."""
    for name in found:
        if "\0" in name:
            raise RequestError("", f"the name {name[:100]!r} holds a NUL")
        yield name, found[name]


class _Field:
    """Counts what it has made of a field."""

    def __init__(self, name: str):
        self._name = name[:100]
        self._count = 0

    def value(self, part: Any, depth: int = 0) -> Any:
        if isinstance(part, LISTS):
            return self._list(part, depth + 1)
        return self._object(part, depth + 1) if isinstance(part, OBJECTS) else part

    def _list(self, array: Any, depth: int) -> list[Any]:
        made = list[Any]()
        entries = iter(array)
        while some := list(itertools.islice(entries, SLICE)):
            flat = SCALARS.issuperset(map(type, some))
            if not (flat and self._name in UNCOUNTED):
                self._check(len(some), depth)
            made += some if flat else [self.value(entry, depth) for entry in some]
        return made

    def _object(self, found: Any, depth: int) -> dict[str, Any]:
        if len(found) > MAX_KEYS:
            raise RequestError(self._name, f"has an object of more than {MAX_KEYS} names")
        self._check(len(found), depth)
        return {name: self.value(part, depth) for name, part in _items(found)}

    def _check(self, more: int, depth: int) -> None:
        self._count += more
        if self._count > MAX_VALUES:
            raise RequestError(self._name, f"has more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise RequestError(self._name, f"is nested deeper than {MAX_DEPTH}")
