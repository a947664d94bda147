"""Reads the text of a completion as it comes: into reasoning, answer, and calls of tools."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator

from jaxserve.text.chat_output.calls import Marks, Schemas
from jaxserve.text.chat_output.formats import HARMONY, ReasoningFormat, ToolFormat
from jaxserve.text.chat_output.harmony import harmony_messages
from jaxserve.text.chat_output.parts import Part, Reasoning, Text, joined
from jaxserve.text.chat_output.source import (
    Parser,
    Source,
    before,
    everything,
    next_char,
    take_mark,
)

MAX_CALLS = 64  # of one completion; what looks like a further one is text


@dataclasses.dataclass(frozen=True, slots=True)
class OutputFormat:
    """Contents that the text of completions may have.

    reasoning, tools: None where there can be none. schemas: of the tools' parameters. in_reasoning:
    whether the prompt ends within reasoning. forced: whether the text is one call and nothing else.
    """

    reasoning: ReasoningFormat | None = None
    tools: ToolFormat | None = None
    schemas: Schemas = dataclasses.field(default_factory=dict)
    in_reasoning: bool = False
    forced: bool = False


class ChatReader:
    """Parses one completion's text; the parts do not depend on how the text is split, but for how
    they are split themselves."""

    def __init__(self, form: OutputFormat):
        self._source = Source()
        self._forced = form.forced
        self._parser: Generator[Part | None, None, None] | None = _parts(self._source, form)

    def push(self, text: str) -> list[Part]:
        """Takes a piece of text; returns the parts that are certain now."""
        self._source.text += text
        return self._run()

    def flush(self) -> list[Part]:
        """Ends the text; returns the parts that are left."""
        self._source.ended = True
        return self._run()

    def _run(self) -> list[Part]:
        parts: list[Part] = []
        while self._parser is not None:
            try:
                part = next(self._parser)
            except StopIteration:
                self._parser = None
                break
            if part is None:
                break
            if not (self._forced and isinstance(part, Text)):
                parts.append(part)
        return joined(parts)


def _parts(source: Source, form: OutputFormat) -> Parser[None]:
    harmony = HARMONY in (form.tools and form.tools.name, form.reasoning and form.reasoning.name)
    if harmony and not form.forced:
        yield from harmony_messages(source)
        return
    if form.reasoning is not None:
        begun = form.in_reasoning or (yield from take_mark(source, form.reasoning.begin))
        if begun:
            yield from before(source, (form.reasoning.end,), Reasoning)
            yield from next_char(source)
    if form.tools is None:
        yield from everything(source, Text)
    else:
        yield from _answer(source, form.tools, form.schemas)


def _answer(source: Source, form: ToolFormat, schemas: Schemas) -> Parser[None]:
    """Yields text and calls."""
    calls = 0
    if form.bare and (yield from _begins_with(source, form.bare)):
        yield from form.parse(source, Marks("", ""), schemas)
    marks = tuple(filter(None, (form.marks.begin, *form.noise)))
    while marks and calls < MAX_CALLS:
        mark = yield from before(source, marks, Text)
        if not mark:
            return
        if mark == form.marks.begin:
            calls += 1
            yield from form.parse(source, form.marks, schemas)
    yield from everything(source, Text)


def _begins_with(source: Source, characters: str) -> Parser[bool]:
    """Returns True if the first character after white space, which stays, is one of these."""
    while not source.text.strip() and not source.ended:
        yield None
    return source.text.lstrip()[:1] in tuple(characters)
