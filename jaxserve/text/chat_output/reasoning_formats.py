"""Formats in which families of models write reasoning before their answers."""

from __future__ import annotations

import dataclasses

from jaxserve.text.chat_output.tool_formats import HARMONY, HUNYUAN, HUNYUAN_SIGNS, Signs


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks before and behind a model's reasoning.

    special: whether they are special tokens, which text leaves out otherwise. answer_begins,
    answer_ends: marks around the answer that follows. signs: as of a `ToolFormat`; without them the
    mark that begins reasoning is one."""

    name: str
    begin: str
    end: str
    special: bool = False
    answer_begins: tuple[str, ...] = ()
    answer_ends: tuple[str, ...] = ()
    signs: Signs = ()


def hunyuan_reasoning(suffix: str) -> ReasoningFormat:
    """Reasoning of Hunyuan 3 and later. suffix: of the names of a checkpoint's tags."""
    return ReasoningFormat(
        HUNYUAN, f"<think{suffix}>", f"</think{suffix}>", special=True, signs=HUNYUAN_SIGNS
    )


REASONING_FORMATS = (
    ReasoningFormat(
        "hunyuan_a13b",
        "<think>",
        "</think>",
        answer_begins=("<answer>",),
        answer_ends=("</answer>",),
        signs=(("</think>", "<answer>"),),
    ),
    ReasoningFormat(
        "ernie45",
        "<think>",
        "</think>",
        answer_begins=("<response>",),
        answer_ends=("</response>",),
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
        answer_begins=("<|START_RESPONSE|>", "<|START_TEXT|>"),
        answer_ends=("<|END_RESPONSE|>", "<|END_TEXT|>"),
    ),
    ReasoningFormat(
        "kimi_k3",
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        special=True,
        answer_begins=("<|open|>response<|sep|>",),
        answer_ends=("<|close|>response<|sep|>", "<|close|>message<|sep|>", "<|end_of_msg|>"),
        signs=(("<|open|>", "'think'"),),
    ),
    ReasoningFormat("minimax_m3", "<mm:think>", "</mm:think>"),
    hunyuan_reasoning(""),
    ReasoningFormat(
        "solar",
        "<|think|>",
        "<|end|>",
        special=True,
        answer_begins=("<|begin|>assistant<|content|>", "<|content|>"),
        answer_ends=("<|end|>",),
        signs=(("<|think|>", "<|tool_call:begin|>"),),
    ),
    ReasoningFormat("apertus", "<|inner_prefix|>", "<|inner_suffix|>", special=True),
    ReasoningFormat(
        "apriel",
        "Here are my reasoning steps:",
        "[BEGIN FINAL RESPONSE]",
        answer_ends=("[END FINAL RESPONSE]",),
    ),
    ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
)
