"""Says whether alternatives of a schema exclude each other, which is what oneOf asks for."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxserve.text.structured_output.keywords import TYPES, canonical

MAX_ALTERNATIVES = 256
_NUMBERS = frozenset({"integer", "number"})


@dataclasses.dataclass(slots=True)
class _Traits:
    """Traits by which values that match a schema differ from others.

    values: all there are, or None; tags: the values of its properties; closed: whether it has no
    other properties than these.
    """

    types: frozenset[str] = frozenset(TYPES)
    values: frozenset[str] | None = None
    required: frozenset[str] = frozenset()
    tags: dict[str, frozenset[str] | None] = dataclasses.field(default_factory=dict)
    closed: bool = False

    def excludes(self, other: _Traits, tag: str) -> bool:
        if self.types.isdisjoint(other.types) or _differ(self.values, other.values):
            return True
        if self.types | other.types != {"object"}:
            return False
        names = self.required | other.required | ({tag} - {""})
        return any(
            _differ(self.tags.get(name), other.tags.get(name))
            or (self.closed and name not in self.tags)
            or (other.closed and name not in other.tags)
            for name in names
        )


class Disjointness:
    """Compares schemas whose references lead to these definitions."""

    def __init__(self, definitions: Mapping[str, Any]):
        self._definitions = definitions

    def of_all(self, alternatives: Sequence[Any], tag: str = "") -> bool:
        """Returns True if it is certain that no value matches two of these, where those that are
        objects have the property `tag`."""
        if len(alternatives) > MAX_ALTERNATIVES:
            return False
        traits = [list(self._options(schema)) for schema in alternatives]
        if sum(map(len, traits)) > MAX_ALTERNATIVES:
            return False
        return all(
            one.excludes(other, tag)
            for these, those in itertools.combinations(traits, 2)
            for one in these
            for other in those
        )

    def _options(self, schema: Any) -> Iterator[_Traits]:
        """The traits of a schema, or those of its alternatives, where it has some."""
        schema = self._followed(schema)
        if schema is False:
            return
        if schema is True:
            yield _Traits()
        elif len(schema) == 1 and "anyOf" in schema:
            for option in itertools.islice(schema["anyOf"], MAX_ALTERNATIVES):
                yield self._traits(self._followed(option))
        else:
            yield self._traits(schema)

    def _traits(self, schema: Any) -> _Traits:
        traits = _Traits()
        if not isinstance(schema, dict):
            return traits
        traits.types = frozenset(schema.get("type", TYPES))
        if traits.types & _NUMBERS:  # 1 is of both types
            traits.types |= _NUMBERS
        traits.values = _values(schema)
        if traits.values is not None:
            return traits
        traits.required = frozenset(schema.get("required", ()))
        properties = schema.get("properties", {})
        traits.tags = {name: _values(self._followed(part)) for name, part in properties.items()}
        traits.closed = (
            schema.get("additionalProperties") is False and "patternProperties" not in schema
        )
        return traits

    def _followed(self, schema: Any) -> Any:
        """Returns a schema, or what it refers to and nothing else."""
        seen = set()
        while isinstance(schema, dict) and schema.keys() == {"$ref"}:
            name = schema["$ref"].rpartition("/")[2]
            if name in seen:
                return False
            seen.add(name)
            schema = self._definitions[name]
        return schema


def _values(schema: Any) -> frozenset[str] | None:
    """The values that a schema lists, or None."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return frozenset([canonical(schema["const"])])
    return frozenset(map(canonical, schema["enum"])) if "enum" in schema else None


def _differ(one: frozenset[str] | None, other: frozenset[str] | None) -> bool:
    return one is not None and other is not None and one.isdisjoint(other)
