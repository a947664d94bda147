"""JSON of HTTP bodies: parsed within limits, written in pieces.

A JSON parser holds the interpreter lock until all of a body is Python objects: 0.2 s for 16 MiB of
token ids, 1 s for 16 MiB of empty lists, during which no stream and no engine step advances. So
bodies of all sizes are parsed with simdjson, which takes less than 0.1 s and makes Python objects
only on access, and these are made slice by slice. Writing is split into pieces for the same reason.

What a body means does not depend on its size: a byte order mark is skipped; numbers are finite, and
integers beyond 64 bits become floating-point numbers, as in JavaScript; a name may be given once in
an object.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import simdjson

from jaxserve.api.errors import RequestError
from jaxserve.server.event_loop import run_in_thread_if

PARSE_IN_THREAD_BYTES = 1 << 16
MAX_FIELDS = 256  # of a body
MAX_KEYS = 4096  # of an object in it
MAX_VALUES = 1 << 16  # of a field: 10,000 messages have some 50,000
MAX_DEPTH = 128
# their flat lists may exceed MAX_VALUES
UNCOUNTED_FIELDS = frozenset({"prompt", "tokens", "input"})
PARSE_SLICE = 1 << 14  # list entries made Python objects without releasing the interpreter
WRITE_SLICE = 256  # list entries written without releasing the interpreter
MAX_INTEGER = 2**64 - 1  # for simdjson
MAX_NEGATED = 2**63
MAX_DIGITS = 20  # of these
JsonObject = dict[str, Any]
NOT_AN_OBJECT = "the body must be a JSON object"
_NUMBER_FAULTS = ("BIGINT_ERROR", "NUMBER_ERROR")
_STRING_FAULT = "STRING_ERROR"
# what begins with a backslash: another escape, a pair of halves, a half
_HALF = re.compile(
    rb"\\[^u]|\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|(?P<half>\\u[dD][89a-fA-F]\w\w)"
)
_DIGITS = re.compile(rb"\d+")
_TO_ZEROS = bytes.maketrans(b"0123456789", b"0" * 10)
_LONG = b"0" * (MAX_DIGITS - 1)
_WITHIN_NUMBER = (b".", b"e", b"E", b"e+", b"E+", b"e-", b"E-")  # digits after these are no integer
_GO_ON = (b".", b"e", b"E")
_SCALARS = frozenset({str, int, float, bool, type(None)})


def parse(body: bytes) -> JsonObject:
    """Parses a body. Errors: RequestError if it is not JSON, not an object, or exceeds a limit."""
    try:
        document = _document(body)
    except (ValueError, RuntimeError) as error:
        message = f"the body is not JSON that can be read: {str(error)[:200]}"
        raise RequestError("", message) from None
    if not isinstance(document, simdjson.Object):
        raise RequestError("", NOT_AN_OBJECT)
    if len(document) > MAX_FIELDS:
        raise RequestError("", f"the body has {len(document)} fields; the limit is {MAX_FIELDS}")
    return {name: _FieldParser(name).value(part) for name, part in _items(document)}


def _document(body: bytes) -> Any:
    """The parsed body, without Python objects for what is inside. Errors: ValueError,
    RuntimeError."""
    try:
        return simdjson.Parser().parse(body)
    except (ValueError, RuntimeError) as error:
        message = str(error)
    if message.startswith(_STRING_FAULT):
        return _document_of_whole_characters(body)
    if message.startswith(_NUMBER_FAULTS):
        return simdjson.Parser().parse(_with_floats(body))
    raise ValueError(message)


def _document_of_whole_characters(body: bytes) -> Any:
    """The parsed body with a replacement character for each half of one, which JSON can write and
    UTF-8 cannot: clients cut texts there. Errors: ValueError, RuntimeError."""
    return simdjson.Parser().parse(_HALF.sub(_replaced, body))


def _replaced(escape: re.Match[bytes]) -> bytes:
    return b"\\ufffd" if escape["half"] else escape[0]


def _with_floats(body: bytes) -> bytes:
    """A body with integers of 64 bits only: those beyond end in a fraction."""
    parts = []
    done = 0
    in_text = False
    zeros = body.translate(_TO_ZEROS)  # a plain search of which is much faster than for digits
    while (begin := zeros.find(_LONG, done)) >= 0:
        before = body[done:begin]
        quotes = before.replace(b"\\\\", b"").replace(b'\\"', b"").count(b'"')
        in_text ^= bool(quotes % 2)
        digits = _DIGITS.match(body, begin)[0]  # type: ignore[index]
        done = begin + len(digits)
        whole = not before.endswith(_WITHIN_NUMBER) and body[done : done + 1] not in _GO_ON
        most = MAX_NEGATED if before.endswith(b"-") else MAX_INTEGER
        # Python converts at most some thousand digits
        beyond = len(digits) > MAX_DIGITS or int(digits) > most
        parts += [before, digits, b".0" if whole and beyond and not in_text else b""]
    return b"".join([*parts, body[done:]])


def _items(value: simdjson.Object) -> Iterator[tuple[str, Any]]:
    """Items of an object, without simdjson's `items`, which would make everything inside Python
    objects. simdjson looks names up as C strings, so a name may not hold a NUL, and finds the first
    of equal ones, where other parsers take the last: so there may be one."""
    seen = set()
    for name in value:
        if "\0" in name:
            raise RequestError("", f"the name {name[:100]!r} holds a NUL")
        if name in seen:
            raise RequestError("", f"the name {name[:100]!r} is given more than once in an object")
        seen.add(name)
        yield name, value[name]


class _FieldParser:
    """Makes Python values of one field of a body, and counts them against the limits."""

    def __init__(self, name: str):
        self._name = name[:100]
        self._count = 0

    def value(self, part: Any, depth: int = 0) -> Any:
        if isinstance(part, simdjson.Array):
            return self._list(part, depth + 1)
        if isinstance(part, simdjson.Object):
            return self._object(part, depth + 1)
        return part

    def _list(self, array: Any, depth: int) -> list[Any]:
        items: list[Any] = []
        entries = iter(array)
        while some := list(itertools.islice(entries, PARSE_SLICE)):
            flat = _SCALARS.issuperset(map(type, some))
            if not (flat and self._name in UNCOUNTED_FIELDS):
                self._check(len(some), depth)
            items += some if flat else [self.value(entry, depth) for entry in some]
        return items

    def _object(self, value: Any, depth: int) -> JsonObject:
        if len(value) > MAX_KEYS:
            raise RequestError(self._name, f"has an object of more than {MAX_KEYS} names")
        self._check(len(value), depth)
        return {name: self.value(part, depth) for name, part in _items(value)}

    def _check(self, more: int, depth: int) -> None:
        self._count += more
        if self._count > MAX_VALUES:
            raise RequestError(self._name, f"has more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise RequestError(self._name, f"is nested deeper than {MAX_DEPTH}")


def whole(value: Any) -> Any:
    """Returns a number without a fraction as the integer that JSON takes it for."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def dump(value: Any) -> bytes:
    """JSON of a value at once. Lone surrogates, which a model's JSON may hold, become question
    marks."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")


def dump_pieces(value: Any) -> Iterator[bytes]:
    """The bytes of `dump` in pieces, between which other threads may take the interpreter."""
    if isinstance(value, dict) and _is_nested(value.values()):
        for number, (name, part) in enumerate(value.items()):
            yield (b"," if number else b"{") + dump(name) + b":"
            yield from dump_pieces(part)
        yield b"}"
    elif isinstance(value, list) and _is_nested(value):
        for number, part in enumerate(value):
            yield b"," if number else b"["
            yield from dump_pieces(part)
        yield b"]"
    elif isinstance(value, list) and value:
        for begin in range(0, len(value), WRITE_SLICE):
            yield (b"," if begin else b"[") + dump(value[begin : begin + WRITE_SLICE])[1:-1]
        yield b"]"
    else:
        yield dump(value)


def _is_nested(values: Iterable[Any]) -> bool:
    return any(isinstance(value, (dict, list)) for value in values)


async def dump_in_thread_if(large: bool, make: Callable[[], Any]) -> bytes:
    """JSON of what `make` returns; if large, made and written in pieces on another thread."""
    if large:
        return await run_in_thread_if(True, lambda: b"".join(dump_pieces(make())))
    return dump(make())
