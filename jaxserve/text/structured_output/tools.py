"""Guides of calls of tools: of outputs that are forced to be one, and of others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.text.structured_output.spec import Guided


def forced_call(tools: Sequence[Mapping[str, Any]], name: str | None) -> Guided:
    """Returns the guide of an output that is a call of one of these functions, or of the one named,
    in JSON."""
    functions = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    return _guide([_call(function, function.get("parameters")) for function in functions])


def calls_guide(
    tools: Sequence[Mapping[str, Any]], begin: str, end: str, begin_is_token: bool
) -> Guided:
    """Returns the guide of text in which what follows `begin` is a call of one of these functions,
    in JSON, and then `end`. The arguments of strict functions obey their schemas, those of others
    are any object. begin_is_token: whether the model has a token for `begin`."""
    calls = [_call(tool["function"], _strict_parameters(tool["function"])) for tool in tools]
    return _guide(calls, begin=begin, end=end, begin_is_token=begin_is_token)


def _call(function: Mapping[str, Any], parameters: Any) -> Mapping[str, Any]:
    strict = bool(function.get("strict"))
    return {"name": function["name"], "parameters": parameters, "strict": strict}


def _strict_parameters(function: Mapping[str, Any]) -> Any:
    return function.get("parameters") if function.get("strict") else None


def _guide(
    calls: Sequence[Mapping[str, Any]],
    begin: str = "",
    end: str = "",
    begin_is_token: bool = False,
) -> Guided:
    """The guide that `calls.Calls` reads."""
    marks = {"begin": begin, "end": end, "begin_is_token": begin_is_token}
    return Guided("calls", json.dumps({"calls": calls, **marks}))
