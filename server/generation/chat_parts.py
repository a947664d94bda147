"""Splits the completions of a chat into reasoning, answer and calls of tools, for whichever
protocol they are written in."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from jaxserve.server.frontend import Frontend
from jaxserve.server.generation.chat import ChatRequest
from jaxserve.server.streams import Stream
from jaxserve.text.chat_output import (
    Arguments,
    CallBegin,
    ChatReader,
    OutputFormat,
    Part,
    Reasoning,
)
from jaxserve.text.chat_output.formats import FORCED
from jaxserve.text.chat_output.reader import MAX_CALLS
from jaxserve.text.output import Completion, Delta

PROMPT_TAIL = 16  # tokens at a prompt's end that may show that it ends within reasoning


@dataclasses.dataclass(slots=True)
class _Choice:
    """One completion. calls: those that have begun. drops_call: whether the newest has no place.
    pieces: of its tokens. thoughts: its reasoning, in as many texts as it has been interrupted."""

    reader: ChatReader
    calls: int = 0
    drops_call: bool = False
    pieces: list[bytes] = dataclasses.field(default_factory=list)
    thoughts: list[str] = dataclasses.field(default_factory=lambda: [""])


class ChatParts:
    """Reads the completions of one chat, of which there are several choices."""

    def __init__(self, frontend: Frontend, body: ChatRequest):
        self.has_tools = bool(body.chosen_tools.functions)
        self._tokenizer = frontend.tokenizer
        self._form = output_format(frontend, body)
        self._most_calls = MAX_CALLS if body.has_parallel_calls else 1
        self._keeps_reasoning = body.include_reasoning is not False
        self._choices: dict[int, _Choice] = {}

    def open(self, stream: Stream) -> None:
        """Prepares for the first part; called before it is read."""
        reasoning = self._form.reasoning
        if reasoning is not None and self._tokenizer is not None:
            tail = stream.request.prompt[-PROMPT_TAIL:].tolist()
            shown = self._tokenizer.decode(tail, skip_special=False).rstrip()
            inside = bool(reasoning.end) and shown.endswith(reasoning.begin)
            self._form = dataclasses.replace(self._form, in_reasoning=inside)

    def read(self, output: Delta | Completion) -> list[Part]:
        """The parts of further text of a choice."""
        choice = self._choice(output.index)
        if self._form.reasoning is not None and self._tokenizer is not None:
            choice.pieces += map(self._tokenizer.piece, output.ids)
        return list(self._wanted(choice, choice.reader.push(output.text)))

    def flush(self, index: int) -> list[Part]:
        """The parts that are left of a choice that has ended."""
        choice = self._choice(index)
        return list(self._wanted(choice, choice.reader.flush()))

    def calls(self, index: int) -> int:
        """Returns the number of calls of a choice that have begun."""
        return self._choice(index).calls

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens of reasoning in all choices, without the marks around it."""
        return sum(_tokens_of(each.thoughts, each.pieces) for each in self._choices.values())

    def _choice(self, index: int) -> _Choice:
        if index not in self._choices:
            self._choices[index] = _Choice(ChatReader(self._form))
        return self._choices[index]

    def _wanted(self, choice: _Choice, parts: Sequence[Part]) -> Iterator[Part]:
        for part in parts:
            if isinstance(part, Reasoning):
                choice.thoughts[-1] += part.text
            elif choice.thoughts[-1]:
                choice.thoughts.append("")
            if isinstance(part, CallBegin):
                choice.drops_call = choice.calls == self._most_calls
                choice.calls += not choice.drops_call
            if choice.drops_call and isinstance(part, (CallBegin, Arguments)):
                continue
            if self._keeps_reasoning or not isinstance(part, Reasoning):
                yield part


def _tokens_of(texts: Sequence[str], pieces: Sequence[bytes]) -> int:
    """Returns the number of tokens with a part of these texts, which follow each other in them."""
    output = b"".join(pieces)
    ends = list(itertools.accumulate(map(len, pieces)))
    place = 0
    count = 0
    for text in texts:
        shown = text.rstrip("\ufffd").encode()  # without a character that was cut off
        begin = output.find(shown, place)
        if shown and begin >= 0:
            place = begin + len(shown)
            count += bisect.bisect_left(ends, place) + 1 - bisect.bisect_right(ends, begin)
    return count


def output_format(frontend: Frontend, body: ChatRequest) -> OutputFormat:
    """Returns the format of a chat's completions."""
    chosen = body.chosen_tools
    schemas = {function.name: function.parameters or {} for function in chosen.functions}
    if chosen.required:
        return OutputFormat(tools=FORCED, schemas=schemas, forced=True)
    if body.guided()[0] is not None:  # from the first token on
        return OutputFormat()
    formats = frontend.chat_formats
    return OutputFormat(formats.reasoning, formats.tools if schemas else None, schemas)
