"""Helpers that the parsers of tool calls share.

A parser begins behind the mark that begins a call, and tries: `begin_call` is where it is sure. One
that returns before that has read no call, and the text that it took is text again; or the text was
cut off, if it took all of it. From then on it yields `Arguments` which together are the JSON of an
object, whatever the model wrote.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.text.chat_output.parts import CallBegin
from jaxserve.text.chat_output.source import Parser, Source, next_char

Schemas = Mapping[str, Mapping[str, Any]]  # JSON schema of a tool's parameters, by its name


@dataclasses.dataclass(frozen=True, slots=True)
class Scope:
    """The surroundings of a call.

    schemas: of the tools. ends: marks at which a call ends at the latest. marked: whether a mark
    began it; else it is a call only if the tool's name is known.
    """

    schemas: Schemas
    ends: Sequence[str]
    marked: bool = True


CallParser = Callable[[Source, Scope], Parser[None]]


def begin_call(source: Source, name: str) -> Parser[None]:
    """Yields the beginning of a call, from which there is no way back."""
    source.commit()
    yield CallBegin(name)


def either(first: str, one: CallParser, other: CallParser) -> CallParser:
    """Returns the parser that is `one` where the text begins with a character of `first`."""

    def parse(source: Source, scope: Scope) -> Parser[None]:
        char = yield from next_char(source)
        if char and char in first:
            yield from one(source, scope)
        else:
            yield from other(source, scope)

    return parse
