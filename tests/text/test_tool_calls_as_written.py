"""Calls as models of every format write them, whole, cut anywhere, or damaged."""

import json
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxserve.text.chat_output import ChatReader, OutputFormat, Text
from jaxserve.text.chat_output.formats import TOLD, TOOL_FORMATS
from jaxserve.text.chat_output.parts import joined, whole_calls
from tests.examples import examples

FORMATS = {form.name: form for form in TOOL_FORMATS} | {"told": TOLD}
SCHEMA = {
    "properties": {
        "text": {"$ref": "#/$defs/text"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "number": {"oneOf": [{"type": "integer"}, {"type": "null"}]},
        "share": {"type": "number"},
        "flag": {"allOf": [{"type": "boolean"}]},
        "list": {"type": "array"},
        "object": {"type": ["object", "null"]},
        "colour": {"enum": ["red", "7", "true"]},
    },
    "$defs": {"text": {"type": "string"}},
}
SCHEMAS = {"look_up": SCHEMA, "send-mail": SCHEMA, "now": {}}
PYTHON_NAMES = ("look_up", "now")


def dumped(value):
    return json.dumps(value, ensure_ascii=False)


def as_text(value):
    """A value between tags: texts as they are, others in JSON."""
    return value if isinstance(value, str) else dumped(value)


def json_object(call, key="arguments"):
    return dumped({"name": call[0], key: call[1]})


def qwen(call, begin="<tool_call>", end="</tool_call>"):
    parameters = [f"<parameter={k}>\n{as_text(v)}\n</parameter>\n" for k, v in call[1].items()]
    return f"{begin}\n<function={call[0]}>\n{''.join(parameters)}</function>\n{end}"


def glm(call):
    pairs = [
        f"<arg_key>{k}</arg_key>\n<arg_value>{as_text(v)}</arg_value>\n" for k, v in call[1].items()
    ]
    return f"<tool_call>{call[0]}\n{''.join(pairs)}</tool_call>"


def tags(call, prefix, typed=False):
    written = ""
    for name, value in call[1].items():
        kind = f' string="{dumped(isinstance(value, str))}"' if typed else ""
        written += f'<{prefix}parameter name="{name}"{kind}>{as_text(value)}</{prefix}parameter>\n'
    return f'<{prefix}invoke name="{call[0]}">\n{written}</{prefix}invoke>\n'


def python(call):
    return f"{call[0]}({', '.join(f'{k}={v!r}' for k, v in call[1].items())})"


def gemma(value, delimiter):
    match value:
        case str():
            return f"{delimiter}{value}{delimiter}"
        case dict():
            pairs = [f"{k}:{gemma(v, delimiter)}" for k, v in value.items()]
            return "{" + ",".join(pairs) + "}"
        case list():
            return "[" + ",".join(gemma(v, delimiter) for v in value) + "]"
    return dumped(value)


def gemma_call(call, delimiter):
    return f"call:{call[0]}{gemma(call[1], delimiter)}"


def hunyuan(call):
    return glm(call).replace(f"<tool_call>{call[0]}", f"<tool_call>{call[0]}<tool_sep>", 1)


def minicpm(call):
    written = ""
    for name, value in call[1].items():
        text = f"<![CDATA[{value}]]>" if isinstance(value, str) else dumped(value)
        written += f'<param name="{name}">{text}</param>'
    return f'<function name="{call[0]}">{written}</function>'


def kimi_k3(call):
    written = ""
    for name, value in call[1].items():
        kind = "string" if isinstance(value, str) else "number"
        written += f'<|open|>argument key="{name}" type="{kind}"<|sep|>{as_text(value)}'
        written += "<|close|>argument<|sep|>"
    return f'<|open|>call tool="{call[0]}" index="1"<|sep|>{written}<|close|>call<|sep|>'


def elements(call, mark="]<]minimax[>["):
    pairs = [f"{mark}<{k}>{as_text(v)}{mark}</{k}>" for k, v in call[1].items()]
    return f'{mark}<invoke name="{call[0]}">{"".join(pairs)}{mark}</invoke>\n'


def each(write):
    return lambda calls: "\n".join(map(write, calls))


def within(begin, write, between, end):
    return lambda calls: begin + between.join(map(write, calls)) + end


def wrapped(begin, write, end):
    return each(lambda call: f"{begin}{write(call)}{end}")


HERMES = wrapped("<tool_call>\n", json_object, "\n</tool_call>")
WRITERS = {
    "hermes": HERMES,
    "told": HERMES,
    "qwen3_coder": each(qwen),
    "seed_oss": each(lambda call: qwen(call, "<seed:tool_call>", "</seed:tool_call>")),
    "glm": each(glm),
    "minimax_m2": within(
        "<minimax:tool_call>\n", lambda call: tags(call, ""), "", "</minimax:tool_call>"
    ),
    "step3": within(
        "<｜tool_calls_begin｜>",
        lambda call: (
            "<｜tool_call_begin｜>function<｜tool_sep｜>"
            + tags(call, "steptml:")
            + "<｜tool_call_end｜>"
        ),
        "",
        "<｜tool_calls_end｜>",
    ),
    "deepseek_v32": within(
        "<｜DSML｜function_calls>\n",
        lambda call: tags(call, "｜DSML｜", typed=True),
        "",
        "</｜DSML｜function_calls>",
    ),
    "kimi_k2": within(
        "<|tool_calls_section_begin|>",
        lambda call: (
            f"<|tool_call_begin|>functions.{call[0]}:0<|tool_call_argument_begin|>"
            f"{dumped(call[1])}<|tool_call_end|>"
        ),
        "",
        "<|tool_calls_section_end|>",
    ),
    "minimax_m3": within("]<]minimax[>[<tool_call>\n", elements, "", "]<]minimax[>[</tool_call>"),
    "kimi_k3": within("<|open|>tools<|sep|>", kimi_k3, "", "<|close|>tools<|sep|>"),
    "hy_v3": within("<tool_calls>\n", hunyuan, "\n", "\n</tool_calls>"),
    "minicpm5": each(minicpm),
    "dots": within(
        "<dots_function_call>\n", lambda call: tags(call, ""), "", "</dots_function_call>"
    ),
    "solar": within(
        "<|tool_calls|>",
        lambda call: (
            f"<|tool_call:begin|>c1<|tool_call:name|>{call[0]}<|tool_call:args|>"
            f"{dumped(call[1])}<|tool_call:end|>"
        ),
        "",
        "<|calls|>",
    ),
    "gigachat3": wrapped("<|function_call|>", json_object, "<|message_sep|>"),
    "apertus": within(
        "<|tools_prefix|>[", lambda call: dumped({call[0]: call[1]}), ", ", "]<|tools_suffix|>"
    ),
    "longcat": wrapped("<longcat_tool_call>", json_object, "</longcat_tool_call>"),
    "internlm": wrapped("<|action_start|><|plugin|>", json_object, "<|action_end|>"),
    "gemma4": wrapped("<|tool_call>", lambda call: gemma_call(call, '<|"|>'), "<tool_call|>"),
    "functiongemma": wrapped(
        "<start_function_call>",
        lambda call: gemma_call(call, "<escape>"),
        "<end_function_call>",
    ),
    "phi4_mini_json": within("functools[", json_object, ", ", "]"),
    "granite": within("<|tool_call|>[", json_object, ", ", "]"),
    "cohere_command3": within(
        "<|START_ACTION|>[\n",
        lambda call: dumped({"tool_call_id": "0", "tool_name": call[0], "parameters": call[1]}),
        ",\n",
        "\n]<|END_ACTION|>",
    ),
    "nemotron_json": within("<TOOLCALL>[", json_object, ", ", "]</TOOLCALL>"),
    "hunyuan_a13b": within("<tool_calls>[", json_object, ", ", "]</tool_calls>"),
    "lfm2": within("<|tool_call_start|>[", python, ", ", "]<|tool_call_end|>"),
    "olmo3": within("<function_calls>\n", python, "\n", "\n</function_calls>"),
    "pythonic": within("<|python_start|>[", python, ", ", "]<|python_end|>"),
    "llama3": within("<|python_tag|>", lambda call: json_object(call, "parameters"), "; ", ""),
    "mistral": wrapped("", lambda call: f"[TOOL_CALLS]{call[0]}[ARGS]{dumped(call[1])}", ""),
    "deepseek_v3": within(
        "<｜tool▁calls▁begin｜>",
        lambda call: (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call[0]}\n```json\n"
            f"{json.dumps(call[1], indent=2)}\n```<｜tool▁call▁end｜>"
        ),
        "\n",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": within(
        "<｜tool▁calls▁begin｜>",
        lambda call: (
            f"<｜tool▁call▁begin｜>{call[0]}<｜tool▁sep｜>{dumped(call[1])}<｜tool▁call▁end｜>"
        ),
        "",
        "<｜tool▁calls▁end｜>",
    ),
    "harmony": within(
        "",
        lambda call: (
            f"<|channel|>commentary to=functions.{call[0]} <|constrain|>json<|message|>"
            f"{dumped(call[1])}<|call|>"
        ),
        "<|start|>assistant",
        "",
    ),
}

