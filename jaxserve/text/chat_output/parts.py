"""Parts of the text of a chat's completion: reasoning, answer, and calls of tools."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """A further piece of the answer."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Reasoning:
    """A further piece of what the model wrote before its answer."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallBegin:
    """The beginning of a call of a tool."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    """A further piece of the newest call's arguments, which together are JSON unless the completion
    was cut off."""

    text: str


Part = Text | Reasoning | CallBegin | Arguments


def whole_calls(parts: Sequence[Part]) -> list[tuple[str, str]]:
    """Names and arguments of the calls among parts."""
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CallBegin):
            calls.append((part.name, ""))
        elif isinstance(part, Arguments):
            name, arguments = calls[-1]
            calls[-1] = (name, arguments + part.text)
    return calls


def joined(parts: Sequence[Part]) -> list[Part]:
    """Joins consecutive pieces of one kind."""
    result: list[Part] = []
    for kind, pieces in itertools.groupby(parts, type):
        if kind is CallBegin:
            result.extend(pieces)
        else:
            texts = (piece.text for piece in pieces if not isinstance(piece, CallBegin))
            result.append(kind("".join(texts)))
    return result
