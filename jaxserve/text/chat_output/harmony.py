"""The Harmony format of gpt-oss models: a completion is a list of messages, each with a channel.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

Messages to `functions.NAME` are calls, those of the channel `analysis` are reasoning, the others
are the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from jaxserve.text.chat_output.parts import Arguments, CallBegin, Part, Reasoning, Text
from jaxserve.text.chat_output.source import Parser, Source, before, next_char

_BODY = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")
_RECIPIENT = re.compile(r"\bto=functions\.(?P<name>[\w.-]+)")


def harmony_messages(source: Source) -> Parser[None]:
    """Yields the parts of all messages. A text without any message is the answer."""
    while (yield from next_char(source)):
        header: list[str] = []
        if not (yield from _take_header(source, header)):
            if "<|" not in header[0]:
                yield Text(header[0])
            return
        call = _RECIPIENT.search(header[0])
        kind: Callable[[str], Part] = Reasoning if _ANALYSIS.search(header[0]) else Text
        if call is not None:
            yield CallBegin(call["name"])
            kind = Arguments
        yield from before(source, _ENDS, kind)


def _take_header(source: Source, header: list[str]) -> Parser[bool]:
    """Takes what stands before a message's body, and adds it to `header`. Returns whether there is
    a body."""
    while _BODY not in source.text and not source.ended:
        yield None
    before_body, mark, source.text = source.text.partition(_BODY)
    header.append(before_body)
    return bool(mark)
