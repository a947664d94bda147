"""Calls whose arguments are JSON: objects with a name and arguments, or a name before them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from jaxserve.text.chat_output.calls import CallParser, Scope, begin_call
from jaxserve.text.chat_output.json_strings import JSON, JsonSyntax
from jaxserve.text.chat_output.json_values import json_text
from jaxserve.text.chat_output.json_writer import Piece
from jaxserve.text.chat_output.lenient_json import LenientJson, repaired
from jaxserve.text.chat_output.parts import Arguments, CallBegin
from jaxserve.text.chat_output.source import (
    Parser,
    Source,
    next_char,
    next_mark,
    spaces,
    take_match,
    take_one_of,
)

_FENCES = ("```json", "```")
_NAMES = ("name", "tool_name", "function")
_ARGUMENTS = ("arguments", "parameters", "args")
_MEMBERS = {*_NAMES, *_ARGUMENTS, "id", "type", "index", "tool_call_id"}


def json_calls(source: Source, scope: Scope) -> Parser[None]:
    """Objects with name and arguments: one, several, or a list of them."""
    yield from _object_calls(source, scope, _CallObject)


def keyed_calls(source: Source, scope: Scope) -> Parser[None]:
    """Objects whose keys are names, and their values arguments: one, several, or a list of them."""
    yield from _object_calls(source, scope, _KeyedObject)


def _object_calls(source: Source, scope: Scope, kind: type[_CallObject]) -> Parser[None]:
    yield from _take_any(source, _FENCES)
    yield from _take_any(source, ("[",))
    while (yield from _json_call(source, scope, kind)):
        yield from _take_any(source, ("}", "]", "```"))  # also such as are too many
        source.begin_trial()
        yield from _take_any(source, (",", ";", "["))


def _take_any(source: Source, marks: Sequence[str]) -> Parser[None]:
    """Takes marks that come next, and white space between them."""
    yield from spaces(source)
    while (yield from take_one_of(source, marks)):
        yield from spaces(source)


def _json_call(source: Source, scope: Scope, kind: type[_CallObject]) -> Parser[bool]:
    """Returns whether there was a call."""
    if (yield from next_char(source)) != "{":
        return False
    call = kind(scope)
    reader = LenientJson(JSON, scope.ends)
    while True:
        pieces = reader.push(source.take_to(-1))
        is_whole = reader.closed
        if source.ended and not is_whole:
            pieces += reader.finish()
        for piece in pieces:
            for part in call.read(piece):
                source.commit()
                yield part
            if call.is_none:
                return False
        if is_whole:
            for part in call.end():
                source.commit()
                yield part
        if is_whole or source.ended:
            source.put_back(reader.rest)
            return call.begun
        yield None


class _CallObject:
    """Reads an object with a name and arguments. begun: its call's beginning was there. is_none:
    it is no call."""

    def __init__(self, scope: Scope) -> None:
        self.begun = False
        self.is_none = False
        self._scope = scope
        self._name = ""
        self._members: dict[str, list[str]] = {}  # pieces of their JSON
        self._arguments: str | None = None  # the member that has them

    def read(self, piece: Piece) -> list[CallBegin | Arguments]:
        """Takes a further piece of the object; returns what is certain now of the call."""
        member = piece.member
        if member is None:
            return []
        if self.begun:
            return [Arguments(piece.text)] * (member == self._arguments and bool(piece.text))
        value = self._members.setdefault(member, [])
        value.append(piece.text)
        if member in _ARGUMENTS and self._arguments is None:
            self._arguments = member
        if member in _NAMES and piece.ends and not self._name:
            self._name = _text_of("".join(value))
        self.is_none = not self._scope.marked and not self._may_be_known(member)
        if self._arguments is None or not self._name or self.is_none:
            return []
        arguments = "".join(self._members[self._arguments])
        if arguments.startswith("{"):
            return self._begin(self._name, arguments)
        return []

    def end(self) -> list[CallBegin | Arguments]:
        """Ends the object; returns what is left of the call."""
        if self.begun:
            return []
        members = {member: "".join(pieces) for member, pieces in self._members.items()}
        function = members.get("function", "")
        if function.startswith("{"):
            members = {key: json_text(value) for key, value in json.loads(function).items()}
            self._name = _text_of(members.get("name", '""'))
        value = next((members[key] for key in _ARGUMENTS if key in members), None)
        if value is None and members.keys() <= _MEMBERS:
            value = "{}"
        arguments = _object_of(value or "")
        self.is_none = not self._name or not arguments or not self._may_be_known("name")
        if self.is_none:
            return []
        return self._begin(self._name, arguments)

    def _begin(self, name: str, arguments: str) -> list[CallBegin | Arguments]:
        self.begun = True
        return [CallBegin(name), Arguments(arguments)]

    def _may_be_known(self, member: str) -> bool:
        """Returns False if a call that no mark began is none: what may call must be known."""
        known = self._scope.marked or not self._name or self._name in self._scope.schemas
        return member in _MEMBERS and known


class _KeyedObject(_CallObject):
    """Reads an object whose members are calls: {"f": {"a": 1}}."""

    def read(self, piece: Piece) -> list[CallBegin | Arguments]:
        member = piece.member
        if member is None:
            return []
        if member == self._arguments:
            return [Arguments(piece.text)] * bool(piece.text)
        self.is_none = not self.begun and not piece.text.startswith("{")
        if self.is_none or not piece.text.startswith("{"):
            return []
        self._arguments = member
        return self._begin(member, piece.text)

    def end(self) -> list[CallBegin | Arguments]:
        self.is_none = not self.begun
        return []


def _text_of(value: str) -> str:
    """The text that a piece of JSON is; '' for other values."""
    text = json.loads(value)
    if isinstance(text, str):
        return text.strip()
    return ""


def _object_of(value: str) -> str:
    """JSON of the object that arguments stand for: one, a text that holds one, or nothing; '' for
    other values."""
    if value.startswith('"'):
        value = _text_of(value) or "{}"
    if value in ("null", "[]"):
        return "{}"
    return repaired(value) * value.startswith("{")


def named_calls(head: str, begun: str, syntax: JsonSyntax = JSON) -> CallParser:
    """Returns the parser of calls whose name stands before the object of their arguments.

    head: pattern of what stands before the arguments, with a group `name`. begun: pattern of its
    beginnings.
    """
    patterns = (re.compile(head), re.compile(begun))

    def parse(source: Source, scope: Scope) -> Parser[None]:
        found = yield from take_match(source, *patterns)
        if found is None:
            return
        if (yield from next_char(source)) == "{":
            yield from begin_call(source, found["name"].strip())
            yield from object_arguments(source, scope, syntax)
        elif (yield from next_mark(source, scope.ends)):
            yield from begin_call(source, found["name"].strip())
            yield Arguments("{}")

    return parse


def object_arguments(source: Source, scope: Scope, syntax: JsonSyntax) -> Parser[None]:
    """Yields the object that comes next."""
    reader = LenientJson(syntax, scope.ends)
    while True:
        pieces = reader.push(source.take_to(-1))
        if source.ended and not reader.closed:
            pieces += reader.finish()
        text = "".join(piece.text for piece in pieces)
        if text:
            yield Arguments(text)
        if reader.closed or source.ended:
            source.put_back(reader.rest)
            return
        yield None
