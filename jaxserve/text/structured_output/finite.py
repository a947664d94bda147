"""Finds out which parts of a schema some finite JSON matches.

A part is a set of schemas that a value has to match at once. Whether one can follows from other
parts: an object needs values for the properties that it requires, a list those of its least items.
What needs itself, however far away, is matched by nothing that ends.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxserve.text.structured_output.keywords import TYPES, canonical
from jaxserve.text.structured_output.schema import ReadSchema, Schema, shown

MAX_STATES = 4096  # parts that are looked at; others are taken to be matched
_CONTAINERS = frozenset({"array", "object"})
_SCHEMAS = ("items", "additionalProperties")
_LISTS = ("prefixItems", "allOf", "anyOf")
_MAPS = ("properties", "patternProperties")


@dataclasses.dataclass(slots=True, eq=False)
class _State:
    """A part. flat: its schemas, whose references and allOf are resolved; open: lists of
    alternatives of which one is still to be chosen; ways: parts that all must be matched, for each
    way to match this one."""

    flat: dict[int, dict[str, Any]]
    open: dict[int, Sequence[Schema]]
    path: str
    ways: list[list[_State]] = dataclasses.field(default_factory=list)
    finite: bool = False


class FiniteParts:
    """The parts of one schema."""

    def __init__(self, schema: ReadSchema):
        self._schema = schema
        self._states: dict[tuple[frozenset[int], frozenset[int]], _State] = {}
        self._pending: collections.deque[_State] = collections.deque()
        self._always = _State({}, {}, "#", [[]])
        self._parts: dict[int, _State] = {}  # of every part of the schema by itself
        for part, path in schema.parts:
            self._parts[id(part)] = self._state([part], path)
        while self._pending:
            state = self._pending.popleft()
            state.ways = list(self._ways(state))
        self._settle()

    def root(self) -> Schema:
        """Returns the schema, in which parts that nothing finite matches are false."""
        if all(state.finite for state in self._parts.values()):
            return self._schema.whole()
        definitions = {name: self._kept(part) for name, part in self._schema.definitions.items()}
        return dataclasses.replace(
            self._schema, root=self._kept(self._schema.root), definitions=definitions
        ).whole()

    def fault(self) -> str:
        """Says why nothing finite matches the schema, or ''."""
        state = self._state([self._schema.root], "#")
        seen = set()
        while not state.finite and state not in seen:
            seen.add(state)
            if not state.ways:
                return f"nothing matches it: {_contradiction(state)}"
            state = next(need for need in state.ways[0] if not need.finite)
        if state.finite:
            return ""
        return f"no finite JSON matches it: {shown(state.path)} requires itself"

    def _settle(self) -> None:
        """Marks the states that are finite: those with a way of which all needs are."""
        users: dict[_State, list[tuple[_State, list[int]]]] = collections.defaultdict(list)
        ready = [self._always]
        for state in self._states.values():
            for way in state.ways:
                left = [len(way)]
                for need in way:
                    users[need].append((state, left))
                if not way:
                    ready.append(state)
        while ready:
            state = ready.pop()
            if state.finite:
                continue
            state.finite = True
            for user, left in users[state]:
                left[0] -= 1
                if not left[0]:
                    ready.append(user)

    # --- states

    def _state(self, parts: Iterable[Schema], path: str) -> _State:
        """The state of a value that must match all of these."""
        flattened = self._flattened(parts)
        if flattened is None:
            return _State({}, {}, path)
        return self._known(*flattened, path)

    def _known(
        self, flat: dict[int, dict[str, Any]], open: dict[int, Sequence[Schema]], path: str
    ) -> _State:
        if not flat:
            return self._always
        key = (frozenset(flat), frozenset(open))
        if key not in self._states:
            if len(self._states) == MAX_STATES:
                return self._always
            self._states[key] = _State(flat, open, path)
            self._pending.append(self._states[key])
        return self._states[key]

    def _flattened(
        self, parts: Iterable[Schema]
    ) -> tuple[dict[int, dict[str, Any]], dict[int, Sequence[Schema]]] | None:
        """All schemas that these consist of, and their alternatives; None where one of them is
        false or consists of itself."""
        flat: dict[int, dict[str, Any]] = {}
        open: dict[int, Sequence[Schema]] = {}
        pending: list[tuple[Schema, tuple[str, ...]]] = [(part, ()) for part in parts]
        while pending:
            part, entered = pending.pop()
            if part is False:
                return None
            if isinstance(part, bool):
                continue
            name = part.get("$ref")
            if name in entered:
                return None
            if id(part) in flat:
                continue
            flat[id(part)] = part
            if name is not None:
                pending.append((self._definition(name), (*entered, name)))
            pending += [(each, entered) for each in part.get("allOf", ())]
            if "anyOf" in part:
                open[id(part)] = part["anyOf"]
        return flat, open

    def _definition(self, reference: str) -> Schema:
        return self._schema.definitions[reference.rpartition("/")[2]]

    # --- ways to match a state

    def _ways(self, state: _State) -> Iterator[list[_State]]:
        if state.open:
            yield from self._chosen(state)
            return
        parts = list(state.flat.values())
        types = _types(parts)
        values = _values(parts)
        if values is not None:
            if any(not types.isdisjoint(_types_of(value)) for value in values):
                yield []
        elif types - _CONTAINERS:
            yield []
        else:
            if "array" in types:
                yield from self._array(parts, state.path)
            if "object" in types:
                yield from self._object(parts, state.path)

    def _chosen(self, state: _State) -> Iterator[list[_State]]:
        """The ways in which one of the first open alternatives is chosen."""
        first, alternatives = next(iter(state.open.items()))
        left = {key: value for key, value in state.open.items() if key != first}
        for alternative in alternatives:
            flattened = self._flattened([alternative])
            if flattened is not None:
                flat, open = flattened
                yield [self._known({**state.flat, **flat}, {**left, **open}, state.path)]

    def _array(self, parts: Sequence[dict[str, Any]], path: str) -> Iterator[list[_State]]:
        least = max(part.get("minItems", 0) for part in parts)
        most = min(part.get("maxItems", least) for part in parts)
        if least > most:
            return
        prefixes = max(len(part.get("prefixItems", ())) for part in parts)
        places = range(min(least, prefixes + 1))  # those behind are alike
        yield [self._state(_items(parts, place), f"{path}/items/{place}") for place in places]

    def _object(self, parts: Sequence[dict[str, Any]], path: str) -> Iterator[list[_State]]:
        required = dict.fromkeys(name for part in parts for name in part.get("required", ()))
        least = max(part.get("minProperties", 0) for part in parts)
        most = min(part.get("maxProperties", max(least, len(required))) for part in parts)
        if max(least, len(required)) > most:
            return
        needs = [
            self._state(_properties(parts, name), f"{path}/properties/{name}") for name in required
        ]
        if least <= len(required) or any("patternProperties" in part for part in parts):
            yield needs
            return
        named = dict.fromkeys(name for part in parts for name in part.get("properties", ()))
        for name in [name for name in named if name not in required]:
            yield [*needs, self._state(_properties(parts, name), f"{path}/properties/{name}")]
        additional = [part.get("additionalProperties", True) for part in parts]
        yield [*needs, self._state(additional, f"{path}/additionalProperties")]

    # --- the schema without what nothing matches

    def _kept(self, part: Schema) -> Schema:
        if isinstance(part, bool):
            return part
        if not self._parts[id(part)].finite:
            return False
        kept = dict(part)
        for name in _SCHEMAS:
            if name in part:
                kept[name] = self._kept(part[name])
        for name in _LISTS:
            if name in part:
                kept[name] = [self._kept(each) for each in part[name]]
        for name in _MAPS:
            if name in part:
                kept[name] = {key: self._kept(each) for key, each in part[name].items()}
        return kept


def _contradiction(state: _State) -> str:
    names = dict.fromkeys(name for part in state.flat.values() for name in part)
    if not names:
        return f"{shown(state.path)} allows no value"
    return f"no value is right by all of {', '.join(names)} at {shown(state.path)}"


def _types(parts: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """The types that all of these allow."""
    types = frozenset(TYPES)
    for part in parts:
        named = set(part.get("type", TYPES))
        if "number" in named:
            named.add("integer")
        types &= named
    return types


def _types_of(value: Any) -> frozenset[str]:
    """The types of a value."""
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number", *(["integer"] if value.is_integer() else [])})
        case str():
            return frozenset({"string"})
        case list():
            return frozenset({"array"})
    return frozenset({"object"})


def _values(parts: Sequence[Mapping[str, Any]]) -> list[Any] | None:
    """The values that all lists of values have; None without a list."""
    lists = [part["enum"] for part in parts if "enum" in part]
    lists += [[part["const"]] for part in parts if "const" in part]
    if not lists:
        return None
    common = set.intersection(*({canonical(value) for value in values} for values in lists))
    return [value for value in lists[0] if canonical(value) in common]


def _items(parts: Sequence[Mapping[str, Any]], place: int) -> list[Schema]:
    """Returns the schemas that the item at a place of a list must match."""
    out = []
    for part in parts:
        prefix = part.get("prefixItems", ())
        out.append(prefix[place] if place < len(prefix) else part.get("items", True))
    return out


def _properties(parts: Sequence[Mapping[str, Any]], name: str) -> list[Schema]:
    """Returns the schemas that a property of an object must match, as far as no pattern says
    it."""
    out: list[Schema] = []
    for part in parts:
        if name in part.get("properties", ()):
            out.append(part["properties"][name])
        elif "patternProperties" not in part:
            out.append(part.get("additionalProperties", True))
    return out
