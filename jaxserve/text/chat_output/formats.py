"""Formats in which families of models write calls of tools and reasoning, and the choice of a
model's by its chat template."""

from __future__ import annotations

import dataclasses

from jaxserve.text.chat_output.calls import (
    GLM,
    QWEN_CODER,
    CallParser,
    Marks,
    either,
    json_calls,
    named_calls,
    parameter_calls,
    pythonic_calls,
)

AUTO = "auto"
NONE = "none"


@dataclasses.dataclass(frozen=True, slots=True)
class ToolFormat:
    """Format of a model's calls of tools.

    signs: texts in the templates of models that write so. marks: see `Marks`. parse: see
    `jaxserve.text.chat_output.calls`. bare: characters that begin a call at the very start of the
    text, without a mark. noise: marks around calls that say nothing.
    """

    name: str
    signs: tuple[str, ...]
    marks: Marks
    parse: CallParser
    bare: str = ""
    noise: tuple[str, ...] = ()

    @property
    def is_json_between_marks(self) -> bool:
        """Returns True if calls are objects of JSON, each between two marks."""
        return self.parse is json_calls and bool(self.marks.begin and self.marks.end)


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks before and behind a model's reasoning. special: whether they are special tokens,
    which text leaves out otherwise."""

    name: str
    begin: str
    end: str
    special: bool = False


_HERMES = Marks("<tool_call>", "</tool_call>")
_DEEPSEEK = Marks("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_NOISE = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
HERMES = ToolFormat("hermes", ("<tool_call>",), _HERMES, json_calls)
HARMONY = "harmony"
# of models that learn of tools by a message, which asks for this format
TOLD = dataclasses.replace(HERMES, signs=(), bare="{[")
# for outputs that a guide forces to be one call: nothing marks where it begins or ends
FORCED = ToolFormat("forced", (), Marks("", ""), json_calls, bare="{")
TOOL_FORMATS = (  # the first one that a template shows signs of is the model's
    ToolFormat(HARMONY, ("<|channel|>",), Marks("", ""), json_calls),
    ToolFormat("qwen3_coder", ("<function=",), _HERMES, parameter_calls(QWEN_CODER)),
    ToolFormat("glm", ("<arg_key>",), _HERMES, parameter_calls(GLM)),
    HERMES,
    ToolFormat(
        "mistral",
        ("[TOOL_CALLS]",),
        Marks("[TOOL_CALLS]", ""),
        either("[{", json_calls, named_calls(r"\s*(?P<name>[^\s\[{]+)(?:\[CALL_ID\]\w*)?\[ARGS\]")),
    ),
    ToolFormat("llama3", ("<|python_tag|>",), Marks("<|python_tag|>", ""), json_calls, bare="{"),
    ToolFormat(
        "deepseek_v3",
        ("<｜tool▁call▁begin｜>", "```json"),
        _DEEPSEEK,
        named_calls(r"\s*function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```(?:json)?"),
        noise=_DEEPSEEK_NOISE,
    ),
    ToolFormat(
        "deepseek_v31",
        ("<｜tool▁call▁begin｜>",),
        _DEEPSEEK,
        named_calls(r"\s*(?P<name>[^\n<]+)<｜tool▁sep｜>"),
        noise=_DEEPSEEK_NOISE,
    ),
    ToolFormat(
        "pythonic",
        ("func_name1(",),
        Marks("<|python_start|>", "<|python_end|>"),
        pythonic_calls,
        bare="[",
    ),
)
REASONING_FORMATS = (
    ReasoningFormat("think", "<think>", "</think>"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]", special=True),
    ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
    ReasoningFormat(HARMONY, "<|channel|>", "", special=True),
)


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
        return next(form for form in TOOL_FORMATS if form.name == parser)
    if not describes_tools(template):
        return TOLD
    signed = (form for form in TOOL_FORMATS if all(sign in template for sign in form.signs))
    return next(signed, TOLD)


def reasoning_format(template: str, parser: str = AUTO) -> ReasoningFormat | None:
    """The format of a model's reasoning; None for a model without. parser: one of
    REASONING_PARSERS."""
    if parser == NONE:
        return None
    if parser != AUTO:
        return next(form for form in REASONING_FORMATS if form.name == parser)
    return next((form for form in REASONING_FORMATS if form.begin in template), None)
