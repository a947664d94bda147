"""Formats in which families of models write calls of tools."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from jaxserve.text.chat_output.calls import CallParser, either
from jaxserve.text.chat_output.element_calls import INVOKE, NAMESPACE, element_calls
from jaxserve.text.chat_output.json_calls import json_calls, keyed_calls, named_calls
from jaxserve.text.chat_output.json_strings import JsonSyntax
from jaxserve.text.chat_output.parameter_calls import parameter_calls
from jaxserve.text.chat_output.parameter_syntax import (
    KIMI_K3,
    MINICPM,
    QWEN_CODER,
    glm,
    tagged,
)
from jaxserve.text.chat_output.pythonic_calls import pythonic_calls

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


def _gemma(delimiter: str) -> CallParser:
    """Calls with names without quotes, and texts between delimiters: call:f{a:1}."""
    quotes = {delimiter: False, '"': True, "'": True}
    head = r"\s*call:(?P<name>[^\s{<]+)"
    begun = r"\s*(?:c(?:a(?:l(?:l(?::[^\s{<]*)?)?)?)?)?"
    return named_calls(head, begun, JsonSyntax(MappingProxyType(quotes)))


def hunyuan_calls(suffix: str) -> ToolFormat:
    """Calls of Hunyuan 3 and later. suffix: of the names of a checkpoint's tags."""
    syntax = glm(suffix, f"<tool_sep{suffix}>")
    return ToolFormat(
        HUNYUAN,
        HUNYUAN_SIGNS,
        {f"<tool_call{suffix}>": parameter_calls(syntax)},
        (f"</tool_call{suffix}>", f"</tool_calls{suffix}>"),
        (f"<tool_calls{suffix}>",),
    )


HARMONY = "harmony"
HUNYUAN = "hy_v3"
HUNYUAN_SIGNS = (("<tool_sep", "<arg_key"),)
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
_DEEPSEEK = named_calls(
    r"\s*(?:function<｜tool▁sep｜>)?(?P<name>[^\n<]+)(?:<｜tool▁sep｜>|\n)\s*(?:```(?:json)?)?",
    r"[^{]*",
)
_KIMI = named_calls(
    r"\s*(?:functions\.)?(?P<name>[^\s<]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
    r"\s*[^\s<]*\s*(?:<[a-z_|]*)?",
)
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
        "minimax_m3",
        ((NAMESPACE,),),
        {INVOKE: element_calls},
        (f"{NAMESPACE}</tool_call>",),
        (f"{NAMESPACE}<tool_call>",),
    ),
    ToolFormat(
        "kimi_k3",
        (("<|open|>", "'tools'"),),
        {"<|open|>call tool": parameter_calls(KIMI_K3)},
        ("<|close|>tools<|sep|>", "<|close|>message<|sep|>", "<|end_of_msg|>"),
        ("<|open|>tools<|sep|>",),
    ),
    hunyuan_calls(""),
    ToolFormat(
        "minicpm5",
        (("<param name",),),
        {"<function name": parameter_calls(MINICPM)},
        ("</function>",),
    ),
    ToolFormat(
        "dots",
        (("<dots_function_call>",),),
        {"<invoke name": parameter_calls(tagged("")), "<dots_function_call>": json_calls},
        ("</dots_function_call>",),
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
        {"<tool_call>": either("{[", json_calls, parameter_calls(glm()))},
        ("</tool_call>",),
    ),
    ToolFormat(
        "kimi_k2",
        (("<|tool_call_argument_begin|>",),),
        {"<|tool_call_begin|>": _KIMI, "<|tool_calls_section_begin|>": _KIMI},
        ("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
        ("<|tool_call_section_begin|>",),
    ),
    ToolFormat(
        "gemma4",
        (("<|tool_call>",),),
        {"<|tool_call>": _gemma('<|"|>')},
        ("<tool_call|>", "<|tool_response>"),
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
    ToolFormat(
        "solar",
        (("<|tool_call:begin|>",),),
        {
            "<|tool_call:begin|>": named_calls(
                r"[^<]*<\|tool_call:name\|>(?P<name>[^<]+)<\|tool_call:args\|>",
                r"[^<]*(?:<[|a-z_:]*(?:>[^<]*(?:<[|a-z_:]*)?)?)?",
            )
        },
        ("<|tool_call:end|>", "<|calls|>"),
        ("<|begin|>assistant<|tool_calls|>", "<|tool_calls|>"),
    ),
    ToolFormat(
        "gigachat3",
        (("<|function_call|>",), ("<|role_sep|>", "'function call'")),
        {"<|function_call|>": json_calls, "function call<|role_sep|>": json_calls},
        ("<|message_sep|>",),
    ),
    ToolFormat(
        "apertus",
        (("<|tools_prefix|>",),),
        {"<|tools_prefix|>": keyed_calls},
        ("<|tools_suffix|>",),
    ),
    ToolFormat(
        "longcat",
        (("<longcat_tool_call>",),),
        {"<longcat_tool_call>": json_calls},
        ("</longcat_tool_call>",),
    ),
    ToolFormat(
        "internlm",
        (("<|action_start|>",),),
        {"<|action_start|><|plugin|>": json_calls},
        ("<|action_end|>",),
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
        {
            "<|python_tag|>": json_calls,
            "<function=": named_calls(r"(?P<name>[^>\s{]+)>(?=\s*\{)", r"[^>\s{]*(?:>\s*)?"),
        },
        ("</function>",),
        bare="{[",
    ),
    ToolFormat(
        "deepseek_v3",
        (("<｜tool▁call▁begin｜>", "```json"),),
        {"<｜tool▁call▁begin｜>": _DEEPSEEK},
        _DEEPSEEK_CLOSINGS,
        _DEEPSEEK_OPENINGS,
    ),
    ToolFormat(
        "deepseek_v31",
        (("<｜tool▁call▁begin｜>",),),
        {"<｜tool▁call▁begin｜>": _DEEPSEEK},
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
