"""Chooses the formats of a model's calls and reasoning by its chat template."""

from __future__ import annotations

import dataclasses
import re

from jaxserve.text.chat_output.reasoning_formats import (
    REASONING_FORMATS,
    ReasoningFormat,
    hunyuan_reasoning,
)
from jaxserve.text.chat_output.tool_formats import (
    FORCED,
    HUNYUAN,
    TOLD,
    TOOL_FORMATS,
    Signs,
    ToolFormat,
    hunyuan_calls,
)

__all__ = [
    "FORCED",
    "REASONING_FORMATS",
    "REASONING_PARSERS",
    "TOLD",
    "TOOL_FORMATS",
    "TOOL_PARSERS",
    "ChatFormats",
    "describes_tools",
    "reasoning_format",
    "tool_format",
]
AUTO = "auto"
NONE = "none"
# what each checkpoint of Hunyuan 3 and later puts behind the names of its tags
_SUFFIX = re.compile(r"""(?:HYTK\s*=\s*['"]|<tool_call)(?P<suffix>:[\w:.-]+)""")


def _shows(template: str, signs: Signs) -> bool:
    return any(all(text in template for text in texts) for texts in signs)


@dataclasses.dataclass(frozen=True, slots=True)
class ChatFormats:
    """Formats of a model's calls and reasoning; None: it has none."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @classmethod
    def of(cls, template: str, tool_parser: str, reasoning_parser: str) -> ChatFormats:
        """The formats of a model with this chat template. tool_parser: one of TOOL_PARSERS;
        reasoning_parser: one of REASONING_PARSERS."""
        tools = tool_format(template, tool_parser)
        return cls(tools, reasoning_format(template, reasoning_parser))

    @property
    def keeps_special(self) -> bool:
        """Returns True if the text of completions needs special tokens even without tools."""
        return self.reasoning is not None and self.reasoning.special


TOOL_PARSERS = (AUTO, *(form.name for form in TOOL_FORMATS))
REASONING_PARSERS = (AUTO, NONE, *(form.name for form in REASONING_FORMATS))


def describes_tools(template: str) -> bool:
    """Returns True if a chat template has a place for the tools that a model may call."""
    return "tools" in template


def tool_format(template: str, parser: str = AUTO) -> ToolFormat:
    """The format of a model's calls. parser: one of TOOL_PARSERS."""
    if parser != AUTO:
        form = next(form for form in TOOL_FORMATS if form.name == parser)
    elif describes_tools(template):
        form = next((form for form in TOOL_FORMATS if _shows(template, form.signs)), TOLD)
    else:
        form = TOLD
    return hunyuan_calls(_suffix(template)) if form.name == HUNYUAN else form


def reasoning_format(template: str, parser: str = AUTO) -> ReasoningFormat | None:
    """The format of a model's reasoning; None for a model without. parser: one of
    REASONING_PARSERS."""
    if parser == NONE:
        return None
    shown = (f for f in REASONING_FORMATS if _shows(template, f.signs or ((f.begin,),)))
    if parser != AUTO:
        shown = (form for form in REASONING_FORMATS if form.name == parser)
    form = next(shown, None)
    if form is not None and form.name == HUNYUAN:
        return hunyuan_reasoning(_suffix(template))
    return form


def _suffix(template: str) -> str:
    found = _SUFFIX.search(template)
    return found["suffix"] if found else ""
