"""Reads what a chat's completion holds: reasoning, answer, and calls of tools, as they come.

Families of models write these in formats of their own. `tool_formats` and `reasoning_formats` list
them, and `formats` finds a model's by its chat template. `json_calls`, `parameter_calls`,
`element_calls`, `pythonic_calls` and `harmony` parse them; `reader` puts it together.
"""

from jaxserve.text.chat_output.formats import ChatFormats, reasoning_format, tool_format
from jaxserve.text.chat_output.parts import Arguments, CallBegin, Part, Reasoning, Text, whole_calls
from jaxserve.text.chat_output.reader import ChatReader, OutputFormat

__all__ = [
    "Arguments",
    "CallBegin",
    "ChatFormats",
    "ChatReader",
    "OutputFormat",
    "Part",
    "Reasoning",
    "Text",
    "reasoning_format",
    "tool_format",
    "whole_calls",
]
