"""Parsers of calls of tools, in the ways in which families of models write them.

Each begins behind the mark that begins a call, and ends behind the call. What turns out to be no
call is text, as the model wrote it; the beginning of a call that was cut off is left out.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.text.chat_output.parts import Arguments, CallBegin, Text
from jaxserve.text.chat_output.source import (
    Nesting,
    Parser,
    Source,
    before,
    nested,
    next_char,
    take_mark,
    take_match,
    until,
)

Schemas = Mapping[str, Mapping[str, Any]]  # JSON schema of a tool's parameters, by its name


@dataclasses.dataclass(frozen=True, slots=True)
class Marks:
    """Marks around calls of tools: what begins them ('' for calls that begin a text without a
    mark) and what ends them ('' for the end of the text)."""

    begin: str
    end: str


CallParser = Callable[[Source, Marks, Schemas], Parser[None]]

_JSON_HEAD = re.compile(
    r'\s*\[?\s*\{\s*(?:"(?:id|type)"\s*:\s*"[^"]*"\s*,\s*)*'
    r'"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


def json_calls(source: Source, marks: Marks, schemas: Schemas) -> Parser[None]:
    """Objects with name and arguments, one or a list of them: Hermes, Llama 3, Mistral."""
    while True:
        head = yield from take_match(source, _JSON_HEAD, marks.end)
        name = _text_of(head["name"]) if head else None
        if name is None:
            yield from _json_of_any_order(source, marks, head[0] if head else "")
            return
        yield CallBegin(name)
        if not (yield from nested(source, Nesting(), Arguments)):
            return
        yield from nested(source, Nesting(depth=1), None)  # what else the object has
        if (yield from next_char(source)) not in (",", ";"):
            break
        source.take(1)
    yield from take_mark(source, "]")
    if marks.end:
        yield from take_mark(source, marks.end)


def _text_of(literal: str) -> str | None:
    try:
        return json.loads(literal)
    except ValueError:
        return None


def _json_of_any_order(source: Source, marks: Marks, taken: str) -> Parser[None]:
    """Calls that can only be read once they are whole. taken: what was taken before."""
    closed = bool(marks.end) and marks.end in source.text
    body = taken + (yield from until(source, marks.end))
    try:
        entries = json.loads(body)
        if not isinstance(entries, list):
            entries = [entries]
        calls = [_named(entry) for entry in entries]
    except (ValueError, TypeError, KeyError, RecursionError):
        cut = marks.begin and not closed and body.lstrip()[:1] in ("", "{", "[")
        text = marks.begin + body + marks.end * closed
        if text and not cut:
            yield Text(text)
        return
    for name, arguments in calls:
        yield CallBegin(name)
        yield Arguments(arguments)


def _named(entry: Any) -> tuple[str, str]:
    """Name and arguments of a call. Errors: TypeError, KeyError for what is none."""
    name = entry["name"]
    arguments = entry.get("arguments", entry.get("parameters", {}))
    if not isinstance(name, str):
        raise TypeError(name)
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return name, arguments


def named_calls(head: str) -> CallParser:
    """Returns the parser of calls whose name stands before the JSON of its arguments: newer Mistral
    models, DeepSeek. head: pattern of what stands before the arguments, with a group `name`."""
    pattern = re.compile(head + r"\s*(?=\{)")

    def parse(source: Source, marks: Marks, schemas: Schemas) -> Parser[None]:
        found = yield from take_match(source, pattern, marks.end)
        if found is None:
            yield Text(marks.begin)
            return
        yield CallBegin(found["name"].strip())
        if (yield from nested(source, Nesting(), Arguments)) and marks.end:
            yield from until(source, marks.end)

    return parse


def either(first: str, one: CallParser, other: CallParser) -> CallParser:
    """Returns the parser that is `one` where the text begins with a character of `first`."""

    def parse(source: Source, marks: Marks, schemas: Schemas) -> Parser[None]:
        char = yield from next_char(source)
        chosen = one if char and char in first else other
        yield from chosen(source, marks, schemas)

    return parse


_PYTHON_HEAD = re.compile(r"\s*[\[,]?\s*(?P<name>[A-Za-z_][\w.-]*)\s*(?=\()")


def pythonic_calls(source: Source, marks: Marks, schemas: Schemas) -> Parser[None]:
    """A list of calls as in Python, [f(a=1), g()]: Llama 4, and Llama 3.2 with such a prompt."""
    begin = marks.begin
    while True:
        head = yield from take_match(source, _PYTHON_HEAD, marks.end)
        if head is None:
            yield from _json_of_any_order(source, Marks(begin, marks.end), "")
            return
        written: list[str] = []
        taken = yield from _take_brackets(source, written)
        arguments = _keyword_arguments(written[0]) if taken else None
        if arguments is None:
            yield Text(begin + head[0] + written[0])
            return
        yield CallBegin(head["name"])
        yield Arguments(arguments)
        begin = ""
        if (yield from next_char(source)) != ",":
            break
    yield from take_mark(source, "]")
    if marks.end:
        yield from take_mark(source, marks.end)


def _take_brackets(source: Source, written: list[str]) -> Parser[bool]:
    """Takes a bracket and what is in it; adds that to `written`. Returns whether it was closed."""
    nesting = Nesting(quotes="\"'")
    text = ""
    while True:
        end = nesting.end(source.text)
        text += source.take_to(end)
        if end >= 0 or source.ended:
            written.append(text)
            return end >= 0
        yield None


def _keyword_arguments(brackets: str) -> str | None:
    """JSON of the keyword arguments of a call, which must be literals; None for anything else."""
    try:
        call = ast.parse(f"f{brackets}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
        return json.dumps(values, ensure_ascii=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterSyntax:
    """Syntax of calls whose parameters have marks of their own.

    name, key: patterns of what begins a call and a parameter, with a group of that name. value_end:
    the mark behind a value, in front of which one line break is not part of it.
    """

    name: re.Pattern[str]
    key: re.Pattern[str]
    value_end: str


QWEN_CODER = ParameterSyntax(
    re.compile(r"\s*<function=(?P<name>[^>\n]+)>"),
    re.compile(r"\s*<parameter=(?P<key>[^>\n]+)>(?:\n|(?=[^\n]))"),
    "</parameter>",
)
GLM = ParameterSyntax(
    re.compile(r"\s*(?P<name>[^\s<]+)(?=\s*<)"),
    re.compile(r"\s*<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>"),
    "</arg_value>",
)


def parameter_calls(syntax: ParameterSyntax) -> CallParser:
    """Returns the parser of calls whose parameters have marks of their own."""

    def parse(source: Source, marks: Marks, schemas: Schemas) -> Parser[None]:
        head = yield from take_match(source, syntax.name, marks.end)
        if head is None:
            yield from _json_of_any_order(source, marks, "")
            return
        name = head["name"].strip()
        properties = schemas.get(name, {}).get("properties")
        if not isinstance(properties, Mapping):
            properties = {}
        yield CallBegin(name)
        opening = "{"
        while key := (yield from _next_key(source, syntax, marks.end)):
            yield Arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
            if not (yield from _value(source, syntax.value_end, properties.get(key))):
                return
            opening = ", "
        if marks.end in source.text:  # else it was cut off
            yield Arguments(opening.replace(", ", "") + "}")
            yield from until(source, marks.end)
        else:
            source.take_to(-1)

    return parse


def _next_key(source: Source, syntax: ParameterSyntax, end: str) -> Parser[str | None]:
    """Takes what begins a parameter; returns its name, None where the call ends first."""
    while True:
        match = syntax.key.match(source.text)
        if match:
            source.take(match.end())
            return match["key"].strip()
        if source.ended or end in source.text:
            return None
        yield None


def _value(source: Source, end: str, schema: Any) -> Parser[bool]:
    """Yields the JSON of a value that ends before a mark; a text comes as it is written. Returns
    whether there was the mark."""
    types = _types(schema)
    if types == {"string"}:
        yield Arguments('"')
        if not (yield from before(source, (f"\n{end}", end), _json_piece)):
            return False
        yield Arguments('"')
        return True
    closed = source.text.find(end) >= 0
    while not closed and not source.ended:
        yield None
        closed = source.text.find(end) >= 0
    written = (yield from until(source, end)).removesuffix("\n")
    if closed:
        yield Arguments(_json_value(written, types))
    return closed


def _types(schema: Any) -> set[str]:
    """The types that a schema names; none where it says nothing."""
    if not isinstance(schema, Mapping):
        return set()
    types = schema.get("type")
    values = schema.get("enum")
    if types is None and isinstance(values, list) and all(isinstance(v, str) for v in values):
        return {"string"}
    if isinstance(types, str):
        return {types}
    return set(types) if isinstance(types, list) else set()


def _json_piece(text: str) -> Arguments:
    return Arguments(json.dumps(text, ensure_ascii=False)[1:-1])


def _json_value(written: str, types: set[str]) -> str:
    """JSON of a value as a model wrote it: JSON, a literal of Python, or a text."""
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(written.strip())
            if types and "string" in types and not isinstance(value, (type(None), str)):
                break
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            pass
    return json.dumps(written, ensure_ascii=False)