TEXTS = st.lists(
    st.text(max_size=4)
    | st.sampled_from(
        ["12345", "null", "true", '{"a": 1}', "<b>", "</div>", "\n", "  ", "'", '"', "\\", "\\n",
         "]", "}", "é😀", "<tool_", "</para", "<parameter", "```", "\t"]
    ),
    max_size=5,
).map("".join)  # fmt: skip
NUMBERS = st.integers(-(2**70), 2**70)
REALS = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = TEXTS | NUMBERS | REALS | st.booleans() | st.none()
NAMES = st.sampled_from(["a", "b_c", "d9"])
OBJECTS = st.dictionaries(NAMES, SCALARS, max_size=3)
LISTS = st.lists(SCALARS | OBJECTS | st.lists(SCALARS, max_size=2), max_size=3)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS,
        "maybe": TEXTS.filter(lambda text: text.strip().lower() not in ("null", "none")),
        "number": NUMBERS | st.none(),
        "share": REALS,
        "flag": st.booleans(),
        "list": LISTS,
        "object": OBJECTS | st.none(),
        "colour": st.sampled_from(["red", "7", "true"]),
    },
)
CALLS = st.lists(
    st.tuples(st.sampled_from(["look_up", "now"]), ARGUMENTS)
    .map(lambda call: (call[0], {}) if call[0] == "now" else call),
    min_size=1,
    max_size=3,
)  # fmt: skip
PROSE = st.text(alphabet="abc. \n'é", max_size=12)


