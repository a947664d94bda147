"""Schemas and grammars that calls of tools must match, in outputs that are forced to be one, and in
others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.text.structured_output.spec import Guided

# parts of a schema that say which other properties there may be
_NAME_MORE = frozenset(
    {
        "additionalProperties",
        "unevaluatedProperties",
        "patternProperties",
        "propertyNames",
        "allOf",
        "anyOf",
        "oneOf",
        "if",
        "not",
        "$ref",
        "$dynamicRef",
        "dependentSchemas",
        "dependencies",
    }
)


def forced_call(tools: Sequence[Mapping[str, Any]], name: str | None) -> Guided:
    """Returns the guide of an output that is a call of one of these functions, or of the one named,
    in JSON."""
    return Guided("calls", json.dumps({"forced": call_schema(tools, name)}))


def call_schema(tools: Sequence[Mapping[str, Any]], name: str | None) -> dict[str, Any]:
    """Returns the JSON schema of a call of one of these functions, or of the one named. References
    inside a function's schema resolve within it."""
    functions = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    calls = [
        {
            "type": "object",
            "required": ["name", "arguments"],
            "additionalProperties": False,
            "properties": {
                "name": {"const": function["name"]},
                "arguments": _arguments(number, function.get("parameters")),
            },
        }
        for number, function in enumerate(functions)
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _arguments(number: int, schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a function's schema with an $id that its references are relative to, and without
    $schema: drafts before 6 know no $id. Arguments that it does not name are ruled out where it
    says nothing of others: small models would invent them without end."""
    kept = {
        name: value for name, value in (schema or {"type": "object"}).items() if name != "$schema"
    }
    return {"$id": f"json-schema:///{number}", **_closed(kept)}


def _closed(schema: Any) -> Any:
    """A schema whose objects have no properties but those that it names, where it leaves that open
    and nothing beside may name more."""
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for name in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(name), dict):
            closed[name] = {key: _closed(value) for key, value in schema[name].items()}
    if "items" in schema:
        closed["items"] = _closed(schema["items"])
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list) and "properties" not in schema:
            closed[name] = [_closed(value) for value in schema[name]]
    named = schema.get("properties")
    required = schema.get("required", ())
    if (
        isinstance(named, dict)
        and isinstance(required, (list, tuple))
        and _NAME_MORE.isdisjoint(schema)
        and named.keys() >= {name for name in required if isinstance(name, str)}
    ):
        closed["additionalProperties"] = False
    return closed


def calls_guide(
    tools: Sequence[Mapping[str, Any]], begin: str, end: str, begin_is_token: bool
) -> Guided:
    """Returns the guide of text in which what follows `begin` is a call of one of these functions,
    in JSON, and then `end`. The arguments of strict functions obey their schemas, those of others
    are any object. begin_is_token: whether the model has a token for `begin`."""
    calls = [
        {
            "begin": f'\n{{"name": {json.dumps(tool["function"]["name"])}, "arguments": ',
            "schema": _arguments(number, _schema_of(tool["function"])),
            "end": f"}}\n{end}",
        }
        for number, tool in enumerate(tools)
    ]
    return Guided(
        "calls", json.dumps({"trigger": begin, "trigger_is_token": begin_is_token, "calls": calls})
    )


def _schema_of(function: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return function.get("parameters") if function.get("strict") else None
