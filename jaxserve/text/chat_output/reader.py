"""Reads the text of a completion as it comes: into reasoning, answer, and calls of tools."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator

from jaxserve.text.chat_output.calls import CallParser, Schemas, Scope
from jaxserve.text.chat_output.harmony import harmony_messages
from jaxserve.text.chat_output.parts import Part, Reasoning, Text, joined
from jaxserve.text.chat_output.reasoning_formats import ReasoningFormat
from jaxserve.text.chat_output.source import (
    Parser,
    Source,
    next_char,
    next_mark,
    spaces,
    take_mark,
    take_one_of,
    up_to,
)
from jaxserve.text.chat_output.tool_formats import HARMONY, NO_TOOLS, ToolFormat

_NO_REASONING = ReasoningFormat("none", "", "")
MAX_PIECE = 4096  # characters that are read at once: what is taken of them moves the others
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
        parts: list[Part] = []
        for begin in range(0, len(text), MAX_PIECE):
            self._source.text += text[begin : begin + MAX_PIECE]
            parts += self._run()
        return joined(parts)

    def flush(self) -> list[Part]:
        """Ends the text; returns the parts that are left."""
        self._source.ended = True
        return joined(self._run())

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
        return parts


def _parts(source: Source, form: OutputFormat) -> Parser[None]:
    harmony = HARMONY in (form.tools and form.tools.name, form.reasoning and form.reasoning.name)
    if harmony and not form.forced:
        yield from harmony_messages(source, form.schemas)
        return
    answer = _Answer(source, form)
    if form.reasoning is not None:
        yield from _reasoning(source, form.reasoning, form.in_reasoning, answer)
    yield from answer.parts()


def _reasoning(source: Source, form: ReasoningFormat, begun: bool, answer: _Answer) -> Parser[None]:
    """Yields the reasoning before an answer, which may come in several blocks. One whose end is
    missing ends where a call begins; one whose beginning is missing is empty."""
    while (yield from take_mark(source, form.begin)) or begun:
        begun = False
        space = yield from spaces(source)
        if space and not (yield from next_mark(source, (form.end,))):
            yield Reasoning(space)
        yield from answer.parts(Reasoning)
        yield from next_char(source)
    if not answer.has_reasoning:
        yield from take_mark(source, form.end)
    for begin in form.answer_begins:
        if (yield from take_mark(source, begin)):
            return


class _Answer:
    """Reads text and calls.

    Marks around a call, and white space between these, are no text. What looks like the beginning
    of a call is text if it turns out to be none, and nothing if it was cut off. has_reasoning: a
    block of reasoning was read to its end.
    """

    def __init__(self, source: Source, form: OutputFormat) -> None:
        tools = form.tools or NO_TOOLS
        self.beginnings = (*tools.calls, *tools.openings)
        self._source = source
        self._tools = tools
        self.has_reasoning = False
        reasoning = form.reasoning or _NO_REASONING
        self._answer_ends = reasoning.answer_ends
        self._reasoning_begin = reasoning.begin
        self._reasoning_end = reasoning.end
        outer = (*self.beginnings, *tools.closings, *self._answer_ends)
        self._marks = (*outer, *filter(None, (reasoning.begin, reasoning.end)))
        self._scope = Scope(form.schemas, outer)
        self._bare_scope = dataclasses.replace(self._scope, marked=form.forced)
        self._held = ""  # text unless a call follows
        self._tries = 0
        self._in_call = False  # of the marks so far the newest that may begin a call did

    def parts(self, kind: type[Text] | type[Reasoning] = Text) -> Parser[None]:
        """Yields text and calls. kind: what the text before the first call is. Reasoning is read up
        to its end, behind which there is more."""
        self._held = yield from spaces(self._source)
        is_bare = kind is Text and self._source.text[:1] in tuple(self._tools.bare)
        if is_bare and (yield from self._try(self._tools.bare_calls, self._bare_scope)):
            kind = Text
        while not self._source.exhausted:
            self._held += yield from spaces(self._source)
            mark = yield from take_one_of(self._source, self._marks)
            parse = self._tools.calls.get(mark)
            if parse is not None and (yield from self._try(parse, self._scope)):
                kind = Text
            elif kind is Reasoning and mark and mark == self._reasoning_end:
                self.has_reasoning = True
                break
            elif mark:
                self._hold(mark)
            elif self._source.text and not self._is_cut_mark():
                if self._held:
                    yield kind(self._held)
                    self._held = ""
                yield from up_to(self._source, self._marks, kind)
        if self._held and not self._is_cut():
            yield kind(self._held)
        self._held = ""

    def _try(self, parse: CallParser, scope: Scope) -> Parser[bool]:
        """Tries to read a call, or several in a row; returns whether there was one."""
        if self._tries == MAX_CALLS:
            return False
        self._tries += 1
        source = self._source
        source.begin_trial()
        before = source.commits
        yield from parse(source, scope)
        read = source.commits > before
        if source.is_trial and source.exhausted and (read or scope.marked):
            source.commit()
        source.end_trial()
        if read:
            self._held = ""
            self._in_call = True
        return read

    def _hold(self, mark: str) -> None:
        """Holds a mark back that began no call; drops one that ends a call, the answer, or
        reasoning that had no beginning."""
        ends = mark not in self.beginnings
        if mark in self._answer_ends:
            self._held = ""
        elif mark in (self._reasoning_begin, self._reasoning_end):
            if mark == self._reasoning_begin or self.has_reasoning:
                self._held += mark
            self.has_reasoning = True
        elif ends and self._in_call:
            self._held = ""
        else:
            self._held += mark
            self._in_call = self._in_call and ends

    def _is_cut_mark(self) -> bool:
        """Returns True, and drops it, if the text ends within a mark behind a call or a mark."""
        rest = self._source.text
        behind_mark = self._in_call or self._holds_beginning()
        is_mark = behind_mark and any(mark.startswith(rest) for mark in self._marks)
        if self._source.ended and is_mark:
            self._source.take_to(-1)
        return self._source.exhausted

    def _is_cut(self) -> bool:
        """Returns True if what is held at the end of the text is not part of it."""
        behind_call = self._in_call and not self._held.strip()
        return behind_call or self._holds_beginning()

    def _holds_beginning(self) -> bool:
        return any(mark in self._held for mark in self.beginnings)
