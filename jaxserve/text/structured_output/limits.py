"""Limits of JSON schemas, by which they are refused before anything else reads them.

They keep native code, which recurses over a schema, within its stack, and the time to compile
within a second.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from math import lcm
from typing import Any

from jaxserve.api.errors import RequestError

MAX_CHARS = 65_536  # of a schema
MAX_DEPTH = 64  # of objects and lists in a schema
MAX_REACH = 1024  # depth times references: how deep a schema may be once these are followed
MAX_PROPERTIES = 1024  # of one object
MAX_MULTIPLE = 10_000  # least common multiple of all of a schema's multipleOf, as whole numbers
MAX_ITEMS = 4096  # that a list or object may be said to have, at least or at most
MAX_PATTERNS = 32  # of patternProperties, in all of a schema

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_NAMES = ("$id", "id")  # of what references within are relative to
_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties")


def parsed(field: str, text: str) -> Any:
    """Parses a schema and checks its limits; it is passed on as parsed, so that what was checked is
    what is compiled. Errors: RequestError."""
    if len(text) > MAX_CHARS:
        raise RequestError(field, f"has {len(text)} characters; the limit is {MAX_CHARS}")
    try:
        schema = json.loads(text)
    except RecursionError:
        raise RequestError(field, f"is nested too deeply; the limit is {MAX_DEPTH}") from None
    except ValueError as error:
        raise RequestError(field, f"is not JSON: {str(error)[:100]}") from None
    check_limits(field, schema)
    return schema


def check_limits(field: str, schema: Any) -> None:
    """Refuses what is no schema, and one that is too large or deep. Errors: RequestError."""
    if not isinstance(schema, (dict, bool)):
        raise RequestError(field, "a JSON schema is an object")
    deepest = 0
    references = collections.defaultdict[int, set[str]](set)
    multiples = []
    patterns = 0
    for part, depth, place in _parts(schema):
        deepest = max(deepest, depth)
        if depth > MAX_DEPTH:
            raise RequestError(field, f"is nested too deeply; the limit is {MAX_DEPTH}")
        if isinstance(part, dict):
            _check_part(field, part)
            references[place] |= {
                part[name] for name in _REFERENCES if isinstance(part.get(name), str)
            }
            if isinstance(part.get("multipleOf"), (int, float)):
                multiples.append(part["multipleOf"])
            if isinstance(part.get("patternProperties"), dict):
                patterns += len(part["patternProperties"])
    counts = [len(found) for found in references.values()]
    local = all(reference.startswith("#") for found in references.values() for reference in found)
    count = max(counts, default=0) if local else sum(counts)  # the others lead from place to place
    if deepest * count > MAX_REACH:
        said = f"has {count} references and {deepest} levels"
        raise RequestError(field, f"{said}; the limit is {MAX_REACH} for the one times the other")
    if _least_multiple(multiples) > MAX_MULTIPLE:
        raise RequestError(
            field,
            "has a common multiple of all multipleOf, as whole numbers, above the limit "
            f"{MAX_MULTIPLE}",
        )
    if patterns > MAX_PATTERNS:
        raise RequestError(field, f"has {patterns} patternProperties; the limit is {MAX_PATTERNS}")


def _check_part(field: str, part: dict[str, Any]) -> None:
    if len(part) > MAX_PROPERTIES or (
        isinstance(part.get("required"), list) and len(part["required"]) > MAX_PROPERTIES
    ):
        raise RequestError(field, f"has an object with more than {MAX_PROPERTIES} properties")
    for name in _COUNTS:
        if isinstance(part.get(name), (int, float)) and part[name] > MAX_ITEMS:
            raise RequestError(field, f"has {name} above the limit {MAX_ITEMS}")


def _parts(schema: Any) -> Iterator[tuple[Any, int, int]]:
    """Yields every object and list with its depth and a number for what its references are relative
    to."""
    pending = [(schema, 1, 0)]
    places = 0
    while pending:
        part, depth, place = pending.pop()
        if isinstance(part, dict) and any(isinstance(part.get(name), str) for name in _NAMES):
            place = places = places + 1
        yield part, depth, place
        if isinstance(part, bool):  # a schema that allows everything, or nothing
            continue
        inner = part
        if isinstance(part, dict):
            inner = part.values()
        pending.extend(
            (value, depth + 1, place) for value in inner if isinstance(value, (dict, list))
        )


def _least_multiple(multiples: list[int | float]) -> int:
    """Least common multiple after scaling all to whole numbers: 0.5 and 3 become 5 and 30."""
    try:
        numbers = [Decimal(str(abs(value))) for value in multiples if value]
        places = max((-min(int(number.as_tuple().exponent), 0) for number in numbers), default=0)
        if places < 20:
            return lcm(*(int(number.scaleb(places)) for number in numbers))
        return MAX_MULTIPLE + 1
    except (InvalidOperation, OverflowError, ValueError):  # the last: of what is no finite number
        return MAX_MULTIPLE + 1
