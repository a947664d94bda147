"""Calls whose parameters have marks of their own: Qwen3-Coder, GLM, MiniMax, DeepSeek V3.2."""

from __future__ import annotations

import dataclasses
import re

from jaxserve.text.chat_output.calls import CallParser, Scope, begin_call
from jaxserve.text.chat_output.json_calls import object_arguments
from jaxserve.text.chat_output.json_strings import JSON
from jaxserve.text.chat_output.json_values import json_text
from jaxserve.text.chat_output.parameter_syntax import TEXT_TYPES, ParameterSyntax
from jaxserve.text.chat_output.parameter_types import ParameterTypes, value_of
from jaxserve.text.chat_output.parts import Arguments
from jaxserve.text.chat_output.source import (
    MAX_HEAD,
    Parser,
    Source,
    held,
    next_char,
    next_mark,
    spaces,
    take_mark,
    take_match,
)

STRING = frozenset(["string"])
MAX_KEY = 256  # characters of what begins a parameter


def parameter_calls(syntax: ParameterSyntax) -> CallParser:
    """Returns the parser of calls whose parameters have marks of their own."""

    def parse(source: Source, scope: Scope) -> Parser[None]:
        head = yield from take_match(source, syntax.head, syntax.head_begun)
        if head is None:
            return
        name = _bare_name(head["name"])
        if (yield from next_char(source)) == "{":  # as in other formats
            yield from begin_call(source, name)
            ends = tuple(filter(None, (syntax.call_end, *scope.ends)))
            yield from object_arguments(source, dataclasses.replace(scope, ends=ends), JSON)
            yield from take_mark(source, syntax.call_end)
        else:
            yield from _Call(source, scope, syntax, name).parts()

    return parse


def _bare_name(name: str) -> str:
    """A name without quotes around it."""
    return name.strip().strip("\"'")


