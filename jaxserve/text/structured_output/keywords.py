"""Checks the values of JSON schemas' keywords, each by itself: what is kept of it, whether it asks
for anything, and whether a guide can enforce it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
FORMATS = frozenset(  # that the library enforces; any other is an annotation
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)
EXACT = 2**53  # the library reads numbers as floats
LARGEST = 2**63 - 1024  # the largest float that is also a whole number of 64 bits
NOTHING = object()  # what is kept of a keyword that asks for nothing
# whether one of some alternatives, or a part elsewhere, may say more of the same value
APPLIED = frozenset(
    ["$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"]
)
# what is dropped may have named more properties
NAMES_MORE = APPLIED | {
    "dependencies",
    "patternProperties",
    "propertyNames",
    "unevaluatedProperties",
}
# escapes and classes, which are passed over, or what the library's expressions do not have
_LOOKS = re.compile(r"\\[^bB1-9k]|\[(?:\\.|[^\]\\])*\]?|(\(\?<?[=!]|\\[bB])|(\\[1-9k])", re.DOTALL)


class UnenforcedError(ValueError):
    """Says why no guide can enforce a keyword."""


def type_names(value: Any, given: Mapping[str, Any]) -> Any:
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and name in TYPES for name in names):
        raise UnenforcedError(f"it is none of {', '.join(TYPES)}")
    return list(dict.fromkeys(names))


def one_value(value: Any, given: Mapping[str, Any]) -> Any:
    if not _is_exact(value):
        raise UnenforcedError(f"it has a whole number beyond {EXACT}, or one that is not finite")
    return value


def values(value: Any, given: Mapping[str, Any]) -> Any:
    if not isinstance(value, list):
        raise UnenforcedError("it is no list")
    return one_value(value, given)


def least(value: Any, given: Mapping[str, Any]) -> Any:
    return most(value, given) or NOTHING


def most(value: Any, given: Mapping[str, Any]) -> Any:
    if not is_number(value) or value != int(value) or value < 0:
        raise UnenforcedError("it is no whole number")
    return int(value)


def names(value: Any, given: Mapping[str, Any]) -> Any:
    if value is False:  # in a property of a schema, before draft 4
        return NOTHING
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise UnenforcedError("it is no list of texts")
    return list(dict.fromkeys(value)) or NOTHING


def pattern(value: Any, given: Mapping[str, Any]) -> Any:
    if not isinstance(value, str):
        raise UnenforcedError("it is no text")
    for found in _LOOKS.finditer(value):
        if found[1]:
            raise UnenforcedError(f"{found[1]} looks at what is around it")
        if found[2]:
            raise UnenforcedError(f"{found[2]} refers back")
    return value or NOTHING


def format_name(value: Any, given: Mapping[str, Any]) -> Any:
    return value if isinstance(value, str) and value in FORMATS else NOTHING


def lower_bound(value: Any, given: Mapping[str, Any]) -> Any:
    if isinstance(value, bool):  # of exclusiveMinimum, before draft 6
        return _exclusive(value, given.get("minimum"))
    return max(_finite(value), -LARGEST)


def upper_bound(value: Any, given: Mapping[str, Any]) -> Any:
    if isinstance(value, bool):
        return _exclusive(value, given.get("maximum"))
    return min(_finite(value), LARGEST)


def multiple(value: Any, given: Mapping[str, Any]) -> Any:
    if _finite(value) <= 0:
        raise UnenforcedError("it is not above 0")
    return value


def unique(value: Any, given: Mapping[str, Any]) -> Any:
    if value is False or given.get("maxItems") in (0, 1):
        return NOTHING
    raise UnenforcedError("no guide compares items")


def contained(value: Any, given: Mapping[str, Any]) -> Any:
    if given.get("minContains") == 0 and "maxContains" not in given:
        return NOTHING
    raise UnenforcedError("no guide counts items")


def condition(value: Any, given: Mapping[str, Any]) -> Any:
    if "then" in given or "else" in given:
        raise UnenforcedError("no guide has conditions")
    return NOTHING


def dependencies(value: Any, given: Mapping[str, Any]) -> Any:
    wanted = list(value.values()) if isinstance(value, dict) else [value]
    if any(each is not True and each for each in wanted):
        raise UnenforcedError("no guide has conditions")
    return NOTHING


def dynamic(value: Any, given: Mapping[str, Any]) -> Any:
    raise UnenforcedError("only $ref is followed")


def listed_names(asked: Mapping[str, Any]) -> list[str]:
    """Returns the names of properties that a schema with enum or const allows."""
    if len(asked) > 1 or not isinstance(asked.get("enum", []), list):
        raise UnenforcedError("it is no list")
    listed = asked.get("enum", [asked.get("const")])
    return [name for name in listed if isinstance(name, str)]


def names_pattern(asked: Mapping[str, Any]) -> str:
    """Returns the pattern of names that a schema with a pattern, or with lengths, allows."""
    if asked.keys() == {"pattern"}:
        pattern(asked["pattern"], asked)
        return str(asked["pattern"])
    if not asked.keys() <= {"minLength", "maxLength"}:
        raise UnenforcedError("no guide has conditions for names")
    lengths = {name: most(value, asked) for name, value in asked.items()}
    return f"^(?s:.{{{lengths.get('minLength', 0)},{lengths.get('maxLength', '')}}})$"


def is_number(value: Any) -> bool:
    """Returns True for a finite number of JSON."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, int) or math.isfinite(value)


