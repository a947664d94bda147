"""Finds rules of a grammar that no finite text matches."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

MAX_PARTS = 1024  # rules and groups of a grammar that is looked at
# parametric rules, and conditions of theirs, are left to the library
_PARAMETRIC = re.compile(r"::|%if\b")
_RULE = re.compile(r"^[?!]*(?P<name>\w[\w-]*)(?:\[[^\]\n]*\])?(?:\.-?\d+)?\s*:", re.MULTILINE)
_TOKEN = re.compile(
    r"""//[^\n]*|\#[^\n]*|->\s*\w+           # comments and names of alternatives
      | (?P<leaf>"(?:\\.|[^"\\\n])*"\w* | /(?:\\.|[^/\\\n])*/\w* | <[^<>\s]*> | @[\w-]+)
      | (?P<any>[?*] | [{~]\s*0*(?![0-9]))   # also none of it
      | (?P<name>\w[\w-]*) | (?P<mark>[|()\[\]])""",
    re.VERBOSE,
)
_LEAF = ""  # what matches some text, whatever the rules are


@dataclasses.dataclass(slots=True)
class _Part:
    """A rule, or a group within one. ways: to match it, each with the parts that it needs;
    mentioned: all parts in it, also those that may be left out."""

    name: str
    ways: list[list[str]]
    mentioned: set[str]

    def add(self, part: str) -> None:
        self.ways[-1].append(part)
        self.mentioned.add(part)


def endless_rule(text: str) -> str:
    """Returns the name of a rule that `start` may lead to and nothing finite matches, or ''."""
    if _PARAMETRIC.search(text):
        return ""
    parts = {part.name: part for part in _parts(text)}
    if len(parts) > MAX_PARTS:
        return ""
    finite = _finite(parts)
    reached = {"start"}
    pending = ["start"]
    while pending:
        name = pending.pop()
        if name in parts and name not in finite:
            return name.partition("(")[0]
        found = parts[name].mentioned - reached if name in parts else set()
        reached |= found
        pending += sorted(found)
    return ""


def _finite(parts: Mapping[str, _Part]) -> set[str]:
    """Names of parts that something finite matches; unknown ones count as such."""
    finite = {name for part in parts.values() for name in part.mentioned} - parts.keys()
    left = list(parts.values())
    while True:
        before = len(left)
        for part in left:  # groups come before the rules that they are in
            if any(finite.issuperset(way) for way in part.ways):
                finite.add(part.name)
        left = [part for part in reversed(left) if part.name not in finite]
        if len(left) == before:
            return finite


def _parts(text: str) -> Iterator[_Part]:
    heads = list(_RULE.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    for head, end in zip(heads, ends, strict=False):
        lines = text[head.end() : end].split("\n")
        body = "\n".join(line for line in lines if not line.startswith("%"))
        yield from _groups(head["name"], body)


def _groups(name: str, body: str) -> Iterator[_Part]:
    """Yields the groups of a rule, the inner ones first, and then the rule."""
    open = [_Part(name, [[]], set())]
    for number, token in enumerate(_TOKEN.finditer(body)):
        match token.lastgroup, token[0]:
            case "leaf", _:
                open[-1].add(_LEAF)
            case "name", part:
                open[-1].add(part if part.islower() else _LEAF)
            case "any", _:
                open[-1].ways[-1][-1:] = [_LEAF]
            case "mark", "|":
                open[-1].ways.append([])
            case "mark", "(" | "[":
                open.append(_Part(f"{name}({number}", [[]], set()))
            case "mark", end if len(open) > 1:
                group = open.pop()
                yield group
                open[-1].add(group.name)
                if end == "]":
                    open[-1].ways[-1][-1] = _LEAF
    yield open[0]
