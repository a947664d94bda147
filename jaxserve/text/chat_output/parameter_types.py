"""Types of a tool's parameters, and the values that texts stand for."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any

from jaxserve.text.chat_output.json_values import json_text
from jaxserve.text.chat_output.lenient_json import repaired

MAX_REFERENCES = 32  # that follow each other
_TYPES = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array",
    dict: "object", type(None): "null",
}  # fmt: skip
_NONE = object()
ENTRIES = "item"  # name of the entries of a list


class ParameterTypes:
    """The types of one tool's parameters, by the JSON schema of all of them. root: the document
    that the schema is part of, if it is not all of it."""

    def __init__(self, schema: Any, root: Mapping[str, Any] | None = None) -> None:
        self._root = schema if root is None else root
        self._properties = self._properties_of(schema, MAX_REFERENCES)

    def __contains__(self, parameter: str) -> bool:
        return parameter in self._properties

    def of(self, parameter: str) -> frozenset[str]:
        """Types that a parameter may have; none where the schema says nothing."""
        return self._types(self._properties.get(parameter), MAX_REFERENCES)

    def within(self, parameter: str) -> ParameterTypes:
        """Types of what is in a parameter: of its members, and of its entries, under ENTRIES."""
        return ParameterTypes(self._properties.get(parameter), self._root)

    def _properties_of(self, schema: Any, depth: int) -> dict[str, Any]:
        """The properties that a schema names, itself or by other schemas."""
        if not isinstance(schema, Mapping) or depth == 0:
            return {}
        properties: dict[str, Any] = {}
        for other in (self._referred(schema), *self._branches(schema)):
            properties |= self._properties_of(other, depth - 1)
        if "items" in schema:
            properties[ENTRIES] = schema["items"]
        own = schema.get("properties")
        if isinstance(own, Mapping):
            properties |= own
        return properties

    def _types(self, schema: Any, depth: int) -> frozenset[str]:
        if not isinstance(schema, Mapping) or depth == 0:
            return frozenset()
        allowed = [_own_types(schema), self._types(self._referred(schema), depth - 1)]
        for keyword in ("anyOf", "oneOf"):
            branches = [self._types(each, depth - 1) for each in _listed(schema, keyword)]
            if all(branches):
                allowed.append(frozenset().union(*branches))
        allowed += [self._types(each, depth - 1) for each in _listed(schema, "allOf")]
        said = [types for types in allowed if types]
        if not said:
            return frozenset()
        types = frozenset.intersection(*said) or said[0]
        if schema.get("nullable") is True:
            types |= {"null"}
        return types

    def _branches(self, schema: Mapping[str, Any]) -> list[Any]:
        return [each for word in ("allOf", "anyOf", "oneOf") for each in _listed(schema, word)]

    def _referred(self, schema: Mapping[str, Any]) -> Any:
        """The schema that a reference names, in the same document; None for none."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        target: Any = self._root
        for step in filter(None, reference[1:].split("/")):
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name.isdigit() and int(name) < len(target):
                target = target[int(name)]
            elif isinstance(target, Mapping):
                target = target.get(name)
            else:
                return None
        return target


def _listed(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    branches = schema.get(keyword)
    return branches if isinstance(branches, list) else []


def _own_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Types that a schema names itself: by `type`, or by the values that it allows."""
    types = schema.get("type")
    if isinstance(types, str):
        return frozenset([types])
    if isinstance(types, list):
        return frozenset(each for each in types if isinstance(each, str))
    values = [schema["const"]] if "const" in schema else _listed(schema, "enum")
    return frozenset(_TYPES.get(type(value), "") for value in values) - {""}


def value_of(written: str, types: frozenset[str]) -> str:
    """JSON of a value of some types, as a model wrote it: JSON, a literal of Python, or a text.

    types: those that the parameter may have; none: any. What is of none of these is a text if it
    can be, else what it looks like.
    """
    if types == {"string"}:
        return json_text(written)
    first = _NONE
    for value in _readings(written.strip()):
        if first is _NONE:
            first = value
        fitted = _fitted(value, types - {"string"}) if types else value
        if fitted is not _NONE:
            return json_text(fitted)
    if "string" in types or first is _NONE:
        return json_text(written)
    return json_text(first)


def _readings(text: str) -> Iterator[Any]:
    """Yields the values that a text may stand for; also those that a text within it stands for."""
    for read in (json.loads, _literal_of_any_case, ast.literal_eval, _repaired_value):
        try:
            value = read(text)
            json_text(value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, KeyError):
            continue
        yield value
        if isinstance(value, str) and value != text:
            yield from _readings(value.strip())


def _literal_of_any_case(text: str) -> Any:
    return {"true": True, "false": False, "null": None}[text.lower()]


def _repaired_value(text: str) -> Any:
    return json.loads(repaired(text))


def _fitted(value: Any, types: frozenset[str]) -> Any:
    """The value as one of these types; _NONE if it is of none."""
    if isinstance(value, float) and value.is_integer() and "number" not in types:
        value = int(value)
    fits = {_TYPES.get(type(value))}
    if type(value) is int:
        fits.add("number")
    if fits.isdisjoint(types):
        return _NONE
    return value
