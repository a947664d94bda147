"""Rules out properties that the schema of a tool does not name: small models would invent them
without end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxserve.text.structured_output.schema import Schema

# what says which other properties an object may have, or may name more of them
_NAMES_MORE = frozenset(["additionalProperties", "patternProperties", "allOf", "anyOf", "$ref"])


def close_objects(schema: Schema) -> None:
    """Closes the objects of a schema, as `schema` reads it, that leave open which other properties
    they have, where nothing beside them may name more."""
    definitions = schema.get("$defs", {}) if isinstance(schema, dict) else {}
    whole: dict[int, dict[str, Any]] = {}  # parts that say all of a value, by their identity
    joined: dict[int, dict[str, Any]] = {}  # parts that say some of it
    pending = [(schema, True)]
    while pending:
        part, alone = pending.pop()
        parts = whole if alone else joined
        if isinstance(part, dict) and id(part) not in parts:
            parts[id(part)] = part
            pending += _inner(part, alone, definitions)
    for key in whole.keys() - joined.keys():
        part = whole[key]
        named = part.get("properties", {}).keys()
        if named and named >= set(part.get("required", ())) and _NAMES_MORE.isdisjoint(part):
            part["additionalProperties"] = False


def _inner(
    part: Mapping[str, Any], alone: bool, definitions: Mapping[str, Schema]
) -> Iterator[tuple[Schema, bool]]:
    """Yields the parts of a part, each with whether it says all of a value."""
    for name in ("properties", "patternProperties"):
        for each in part.get(name, {}).values():
            yield each, True
    for name in ("items", "additionalProperties"):
        yield part.get(name, True), True
    for each in part.get("prefixItems", ()):
        yield each, True
    for each in part.get("allOf", ()):
        yield each, False
    more = _NAMES_MORE & part.keys() or "properties" in part
    for each in part.get("anyOf", ()):
        yield each, alone and more == {"anyOf"}
    if "$ref" in part:
        yield definitions[part["$ref"].rpartition("/")[2]], alone and more == {"$ref"}
