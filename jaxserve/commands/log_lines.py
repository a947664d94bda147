"""Log lines that no caller can forge: whatever a name or an id holds, an entry begins at the start of a line and nothing else does."""

from __future__ import annotations

import copy
import logging
from typing import Any

INDENT = "    "


class OneLine(logging.Formatter):
    """One line for each entry; those of a traceback come after it, indented."""

    def format(self, record: logging.LogRecord) -> str:
        own = copy.copy(record)
        own.exc_text = None                             # a traceback as another formatter has left it there
        return super().format(own)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return indented(super().formatStack(stack_info))


def escaped(text: str) -> str:
    """Without what ends a line, moves the cursor or turns the direction of writing: these are written as \\n, \\x1b, \\u202e."""
    return text if text.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def indented(text: str) -> str:
    return "\n".join(INDENT + escaped(line) for line in text.split("\n"))