def read(name, text, dice=None):
    reader = ChatReader(OutputFormat(tools=FORMATS[name], schemas=SCHEMAS))
    parts = []
    at = 0
    while dice is not None and at < len(text):
        size = dice.randint(1, 5)
        parts += reader.push(text[at : at + size])
        at += size
    parts += reader.push(text[at:])
    return joined([*parts, *reader.flush()])


def calls_of(parts):
    return [(name, json.loads(arguments)) for name, arguments in whole_calls(parts)]


def content_of(parts):
    return "".join(part.text for part in parts if isinstance(part, Text))


def holds_marks(name, calls):
    """Returns True if a text has what no text in such a format can have."""
    text = dumped(calls)
    marks = [*FORMATS[name].marks, "<|message|>", "<|", "<escape>", '<|\\"|>', "</parameter>"]
    marks += ["</param>", "]]>", "]<]minimax"]
    return any(mark in text for mark in [*marks, "</arg_value>", "</function>", "</invoke>"])


def test_every_format_has_a_writer():
    assert WRITERS.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=examples(30), deadline=None)
@given(CALLS, PROSE, st.randoms())
def test_well_formed_calls_are_read_as_they_are_written(name, calls, prose, dice):
    assume(not holds_marks(name, calls))
    prose = "" if name == "harmony" else prose.lstrip()
    parts = read(name, prose + WRITERS[name](calls), dice)
    assert calls_of(parts) == calls
    assert content_of(parts).strip() == prose.strip()


DAMAGE = st.sampled_from(
    ["", " ", "\n", "}", "{", '"', "'", "]", "</tool_call>", "</parameter>", "</function>", "\\",
     ",", "<", ">", "<|", "x", "```", "<tool_call>", "<parameter=text>", ":", "=", "é"]
)  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=examples(30), deadline=None)
@given(CALLS, PROSE, st.data(), st.randoms())
def test_damaged_calls_have_arguments_that_are_objects(name, calls, prose, data, dice):
    text = prose + WRITERS[name](calls)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        gone = data.draw(st.sampled_from([0, 0, 1, 3, 12]))
        text = text[:at] + data.draw(DAMAGE) + text[at + gone :]
    text = text[: data.draw(st.integers(0, len(text)) | st.just(len(text)))]
    parts = read(name, text)
    assert parts == read(name, text, dice)
    assert all(isinstance(arguments, dict) for _, arguments in calls_of(parts))


def test_a_mark_within_a_name_begins_no_call_however_it_is_cut():
    text = WRITERS["kimi_k3"]([("<|look_up", {})])
    assert read("kimi_k3", text) == [Text(text)]
    assert all(read("kimi_k3", text, random.Random(seed)) == [Text(text)] for seed in range(20))


@pytest.mark.parametrize("end", ["", "}", "}}", "}}</tool_call>"])
def test_an_object_without_a_name_is_no_arguments(end):
    text = '<tool_call>{"name": "f", "arguments": ]{"a": 1' + end
    parts = read("hermes", text)
    assert not calls_of(parts)
    assert parts == read("hermes", text, random.Random(1))


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=examples(30), deadline=None)
@given(CALLS, st.data())
def test_a_call_that_was_cut_off_leaves_no_marks(name, calls, data):
    assume(not holds_marks(name, calls))
    text = WRITERS[name](calls)
    cut = text[: data.draw(st.integers(0, len(text)))]
    parts = read(name, cut)
    read_calls = calls_of(parts)
    if read_calls:
        assert not content_of(parts).strip()
        assert read_calls[:-1] == calls[: len(read_calls) - 1]
        assert read_calls[-1][0] == calls[len(read_calls) - 1][0]
    else:  # the beginning of a mark may be that of a text
        assert not content_of(parts).strip() or cut == content_of(parts)


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"harmony"}))
@settings(max_examples=examples(30), deadline=None)
@given(
    st.lists(
        st.text(max_size=6)
        | st.sampled_from(
            ["<b>", "</think>", "{", "}", "[1]", '{"city": "Rome"}', "<tool>", "function", "\n"]
        ),
        max_size=8,
    ).map("".join),
    st.randoms(),
)
def test_text_without_calls_is_left_as_it_is(name, text, dice):
    assert read(name, text, dice) == ([Text(text)] if text else [])
