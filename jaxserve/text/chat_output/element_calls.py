"""Calls whose parameters are elements within each other: MiniMax M3.

Every tag has a mark before it: ]<]minimax[>[<city>Rome]<]minimax[>[</city>. Elements within an
element are the members of an object; those of the name `item` are the entries of a list.
"""

from __future__ import annotations

import dataclasses
import re

from jaxserve.text.chat_output.calls import Scope, begin_call
from jaxserve.text.chat_output.json_values import json_text
from jaxserve.text.chat_output.parameter_syntax import in_tag
from jaxserve.text.chat_output.parameter_types import ENTRIES, ParameterTypes, value_of
from jaxserve.text.chat_output.parts import Arguments, Text
from jaxserve.text.chat_output.source import Parser, Source, next_mark, take_match, up_to

NAMESPACE = "]<]minimax[>["
INVOKE = f"{NAMESPACE}<invoke name"
INVOKE_END = f"{NAMESPACE}</invoke>"
MAX_DEPTH = 64  # elements within elements; those beyond are text
_HEAD = re.compile(rf"{in_tag('name')}>")
_HEAD_BEGUN = re.compile(r"[^>]*")
_TAG = re.compile(rf"{re.escape(NAMESPACE)}<(?P<closes>/?)(?P<name>[^<>\n]+)>")


@dataclasses.dataclass(slots=True)
class _Element:
    """An element: its text, and the elements in it."""

    name: str
    text: str = ""
    inner: list[_Element] = dataclasses.field(default_factory=list)


def element_calls(source: Source, scope: Scope) -> Parser[None]:
    """A call, behind the mark INVOKE; all of it is read before its arguments are given."""
    head = yield from take_match(source, _HEAD, _HEAD_BEGUN)
    if head is None:
        return
    name = head["name"].strip()
    yield from begin_call(source, name)
    pieces: list[str] = []
    for part in up_to(source, (INVOKE_END, *scope.ends), Text):
        if isinstance(part, Text):
            pieces.append(part.text)
        else:
            yield None
    if (yield from next_mark(source, (INVOKE_END,))):
        source.take(len(INVOKE_END))
    types = ParameterTypes(scope.schemas.get(name, {}))
    yield Arguments(_members(_element_of("".join(pieces)), types))


def _element_of(body: str) -> _Element:
    """The element that a call is: its parameters are in it. One whose end is missing ends with the
    one that it is in."""
    stack = [_Element("")]
    end = 0
    for tag in _TAG.finditer(body):
        stack[-1].text += body[end : tag.start()]
        end = tag.end()
        names = [element.name for element in stack[1:]]
        if tag["closes"] and tag["name"] in names:
            while stack.pop().name != tag["name"]:
                pass
        elif not tag["closes"] and len(stack) <= MAX_DEPTH:
            element = _Element(tag["name"])
            stack[-1].inner.append(element)
            stack.append(element)
        else:
            stack[-1].text += tag[0]
    stack[-1].text += body[end:]
    return stack[0]


def _members(element: _Element, types: ParameterTypes) -> str:
    """JSON of the object that an element's inner ones are; of two of one name the first counts."""
    members = {inner.name: inner for inner in reversed(element.inner)}
    names = dict.fromkeys(inner.name for inner in element.inner)
    written = [f"{json_text(name)}: {_value(members[name], types, name)}" for name in names]
    return "{" + ", ".join(written) + "}"


def _value(element: _Element, types: ParameterTypes, name: str) -> str:
    """JSON of an element. name: that under which its types are known."""
    if not element.inner:
        empty = "" if element.text.strip() else _empty(types.of(name))
        return empty or value_of(element.text, types.of(name))
    within = types.within(name)
    if all(inner.name == ENTRIES for inner in element.inner):
        return "[" + ", ".join(_value(inner, within, ENTRIES) for inner in element.inner) + "]"
    return _members(element, within)


def _empty(types: frozenset[str]) -> str:
    """JSON of an element without text; '' where that is a text."""
    if "string" in types:
        return ""
    values = {"object": "{}", "array": "[]", "null": "null"}
    return next((value for kind, value in values.items() if kind in types), "")
