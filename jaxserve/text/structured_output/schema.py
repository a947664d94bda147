"""Reads JSON schemas as callers write them, for the library that compiles them.

What asks for nothing is dropped: annotations, unknown keywords and formats, keywords without effect
(`"uniqueItems": false`), definitions that nothing refers to. Older drafts get today's words, and
references lead to `$defs` of the root. What asks for something that no guide can enforce is dropped
too, and said: a caller who may not be given less refuses the schema for it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxserve.text.structured_output.disjoint import Disjointness
from jaxserve.text.structured_output.keywords import (
    APPLIED,
    NAMES_MORE,
    NOTHING,
    PARTS,
    TYPES,
    VALUES,
    UnenforcedError,
    listed_names,
    names_pattern,
    pattern,
    says_nothing,
)
from jaxserve.text.structured_output.references import References

Schema = dict[str, Any] | bool
MAX_PATH_CHARS = 120
MAX_STEP_CHARS = 40
_NULL: Schema = {"type": ["null"]}
MAX_FOLLOWED = 8  # references that lead to a list of names


class Unenforced(NamedTuple):
    """A keyword that was dropped although it asks for something. path: its schema's place."""

    keyword: str
    path: str
    why: str

    def __str__(self) -> str:
        return f"{self.keyword} at {shown(self.path)} cannot be enforced: {self.why}"


@dataclasses.dataclass(frozen=True, slots=True)
class ReadSchema:
    """A schema in the library's words.

    definitions: what its references lead to, by name. parts: all objects in it, the inner ones
    first, with their places as the caller wrote it.
    """

    root: Schema
    definitions: dict[str, Schema]
    unenforced: Sequence[Unenforced]
    parts: Sequence[tuple[dict[str, Any], str]]

    def whole(self) -> Schema:
        """The schema with its definitions."""
        if isinstance(self.root, bool) or not self.definitions:
            return self.root
        return {**self.root, "$defs": self.definitions}


def read_schema(root: Any) -> ReadSchema:
    """Reads a schema, as JSON has it: nothing of it has to be right."""
    return _Reader(root).read()


@dataclasses.dataclass(slots=True)
class _Part:
    """A part of a schema while it is read: what it was and becomes. never: it allows nothing."""

    given: dict[str, Any]
    base: str
    path: str
    made: dict[str, Any] = dataclasses.field(default_factory=dict)
    never: bool = False

    @property
    def types(self) -> frozenset[str]:
        """The types of the values that it allows."""
        return frozenset(self.made.get("type", TYPES))


