"""Calls as in Python: Llama 3.2 and 4, Gemma 3, OLMo 3, LFM2."""

from __future__ import annotations

import ast
import re

from jaxserve.text.chat_output.calls import Scope, begin_call
from jaxserve.text.chat_output.json_calls import json_calls
from jaxserve.text.chat_output.json_values import json_text
from jaxserve.text.chat_output.parts import Arguments
from jaxserve.text.chat_output.source import Parser, Source, next_char, take_match

_HEAD = re.compile(r"\s*(?P<name>[A-Za-z_][\w.-]*)\s*\(")
_HEAD_BEGUN = re.compile(r"\s*(?:[A-Za-z_][\w.-]*\s*)?")
_ESCAPES = "\n\\'\"abfnrtv01234567xNuU"
_CONTROLS = {"\n": "\\n", "\r": "\\r", "\0": "\\x00"}
_LITERALS = {"true": True, "false": False, "null": None}


def pythonic_calls(source: Source, scope: Scope) -> Parser[None]:
    """A list of calls, or, behind a mark, lines of them: [f(a=1), g()]; also such as are JSON."""
    listed = (yield from next_char(source)) == "["
    if listed:
        source.take(1)
    if (yield from next_char(source)) == "{":
        yield from json_calls(source, scope)
        return
    several = listed or scope.marked
    while (yield from _pythonic_call(source, scope)):
        source.begin_trial()
        while several and (yield from next_char(source)) in (",", ";"):
            source.take(1)
        if not several:
            return
        if listed and (yield from next_char(source)) == "]":
            source.take(1)
            source.commit()
            return


def _pythonic_call(source: Source, scope: Scope) -> Parser[bool]:
    """Returns whether there was a call, all of which is needed to know."""
    head = yield from take_match(source, _HEAD, _HEAD_BEGUN)
    if head is None or not (scope.marked or head["name"] in scope.schemas):
        return False
    brackets = _Brackets()
    while not brackets.closed:
        source.take(brackets.read(source.text))
        if brackets.closed or source.ended:
            break
        yield None
    arguments = _keyword_arguments(brackets.text) if brackets.closed else None
    if arguments is None:
        return False
    yield from begin_call(source, head["name"])
    yield Arguments(arguments)
    return True


class _Brackets:
    """Finds where a bracket that was opened is closed. text: what was read, with line breaks,
    backslashes and quotes in strings as Python wants them."""

    def __init__(self) -> None:
        self.text = ""
        self.closed = False
        self._depth = 1
        self._quote = ""  # of the string that is open, one or three
        self._is_empty = False  # nothing of the string was read
        self._escaped = False
        self._quotes = 0  # that follow each other at the end of a string with three
        self._after_quote: str | None = None  # white space behind what may end a string

    def read(self, text: str) -> int:
        """Reads further text; returns the number of characters that belong to it."""
        written = []
        length = 0
        while length < len(text) and not self.closed:
            char = text[length]
            written.append(self._quoted(char) if self._quote else self._bare(char))
            length += 1
        self.text += "".join(written)
        return length

    def _bare(self, char: str) -> str:
        if char in "\"'":
            self._quote = char
            self._is_empty = True
        self._depth += (char in "([{") - (char in ")]}")
        self.closed = self._depth == 0
        return char * (not self.closed)

    def _quoted(self, char: str) -> str:
        if self._after_quote is not None:
            return self._behind_quote(char)
        if self._escaped:
            self._escaped = False
            return "\\" * (1 + (char not in _ESCAPES)) + char
        if char == "\\":
            self._escaped = True
            self._quotes = 0
            return ""
        if char == self._quote:
            self._after_quote = ""
            return ""
        self._is_empty = False
        self._quotes = (self._quotes + 1) * (char == self._quote[0])
        if self._quotes == 3:
            self._quote = ""
            self._quotes = 0
        return _CONTROLS.get(char, char)

    def _behind_quote(self, char: str) -> str:
        """Reads on behind a quote, which ends a string if what follows strings comes next."""
        quote = self._quote
        if char == quote and self._is_empty and not self._after_quote:
            self._after_quote = None
            self._quote = 3 * quote
            return 2 * quote
        if char.isspace():
            self._after_quote = f"{self._after_quote}{char}"
            return ""
        space = self._after_quote or ""
        self._after_quote = None
        if char in ",)]}:":
            self._quote = ""
            return quote + space + self._bare(char)
        self._is_empty = False
        return "\\" + quote + "".join(_CONTROLS.get(c, c) for c in space) + self._quoted(char)


def _keyword_arguments(text: str) -> str | None:
    """JSON of a call's keyword arguments, which must be literals; None for anything else."""
    try:
        call = ast.parse(f"f({text}\n)", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                return None
            values[keyword.arg] = ast.literal_eval(_Literals().visit(keyword.value))
        return json_text(values)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


class _Literals(ast.NodeTransformer):
    """Makes literals of JSON those of Python."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in _LITERALS:
            return ast.copy_location(ast.Constant(_LITERALS[node.id]), node)
        return node
