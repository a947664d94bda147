"""Notations of calls whose parameters have marks of their own."""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterSyntax:
    """The notation of a call and its parameters.

    head: pattern of what stands before the parameters, with a group `name`; head_begun: of its
    beginnings. parameter: the mark that begins a parameter. key: pattern of that mark and what
    stands before a value, with a group `key` and maybe one `type`, which is in TEXT_TYPES or not.
    value_ends: the marks behind a value. call_end: the mark behind a call ('': only those of the
    format). trims: whether one line break before and one behind a value are not part of it.
    """

    head: re.Pattern[str]
    head_begun: re.Pattern[str]
    parameter: str
    key: re.Pattern[str]
    value_ends: tuple[str, ...]
    call_end: str = ""
    trims: bool = False


TEXT_TYPES = ("true", "string")  # of a parameter that is a text


def in_tag(group: str) -> str:
    """Returns the pattern of a name in a tag, in quotes or not, up to the tag's end or an
    attribute."""
    return rf"""\s*=\s*["']?(?P<{group}>[^"'>\n]+?)["']?\s*"""


def tagged(prefix: str) -> ParameterSyntax:
    """Syntax of <invoke name="f"><parameter name="a">1</parameter></invoke>, behind the mark
    <invoke name. prefix: what the names of these tags begin with."""
    parameter = f"<{prefix}parameter name"
    says_type = r"""(?:string\s*=\s*["'](?P<type>\w+)["']\s*)?"""
    return ParameterSyntax(
        _TAG_HEAD,
        _TAG_HEAD_BEGUN,
        parameter,
        re.compile(rf"{re.escape(parameter)}{in_tag('key')}{says_type}>"),
        (f"</{prefix}parameter>",),
        f"</{prefix}invoke>",
    )


def glm(suffix: str = "", behind_name: str = "") -> ParameterSyntax:
    """Syntax of f<arg_key>a</arg_key><arg_value>1</arg_value>, behind the mark <tool_call>.
    suffix: of the names of these tags. behind_name: a mark that follows f."""
    following = f"(?=<arg_key{suffix}>|</tool_call{suffix}>)"
    return ParameterSyntax(
        re.compile(rf"\s*(?P<name>[^\s<{{}}\[\]]+)\s*{behind_name or following}"),
        re.compile(r"\s*(?:[^\s<{}\[\]]+\s*(?:<[a-z/_:0-9]*)?)?"),
        f"<arg_key{suffix}>",
        re.compile(
            rf"<arg_key{suffix}>(?P<key>[^<]*)</arg_key{suffix}>"
            rf"(?:\s*<arg_value{suffix}>|(?!\s){_not_begun(f'<arg_value{suffix}>')})"
        ),
        (f"</arg_value{suffix}>",),
    )


def _not_begun(mark: str) -> str:
    """Pattern of a place where a text does not end within a mark, or before it."""
    begun = "(?:".join(map(re.escape, mark[:-1]))
    return rf"(?!(?:{begun}{')?' * (len(mark) - 2)})?\Z)"


_TAG_HEAD = re.compile(rf"{in_tag('name')}>")
_TAG_HEAD_BEGUN = re.compile(r"[^>]*")
_CDATA = "<![CDATA["
# behind the mark <function=
QWEN_CODER = ParameterSyntax(
    re.compile(r"(?P<name>[^>\n]+)>"),
    re.compile(r"[^>\n]*"),
    "<parameter=",
    re.compile(r"<parameter=(?P<key>[^>\n]+)>"),
    ("</parameter>",),
    "</function>",
    trims=True,
)
# behind the mark <function name
MINICPM = ParameterSyntax(
    _TAG_HEAD,
    _TAG_HEAD_BEGUN,
    "<param name",
    re.compile(rf"<param name{in_tag('key')}>(?:{re.escape(_CDATA)}|{_not_begun(_CDATA)})"),
    ("]]></param>", "</param>"),
    "</function>",
)
# behind the mark <|open|>call tool
KIMI_K3 = ParameterSyntax(
    re.compile(r'\s*=\s*"(?P<name>[^"<]+)"[^<]*<\|sep\|>'),
    re.compile(r"[^<]*(?:<[|a-z]*)?"),
    "<|open|>argument key",
    re.compile(
        r'<\|open\|>argument key\s*=\s*"(?P<key>[^"]*)"'
        r'(?:\s+type\s*=\s*"(?P<type>[^"]*)")?[^<]*<\|sep\|>'
    ),
    ("<|close|>argument<|sep|>",),
    "<|close|>call<|sep|>",
)