def _finite(value: Any) -> Any:
    if not is_number(value):
        raise UnenforcedError("it is no finite number")
    return value


def _exclusive(excluded: bool, bound: Any) -> Any:
    return bound if excluded and is_number(bound) else NOTHING


def _is_exact(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_exact, value))
    if isinstance(value, dict):
        return all(map(_is_exact, value.values()))
    if isinstance(value, int):
        return abs(value) <= EXACT
    return not isinstance(value, float) or math.isfinite(value)


def canonical(value: Any) -> str:
    """A text that equal values of JSON share."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


_STRINGS = frozenset({"string"})
_NUMBERS = frozenset({"integer", "number"})
_ARRAYS = frozenset({"array"})
_OBJECTS = frozenset({"object"})
_ALL = frozenset(TYPES)
Check = Callable[[Any, Mapping[str, Any]], Any]
# by keyword: the types of values it constrains, and its check
VALUES: dict[str, tuple[frozenset[str], Check]] = {
    "type": (_ALL, type_names),
    "const": (_ALL, one_value),
    "enum": (_ALL, values),
    "minLength": (_STRINGS, least),
    "maxLength": (_STRINGS, most),
    "pattern": (_STRINGS, pattern),
    "format": (_STRINGS, format_name),
    "minimum": (_NUMBERS, lower_bound),
    "maximum": (_NUMBERS, upper_bound),
    "exclusiveMinimum": (_NUMBERS, lower_bound),
    "exclusiveMaximum": (_NUMBERS, upper_bound),
    "multipleOf": (_NUMBERS, multiple),
    "minItems": (_ARRAYS, least),
    "maxItems": (_ARRAYS, most),
    "uniqueItems": (_ARRAYS, unique),
    "contains": (_ARRAYS, contained),
    "minProperties": (_OBJECTS, least),
    "maxProperties": (_OBJECTS, most),
    "required": (_OBJECTS, names),
    "dependentRequired": (_OBJECTS, dependencies),
    "dependentSchemas": (_OBJECTS, dependencies),
    "dependencies": (_OBJECTS, dependencies),
    "if": (_ALL, condition),
    "$dynamicRef": (_ALL, dynamic),
    "$recursiveRef": (_ALL, dynamic),
}
# by keyword with schemas: the types of values it constrains
PARTS: dict[str, frozenset[str]] = {
    "$ref": _ALL,
    "allOf": _ALL,
    "anyOf": _ALL,
    "oneOf": _ALL,
    "not": _ALL,
    "prefixItems": _ARRAYS,
    "items": _ARRAYS,
    "unevaluatedItems": _ARRAYS,
    "properties": _OBJECTS,
    "patternProperties": _OBJECTS,
    "additionalProperties": _OBJECTS,
    "unevaluatedProperties": _OBJECTS,
    "propertyNames": _OBJECTS,
}


def says_nothing(schema: Any) -> bool:
    """Returns True for a schema that allows everything: it has annotations only."""
    if isinstance(schema, dict):
        return schema.keys().isdisjoint(VALUES.keys() | PARTS.keys())
    return schema is True