class _Call:
    """Reads the parameters of a call. A text comes as it is written, other values once whole."""

    def __init__(self, source: Source, scope: Scope, syntax: ParameterSyntax, name: str):
        self._source = source
        self._syntax = syntax
        self._name = name
        self._types = ParameterTypes(scope.schemas.get(name, {}))
        self._outer_ends = tuple(scope.ends)
        self._ends = tuple(filter(None, (syntax.call_end, *scope.ends)))
        self._marks = (*syntax.value_ends, syntax.parameter, *self._ends)
        self._any_mark = re.compile("|".join(map(re.escape, self._marks)))
        self._closed = False  # the end of the call was there
        self._value_closed = False  # that of the newest value
        self._written: set[str] = set()  # the parameters' names

    def parts(self) -> Parser[None]:
        while (key := (yield from self._next_key())) is not None:
            name = _bare_name(key["key"])
            types = self._types_of(key)
            if self._syntax.trims and (yield from self._next_is_line_break()):
                self._source.take(1)
            if types == STRING and name not in self._written:
                yield from self._text(name)
            else:
                yield from self._other_value(name, types)
        if self._closed and not self._written:
            yield from begin_call(self._source, self._name)
            yield Arguments("{}")
        elif self._written:
            yield Arguments("}")

    def _types_of(self, key: re.Match[str]) -> frozenset[str]:
        """Types of a parameter: those that its schema names, and what the model says."""
        types = self._types.of(_bare_name(key["key"]))
        said = key.groupdict().get("type")
        if said in TEXT_TYPES and (not types or types >= STRING):
            return STRING
        if said and said not in TEXT_TYPES:
            return types - STRING
        return types

    def _next_key(self) -> Parser[re.Match[str] | None]:
        """Takes what begins a parameter; None at the end of the parameters."""
        source = self._source
        while True:
            yield from spaces(source)
            mark = yield from next_mark(source, self._marks)
            if source.ended and not mark and self._is_mark_begun(source.text):
                source.take_to(-1)  # the text was cut off within a mark
            if mark in self._ends or source.exhausted:
                self._closed = bool(mark)
                source.take(len(mark) * (mark == self._syntax.call_end))
                return None
            key = None
            if mark == self._syntax.parameter:
                key = yield from self._take_key()
            if key is not None:
                return key
            if mark and self._is_key_cut(len(mark)):
                source.take_to(-1)
                return None
            if not self._written:  # a mark that is mentioned
                return None
            source.take(1)  # what is between parameters says nothing
            source.take_to(source.text.find(mark[:1] or "<"))

    def _take_key(self) -> Parser[re.Match[str] | None]:
        source = self._source
        while True:
            key = self._syntax.key.match(source.text)
            if key is not None:
                source.take(key.end())
            if key is not None or source.ended or len(source.text) > MAX_HEAD:
                return key
            yield None

    def _is_key_cut(self, length: int) -> bool:
        """Returns whether the text was cut off in what begins a parameter, behind a mark of this
        length."""
        rest = self._source.text[length:]
        is_begun = self._source.ended and len(rest) < MAX_KEY
        return is_begun and not self._any_mark.search(rest)

    def _next_is_line_break(self) -> Parser[bool]:
        while not self._source.text and not self._source.ended:
            yield None
        return self._source.text.startswith("\n")

    def _text(self, name: str) -> Parser[None]:
        """Yields a parameter that is a text; nothing of one that was cut off before it."""
        opened = False
        while True:
            piece = yield from self._piece_of_value()
            if not opened and (piece or self._value_closed):
                yield from self._begin_parameter(name)
                yield Arguments('"')
                opened = True
            if piece is None:
                break
            yield Arguments(json_text(piece)[1:-1])
        if opened:
            yield Arguments('"')

    def _other_value(self, name: str, types: frozenset[str]) -> Parser[None]:
        """Yields a parameter whose value must be whole to be read; nothing of one that was cut off,
        or whose name was there before."""
        value = ""
        while (piece := (yield from self._piece_of_value())) is not None:
            value += piece
        if self._value_closed and name not in self._written:
            yield from self._begin_parameter(name)
            yield Arguments(value_of(value, types))

    def _begin_parameter(self, name: str) -> Parser[None]:
        if not self._written:
            yield from begin_call(self._source, self._name)
        yield Arguments(f"{', ' if self._written else '{'}{json_text(name)}: ")
        self._written.add(name)

    def _piece_of_value(self) -> Parser[str | None]:
        """Takes a piece of a value; None at its end, whose mark is taken."""
        source = self._source
        self._value_closed = False
        while True:
            mark, is_end = self._next_end()
            if mark is None and source.ended:
                return source.take_to(-1) or None
            begin = len(source.text) - held(source.text, self._marks)
            if mark is not None:
                begin = mark.start()
            if self._syntax.trims and source.text[:begin].endswith("\n"):
                begin -= 1
            if begin:
                return source.take(begin)
            if is_end:
                assert mark is not None
                source.take(mark.end() if mark[0] in self._syntax.value_ends else mark.start())
                self._value_closed = True
                return None
            yield None

    def _next_end(self) -> tuple[re.Match[str] | None, bool]:
        """Finds the next mark at which a value ends, or may, and whether it does."""
        for mark in self._any_mark.finditer(self._source.text):
            is_end = self._is_end(mark)
            if is_end or is_end is None:
                return mark, bool(is_end)
        return None, False

    def _is_end(self, mark: re.Match[str]) -> bool | None:
        """Returns whether a value ends at a mark; None where that needs more text.

        It does if what follows is what follows values: so a value may hold marks, and its own end
        may be missing.
        """
        text = self._source.text
        if mark[0] == self._syntax.parameter:
            key = self._syntax.key.match(text, mark.start())
            if key is None and not self._source.ended and len(text) - mark.start() < MAX_KEY:
                return None
            return key is not None and self._is_missing(_bare_name(key["key"]))
        followers = self._outer_ends
        if mark[0] in self._syntax.value_ends:
            followers = (self._syntax.parameter, *self._ends)
        rest = text[mark.end() : mark.end() + MAX_KEY].lstrip()
        if rest.startswith(followers):
            return True
        if any(each.startswith(rest) for each in followers) and not self._source.ended:
            return None
        return not rest

    def _is_missing(self, parameter: str) -> bool:
        """Returns True if a parameter of the tool was not there yet."""
        return parameter in self._types and parameter not in self._written

    def _is_mark_begun(self, text: str) -> bool:
        return any(mark.startswith(text) for mark in self._marks)
