"""The Harmony format of gpt-oss models: a completion is a list of messages, each with a channel.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

Messages to `functions.NAME`, or to a known tool, are calls, those of the channel `analysis` are
reasoning, the others are the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from jaxserve.text.chat_output.calls import Schemas
from jaxserve.text.chat_output.json_writer import Piece
from jaxserve.text.chat_output.lenient_json import LenientJson
from jaxserve.text.chat_output.parts import Arguments, CallBegin, Part, Reasoning, Text
from jaxserve.text.chat_output.source import (
    MAX_HEAD,
    Parser,
    Source,
    before,
    everything,
    next_char,
    next_mark,
    up_to,
)

_BODY = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")
_RECIPIENT = re.compile(r"\bto=(?P<function>functions\.)?(?P<name>[^\s<]+)")


def harmony_messages(source: Source, schemas: Schemas) -> Parser[None]:
    """Yields the parts of all messages. A text without any message is the answer."""
    while (yield from next_char(source)):
        header: list[str] = []
        if not (yield from _take_header(source, header)):
            if "<|" not in header[0] or len(header[0]) > MAX_HEAD:
                yield Text(header[0])
                yield from everything(source, Text)
            return
        name = _called(header[0], schemas)
        kind: Callable[[str], Part] = Reasoning if _ANALYSIS.search(header[0]) else Text
        if name:
            yield from _call(source, name)
        else:
            yield from before(source, _ENDS, kind)


def _called(header: str, schemas: Schemas) -> str:
    """The tool that a message is for; '' for none of ours."""
    to = _RECIPIENT.search(header)
    if to is not None and (to["function"] or to["name"] in schemas):
        return to["name"]
    return ""


def _call(source: Source, name: str) -> Parser[None]:
    """Yields a call, whose body is an object or nothing; another body is text."""
    if (yield from next_char(source)) == "{":
        yield CallBegin(name)
        yield from _arguments(source)
    elif (yield from next_mark(source, _ENDS)):
        yield CallBegin(name)
        yield Arguments("{}")
    yield from before(source, _ENDS, Text)


def _arguments(source: Source) -> Parser[None]:
    reader = LenientJson()
    for body in up_to(source, _ENDS, Text):
        if isinstance(body, Text):
            yield from _joined(reader.push(body.text))
        else:
            yield None
    yield from _joined(reader.finish())


def _joined(pieces: Sequence[Piece]) -> Iterator[Arguments]:
    text = "".join(piece.text for piece in pieces)
    if text:
        yield Arguments(text)


def _take_header(source: Source, header: list[str]) -> Parser[bool]:
    """Takes what stands before a message's body, and adds it to `header`. Returns whether there is
    a body; one whose header has more than MAX_HEAD characters is none."""
    while _BODY not in source.text and not source.ended and len(source.text) <= MAX_HEAD:
        yield None
    before_body, mark, source.text = source.text.partition(_BODY)
    header.append(before_body)
    return bool(mark)
