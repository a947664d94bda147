"""Formats in which families of models write calls of tools and reasoning, and the choice of a
model's by its chat template."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from jaxserve.text.chat_output.calls import CallParser, either
from jaxserve.text.chat_output.json_calls import json_calls, named_calls
from jaxserve.text.chat_output.lenient_json import JsonSyntax
from jaxserve.text.chat_output.parameter_calls import GLM, QWEN_CODER, parameter_calls, tagged
from jaxserve.text.chat_output.pythonic_calls import pythonic_calls

AUTO = "auto"
NONE = "none"


Signs = tuple[tuple[str, ...], ...]  # alternatives of texts that are all in a template


@dataclasses.dataclass(frozen=True, slots=True)
class ToolFormat:
    """Format of a model's calls of tools.

    signs: of the templates of models that write so. calls: parsers of what follows a mark that
    begins a call, by that mark. openings: other marks before calls. closings: marks behind them.
    bare: characters that may begin a call at the very start of the text, without a mark.
    bare_calls: the parser of these. guide: the marks around calls that a guide can make obey a
    schema: JSON objects, one each; None: there are no such.
    """

    name: str
    signs: Signs
    calls: Mapping[str, CallParser]
    closings: tuple[str, ...] = ()
    openings: tuple[str, ...] = ()
    bare: str = ""
    bare_calls: CallParser = json_calls
    guide: tuple[str, str] | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks."""
        return (*self.calls, *self.openings, *self.closings)


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks before and behind a model's reasoning. special: whether they are special tokens,
    which text leaves out otherwise. answer_begin, answer_end: marks around the answer that follows.
    signs: as of a `ToolFormat`, without it the mark that begins it."""

    name: str
    begin: str
    end: str
    special: bool = False
    answer_begin: str = ""
    answer_end: str = ""
    signs: Signs = ()


def _gemma(delimiter: str) -> CallParser:
    """Calls with names without quotes, and texts between delimiters: call:f{a:1}."""
    quotes = {delimiter: False, '"': True, "'": True}
    head = r"\s*call:(?P<name>[^\s{<]+)"
    begun = r"\s*(?:c(?:a(?:l(?:l(?::[^\s{<]*)?)?)?)?)?"
    return named_calls(head, begun, JsonSyntax(MappingProxyType(quotes)))


HARMONY = "harmony"
NO_TOOLS = ToolFormat("none", (), {})
HERMES = ToolFormat(
    "hermes",
    (("<tool_call>",),),
    {"<tool_call>": json_calls},
    ("</tool_call>",),
    bare="{[",
    guide=("<tool_call>", "</tool_call>"),
)
# of models that learn of tools by a message, which asks for this format
TOLD = dataclasses.replace(HERMES, signs=())
# for outputs that a guide forces to be one call: nothing marks where it begins or ends
FORCED = ToolFormat("forced", (), {}, bare="{")
_DEEPSEEK_OPENINGS = ("<｜tool▁calls▁begin｜>",)
_DEEPSEEK_CLOSINGS = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "```")
TOOL_FORMATS = (  # the first one that a template shows signs of is the model's
    ToolFormat(HARMONY, (("<|channel|>",),), {}),
    ToolFormat(
        "deepseek_v32",
        (("｜DSML｜",),),
        {
            "<｜DSML｜invoke name": parameter_calls(tagged("｜DSML｜")),
            "<｜DSML｜ invoke name": parameter_calls(tagged("｜DSML｜ ")),
        },
        tuple(f"</｜DSML｜{name}>" for name in ("function_calls", "tool_calls", " calls")),
        tuple(f"<｜DSML｜{name}>" for name in ("function_calls", "tool_calls", " calls")),
    ),
    ToolFormat(
        "minimax_m2",
        (("<minimax:tool_call>",),),
        {"<invoke name": parameter_calls(tagged(""))},
        ("</minimax:tool_call>",),
        ("<minimax:tool_call>",),
    ),
    ToolFormat(
        "step3",
        (("<steptml:invoke",),),
        {"<steptml:invoke name": parameter_calls(tagged("steptml:"))},
        ("<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
        ("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", "function<｜tool_sep｜>"),
    ),
    ToolFormat(
        "seed_oss",
        (("<seed:tool_call>",),),
        {"<function=": parameter_calls(QWEN_CODER), "<seed:tool_call>": json_calls},
        ("</function>", "</seed:tool_call>"),
    ),
    ToolFormat(
        "qwen3_coder",
        (("<function=", "<parameter="),),
        {"<function=": parameter_calls(QWEN_CODER), "<tool_call>": json_calls},
        ("</function>", "</tool_call>"),
    ),
    ToolFormat(
        "glm",
        (("<arg_key>",),),
        {"<tool_call>": either("{[", json_calls, parameter_calls(GLM))},
        ("</tool_call>",),
    ),
    ToolFormat(
        "kimi_k2",
        (("<|tool_call_argument_begin|>",),),
        {
            "<|tool_call_begin|>": named_calls(
                r"\s*(?:functions\.)?(?P<name>[^\s<]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
                r"\s*[^\s<]*\s*(?:<[a-z_|]*)?",
            )
        },
        ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        ("<|tool_calls_section_begin|>",),
    ),
    ToolFormat(
        "gemma4", (("<|tool_call>",),), {"<|tool_call>": _gemma('<|"|>')}, ("<tool_call|>",)
    ),
    ToolFormat(
        "functiongemma",
        (("<start_function_call>",),),
        {"<start_function_call>": _gemma("<escape>")},
        ("<end_function_call>",),
    ),
    ToolFormat(
        "phi4_mini_json",
        (("functools[",), ("<|/tool|>",)),
        {"functools": json_calls, "<|tool_call|>": json_calls},
        ("<|/tool_call|>",),
    ),
    ToolFormat("granite", (("<|tool_call|>",),), {"<|tool_call|>": json_calls}),
    ToolFormat(
        "cohere_command3",
        (("<|START_ACTION|>",),),
        {"<|START_ACTION|>": json_calls},
        ("<|END_ACTION|>",),
    ),
    ToolFormat("nemotron_json", (("<TOOLCALL>",),), {"<TOOLCALL>": json_calls}, ("</TOOLCALL>",)),
    ToolFormat(
        "hunyuan_a13b", (("<tool_calls>",),), {"<tool_calls>": json_calls}, ("</tool_calls>",)
    ),
    ToolFormat(
        "lfm2",
        (("<|tool_call_start|>",), ("<|tool_list_start|>",)),
        {"<|tool_call_start|>": pythonic_calls},
        ("<|tool_call_end|>",),
    ),
    ToolFormat(
        "olmo3",
        (("<function_calls>",),),
        {"<function_calls>": pythonic_calls},
        ("</function_calls>",),
    ),
    HERMES,
    ToolFormat(
        "mistral",
        (("[TOOL_CALLS]",),),
        {
            "[TOOL_CALLS]": either(
                "[{",
                json_calls,
                named_calls(
                    r"\s*(?P<name>[^\s\[{]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\]|(?=\s*\{))",
                    r"\s*[^\s\[{]*\s*(?:\[[A-Z_]*(?:\]\w*)?(?:\[[A-Z]*)?)?",
                ),
            )
        },
    ),
    ToolFormat(
        "llama3",
        (("<|python_tag|>",), ('"parameters": dictionary of argument name',)),
        {"<|python_tag|>": json_calls},
        bare="{[",
    ),
    ToolFormat(
        "deepseek_v3",
        (("<｜tool▁call▁begin｜>", "```json"),),
        {
            "<｜tool▁call▁begin｜>": named_calls(
                r"\s*function<｜tool▁sep｜>(?P<name>[^\n<]+)\n(?:```(?:json)?)?", r"[^{]*"
            )
        },
        _DEEPSEEK_CLOSINGS,
        _DEEPSEEK_OPENINGS,
    ),
    ToolFormat(
        "deepseek_v31",
        (("<｜tool▁call▁begin｜>",),),
        {"<｜tool▁call▁begin｜>": named_calls(r"\s*(?P<name>[^\n<]+)<｜tool▁sep｜>", r"[^\n{]*")},
        _DEEPSEEK_CLOSINGS,
        _DEEPSEEK_OPENINGS,
    ),
    ToolFormat(
        "pythonic",
        (("func_name1(",),),
        {"<|python_start|>": pythonic_calls},
        ("<|python_end|>",),
        bare="[",
        bare_calls=pythonic_calls,
    ),
)
REASONING_FORMATS = (
    ReasoningFormat(
        "hunyuan_a13b",
        "<think>",
        "</think>",
        answer_begin="<answer>",
        answer_end="</answer>",
        signs=(("</think>", "<answer>"),),
    ),
    ReasoningFormat(
        "ernie45",
        "<think>",
        "</think>",
        answer_begin="<response>",
        answer_end="</response>",
        signs=(("</think>", "<response>"),),
    ),
    ReasoningFormat("think", "<think>", "</think>", signs=(("<think>",), ("</think>",))),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]", special=True),
    ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
    ReasoningFormat(HARMONY, "<|channel|>", "", special=True),
    ReasoningFormat(
        "gemma4", "<|channel>thought", "<channel|>", special=True, signs=(("<|channel>",),)
    ),
    ReasoningFormat(
        "cohere_command3",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        special=True,
        answer_begin="<|START_RESPONSE|>",
        answer_end="<|END_RESPONSE|>",
    ),
    ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
)


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
        return next(form for form in TOOL_FORMATS if form.name == parser)
    if not describes_tools(template):
        return TOLD
    return next((form for form in TOOL_FORMATS if _shows(template, form.signs)), TOLD)


def reasoning_format(template: str, parser: str = AUTO) -> ReasoningFormat | None:
    """The format of a model's reasoning; None for a model without. parser: one of
    REASONING_PARSERS."""
    if parser == NONE:
        return None
    if parser != AUTO:
        return next(form for form in REASONING_FORMATS if form.name == parser)
    shown = (f for f in REASONING_FORMATS if _shows(template, f.signs or ((f.begin,),)))
    return next(shown, None)
