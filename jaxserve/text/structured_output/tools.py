"""What a call of a tool must match, where the output is forced to be one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


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
    $schema: drafts before 6 know no $id."""
    kept = {
        name: value for name, value in (schema or {"type": "object"}).items() if name != "$schema"
    }
    return {"$id": f"json-schema:///{number}", **kept}