class _Reader:
    """Reads one schema."""

    def __init__(self, root: Any):
        self._root = root
        self._references = References(root)
        self._unenforced: list[Unenforced] = []
        self._parts: list[tuple[dict[str, Any], str]] = []
        self._names: dict[int, str] = {}  # of definitions, by the identity of what they were
        self._definitions: dict[str, Schema] = {}
        self._pending: collections.deque[tuple[str, Any, str]] = collections.deque()
        self._exclusive: list[tuple[list[Schema], Any, str]] = []  # alternatives of every oneOf

    def read(self) -> ReadSchema:
        root = self._read(self._root, "#")
        while self._pending:
            name, part, path = self._pending.popleft()
            self._definitions[name] = self._read(part, path)
        self._check_exclusive()
        return ReadSchema(root, self._definitions, self._unenforced, self._parts)

    def _check_exclusive(self) -> None:
        """Drops every oneOf of which a value may match two: they were read as anyOf."""
        disjointness = Disjointness(self._definitions)
        for alternatives, tag, path in self._exclusive:
            if disjointness.of_all(alternatives):
                continue
            if isinstance(tag, str) and disjointness.of_all(alternatives, tag):
                tagged = self._noted({"type": ["object"], "required": [tag]}, path)
                alternatives[:] = [
                    self._noted({"allOf": [each, tagged]}, path) for each in alternatives
                ]
            else:
                self._drop(path, "oneOf", "more than one of them may match")

    def _read(self, given: Any, path: str) -> Schema:
        if isinstance(given, bool):
            return given
        if not isinstance(given, dict):
            self._drop(path, "schema", "it is neither an object nor true or false")
            return True
        said = {
            name: value
            for name, value in given.items()
            if value is not None or name == "const"  # programs write null for what they do not say
        }
        part = _Part(said, self._references.base(given), path)
        # the type says which others matter, and names of properties change what these are
        for name in sorted(said, key=_turn):
            self._keyword(part, name, said[name])
        if part.never:
            return False
        return self._noted(part.made, path)

    def _noted(self, made: dict[str, Any], path: str) -> Schema:
        self._parts.append((made, path))
        return made

    def _keyword(self, part: _Part, name: str, value: Any) -> None:
        try:
            if name in VALUES:
                types, check = VALUES[name]
                kept = NOTHING if types.isdisjoint(part.types) else check(value, part.given)
                if kept is not NOTHING:
                    part.made[name] = kept
            elif name in PARTS and not PARTS[name].isdisjoint(part.types):
                _PARTS[name](self, part, name, value)
        except UnenforcedError as error:
            self._drop(part.path, name, str(error))
            if name in NAMES_MORE:
                part.made.setdefault("additionalProperties", True)

    def _drop(self, path: str, name: str, why: str) -> None:
        self._unenforced.append(Unenforced(name, path, why))

    # --- keywords with schemas

    def _schema(self, part: _Part, name: str, value: Any) -> None:
        part.made[name] = self._read(value, f"{part.path}/{name}")

    def _schemas(self, part: _Part, name: str, value: Any) -> None:
        if not isinstance(value, list):
            raise UnenforcedError("it is no list of schemas")
        part.made[name] = [
            self._read(each, f"{part.path}/{name}/{i}") for i, each in enumerate(value)
        ]

    def _items(self, part: _Part, name: str, value: Any) -> None:
        if not isinstance(value, list):
            self._schema(part, name, value)
            return
        self._schemas(part, name, value)  # as before draft 2020-12
        part.made["prefixItems"] = part.made.pop(name)
        if "additionalItems" in part.given:
            part.made[name] = self._read(
                part.given["additionalItems"], f"{part.path}/additionalItems"
            )

    def _any_of(self, part: _Part, name: str, value: Any) -> None:
        """Reads alternatives, without those that cannot be enforced where others than null are
        left."""
        if not isinstance(value, list) or not value:
            raise UnenforcedError("it is no list of alternatives")
        enforced = []
        others = []
        for number, each in enumerate(value):
            unenforced = len(self._unenforced)
            exclusive = len(self._exclusive)
            made = self._read(each, f"{part.path}/{name}/{number}")
            if len(self._unenforced) == unenforced:
                enforced.append(made)
            else:
                others.append((made, self._unenforced[unenforced:], self._exclusive[exclusive:]))
                del self._unenforced[unenforced:], self._exclusive[exclusive:]
        part.made[name] = enforced
        if not any(each not in (False, _NULL) for each in enforced):
            for made, unenforceds, exclusives in others:
                enforced.append(made)
                self._unenforced += unenforceds
                self._exclusive += exclusives

    def _one_of(self, part: _Part, name: str, value: Any) -> None:
        """Reads alternatives as those of anyOf: that one alone may match is checked at the end."""
        self._any_of(part, name, value)
        alternatives = part.made.pop(name)
        discriminator = part.given.get("discriminator")  # of OpenAPI: it is never left out
        tag = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
        self._exclusive.append((alternatives, tag, part.path))
        if "anyOf" in part.given:
            some = self._noted({"anyOf": alternatives}, part.path)
            part.made["allOf"] = [*part.made.get("allOf", ()), some]
        else:
            part.made["anyOf"] = alternatives

    def _all_of(self, part: _Part, name: str, value: Any) -> None:
        before = part.made.get(name, ())
        self._schemas(part, name, value)
        part.made[name] = [*before, *part.made[name]]

    def _properties(self, part: _Part, name: str, value: Any) -> None:
        if value == []:  # what PHP writes for an empty object
            return
        if not isinstance(value, dict):
            raise UnenforcedError("it is no object")
        if name == "patternProperties":
            for key in value:
                pattern(key, value)
        path = f"{part.path}/{name}"
        part.made[name] = {
            key: self._read(each, f"{path}/{_step(key)}") for key, each in value.items()
        }

    def _reference(self, part: _Part, name: str, value: Any) -> None:
        target = self._target(value, part.base)
        if isinstance(target, dict):
            part.made[name] = f"#/$defs/{self._definition(target, value)}"
        else:
            part.never |= self._read(target, value) is False

    def _target(self, reference: Any, base: str) -> Any:
        try:
            return self._references.target(reference, base)
        except (LookupError, TypeError, AttributeError):
            raise UnenforcedError(f"{reference!a:.60} leads to nothing in the schema") from None

    def _definition(self, target: dict[str, Any], path: str) -> str:
        """The name of a definition, which is read when it is first referred to."""
        if id(target) not in self._names:
            self._names[id(target)] = str(len(self._names))
            self._pending.append((self._names[id(target)], target, path))
        return self._names[id(target)]

    # --- keywords that the library does not have

    def _not(self, part: _Part, name: str, value: Any) -> None:
        if says_nothing(value):
            part.never = True
        elif value is not False:
            raise UnenforcedError("no guide has complements")

    def _unevaluated(self, part: _Part, name: str, value: Any) -> None:
        """Reads what is asked of items or properties that nothing else names: of additional ones,
        where no other part of the schema may name some."""
        additional = {"unevaluatedItems": "items"}.get(name, "additionalProperties")
        if says_nothing(value):
            return
        if not APPLIED.isdisjoint(part.given):
            raise UnenforcedError("no guide knows what other parts name")
        if additional not in part.given:
            part.made[additional] = self._read(value, f"{part.path}/{name}")

    def _property_names(self, part: _Part, name: str, value: Any) -> None:
        """Reads which names properties may have: any, those of a list, or those of a pattern."""
        asked = self._followed(value, part.base)
        asked = {key: asked[key] for key in asked if not says_nothing({key: 0})}
        if asked.get("type") == "string":  # as all names are
            del asked["type"]
        if not asked:
            return
        if "patternProperties" in part.made:
            raise UnenforcedError("no guide has conditions for names")
        named = part.made.get("properties", {})
        if asked.keys() <= {"enum", "const"}:
            keys = listed_names(asked)
            more = self._shared(part)
            part.made["properties"] = {key: named.get(key, more) for key in keys}
        elif not named:
            part.made["patternProperties"] = {names_pattern(asked): self._shared(part)}
        else:
            raise UnenforcedError("no guide has conditions for names")
        part.made["additionalProperties"] = False

    def _followed(self, schema: Any, base: str) -> dict[str, Any]:
        """Returns a schema, or what it refers to."""
        for _ in range(MAX_FOLLOWED):
            if isinstance(schema, dict) and "$ref" in schema:
                schema = self._target(schema["$ref"], base)
        if isinstance(schema, dict):
            return schema
        return {} if schema is True else {"enum": []}

    def _shared(self, part: _Part) -> Schema:
        """Returns the schema of additional properties, to be referred to from many places."""
        schema = part.made.get("additionalProperties", True)
        if isinstance(schema, bool):
            return schema
        name = f"{len(self._names)}"
        self._names[id(schema)] = name
        self._definitions[name] = schema
        return self._noted({"$ref": f"#/$defs/{name}"}, part.path)


_PARTS: dict[str, Callable[[_Reader, _Part, str, Any], None]] = {
    "$ref": _Reader._reference,
    "allOf": _Reader._all_of,
    "anyOf": _Reader._any_of,
    "oneOf": _Reader._one_of,
    "not": _Reader._not,
    "prefixItems": _Reader._schemas,
    "items": _Reader._items,
    "unevaluatedItems": _Reader._unevaluated,
    "properties": _Reader._properties,
    "patternProperties": _Reader._properties,
    "additionalProperties": _Reader._schema,
    "unevaluatedProperties": _Reader._unevaluated,
    "propertyNames": _Reader._property_names,
}


def _turn(name: str) -> int:
    """Returns the turn in which a keyword is read: the type says which others matter, and names
    of properties change what these are."""
    return {"type": 0, "propertyNames": 2}.get(name, 1)


def _step(key: str) -> str:
    return key[:MAX_STEP_CHARS].replace("~", "~0").replace("/", "~1")


def shown(path: str) -> str:
    """A path as an error tells it."""
    return ascii(path)[1:-1][:MAX_PATH_CHARS]
