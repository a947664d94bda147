"""Reasoning, answers and calls of tools, as each family of models writes them, however the text is
cut into pieces."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.settings.schema import server
from jaxserve.text.chat_output import (
    Arguments,
    CallBegin,
    ChatReader,
    OutputFormat,
    Reasoning,
    Text,
    reasoning_format,
    tool_format,
)
from jaxserve.text.chat_output.formats import (
    FORCED,
    REASONING_FORMATS,
    REASONING_PARSERS,
    TOLD,
    TOOL_FORMATS,
    TOOL_PARSERS,
)
from jaxserve.text.chat_output.lenient_json import LenientJson, repaired
from jaxserve.text.chat_output.parts import joined
from jaxserve.text.chat_output.reader import MAX_CALLS
from tests.examples import examples

SCHEMAS = {
    "f": {
        "properties": {
            "text": {"type": "string"},
            "n": {"type": "integer"},
            "flag": {"type": "boolean"},
            "list": {"type": "array"},
            "either": {"type": ["string", "null"]},
        }
    },
    "g": {},
}
THINKING = [form for form in REASONING_FORMATS if form.name in ("think", "mistral", "seed")]
FORMATS = {form.name: form for form in TOOL_FORMATS} | {"told": TOLD}


def read(form, pieces):
    reader = ChatReader(form)
    parts = [part for piece in pieces for part in reader.push(piece)]
    return joined([*parts, *reader.flush()])


def tools(name, **rest):
    return OutputFormat(tools=FORMATS[name], schemas=SCHEMAS, **rest)


def call(name, arguments):
    return [CallBegin(name), Arguments(arguments)]


def simplified(parts):
    """Parts with the arguments of calls as values."""
    return [json.loads(p.text) if isinstance(p, Arguments) else p for p in parts]


F1 = [CallBegin("f"), {"n": 1}]
G = [CallBegin("g"), {}]
CODE = "def f():\n  return '<a>' + \"\\n\"\n"
DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
EXAMPLES = [  # format, text, parts
    (
        "hermes",
        'Hi <tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>',
        [Text("Hi "), *F1],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"n": 1}, "name": "f"}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call> ok',
        [*F1, *G, Text(" ok")],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"n\\": 1}"}</tool_call>', F1),
    ("hermes", "<tool_call>no JSON</tool_call>", [Text("<tool_call>no JSON</tool_call>")]),
    ("hermes", "a <tool_ call> <too", [Text("a <tool_ call> <too")]),
    ("told", '{"name": "f", "arguments": {"n": 1}}', F1),
    ("told", '{"not": "a call"}', [Text('{"not": "a call"}')]),
    ("told", '<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>', F1),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {"n": 1}}', F1),
    ("llama3", '{"name": "f", "parameters": {"n": 1}}; {"name": "g", "parameters": {}}', [*F1, *G]),
    ("llama3", '{"type": "function", "name": "f", "parameters": {"n": 1}}', F1),
    ("llama3", "{2} is a set", [Text("{2} is a set")]),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"n": 1}, "id": "123456789"}, '
        '{"name": "g", "arguments": {}}]',
        [*F1, *G],
    ),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"n": 1}[TOOL_CALLS]g[ARGS]{}', [*F1, *G]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"n": 1}', F1),
    (
        "qwen3_coder",
        f"<tool_call>\n<function=f>\n<parameter=text>\n{CODE}</parameter>\n"
        "<parameter=n>\n1\n</parameter>\n<parameter=flag>\nTrue\n</parameter>\n"
        "<parameter=list>\n[1, 'x']\n</parameter>\n<parameter=either>\n5\n</parameter>\n"
        "<parameter=other>\nx\n</parameter>\n</function>\n</tool_call>",
        [
            CallBegin("f"),
            {
                "text": CODE[:-1], "n": 1, "flag": True, "list": [1, "x"], "either": "5",
                "other": "x",
            },
        ],
    ),
    ("qwen3_coder", "<tool_call>\n<function=g>\n</function>\n</tool_call>.", [*G, Text(".")]),
    (
        "glm",
        "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>a\nb</arg_value>\n"
        "<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        [CallBegin("f"), {"text": "a\nb", "n": 1}],
    ),
    ("glm", "Well\n<tool_call>g\n</tool_call>", [Text("Well\n"), *G]),
    (
        "deepseek_v3",
        DEEPSEEK.format(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
            '```json\n{"n": 1}\n```<｜tool▁call▁end｜>'
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜>"
        ),
        [*F1, *G],
    ),
    (
        "deepseek_v31",
        "x" + DEEPSEEK.format(
            '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"n": 1}<｜tool▁call▁end｜>'
            "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        ),
        [Text("x"), *F1, *G],
    ),
    ("pythonic", "[f(n=1), g()]", [*F1, *G]),
    ("pythonic", "<|python_start|>[f(n=1)]<|python_end|> done", [*F1, Text(" done")]),
    (
        "pythonic",
        "[f(text='a)]\"', list=[1, {'x': (2,)}])]",
        [CallBegin("f"), {"text": 'a)]"', "list": [1, {"x": [2]}]}],
    ),
    ("pythonic", "[f(n=open('x'))]", [Text("[f(n=open('x'))]")]),
    ("pythonic", "[1, 2]", [Text("[1, 2]")]),
    (
        "deepseek_v32",
        'Hm\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="text" string="true">a\nb</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="other" string="true">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        [Text("Hm\n\n"), CallBegin("f"), {"text": "a\nb", "n": 1, "other": "5"}, *G],
    ),
    (
        "deepseek_v32",
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
        '<｜DSML｜ parameter name="n" string="false">1</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n'
        "</｜DSML｜ calls>",
        F1,
    ),
    (
        "minimax_m2",
        '\n<minimax:tool_call>\n<invoke name="f"><parameter name="text"> a\n</parameter>'
        '<parameter name="n">1</parameter></invoke>\n<invoke name="g"></invoke>\n'
        "</minimax:tool_call>",
        [CallBegin("f"), {"text": " a\n", "n": 1}, *G],
    ),
    (
        "step3",
        "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="f"><steptml:parameter name="n">1</steptml:parameter>'
        "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
        F1,
    ),
    (
        "seed_oss",
        "Ok\n<seed:tool_call>\n<function=f>\n<parameter=text>a</parameter>\n"
        "<parameter=n>1</parameter>\n</function>\n</seed:tool_call>",
        [Text("Ok\n"), CallBegin("f"), {"text": "a", "n": 1}],
    ),
    (
        "kimi_k2",
        "Sure.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        '<|tool_call_argument_begin|>{"n": 1}<|tool_call_end|><|tool_call_begin|>functions.g:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        [Text("Sure."), *F1, *G],
    ),
    (
        "kimi_k3",
        'Sure.<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        '<|open|>argument key="text" type="string"<|sep|>a "b" <c>\n<|close|>argument<|sep|>'
        '<|open|>argument key="other" type="number"<|sep|>5<|close|>argument<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="g" index="2"<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|><|close|>message<|sep|>",
        [Text("Sure."), CallBegin("f"), {"text": 'a "b" <c>\n', "other": 5}, *G],
    ),
    (
        "minimax_m3",
        "Sure.#<tool_call>\n#<invoke name=\"f\">#<text>a <b>\n#</text>#<list>#<item>1#</item>"
        "#<item>#<k>v#</k>#</item>#</list>#</invoke>\n#<invoke name=\"g\">#</invoke>\n"
        "#</tool_call>".replace("#", "]<]minimax[>["),
        [Text("Sure."), CallBegin("f"), {"text": "a <b>\n", "list": [1, {"k": "v"}]}, *G],
    ),
    (
        "hy_v3",
        "Sure.<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>text</arg_key>\n"
        "<arg_value>5</arg_value>\n</tool_call>\n<tool_call>g<tool_sep>\n</tool_call>\n"
        "</tool_calls>",
        [Text("Sure."), CallBegin("f"), {"text": "5"}, *G],
    ),
    (
        "minicpm5",
        '<function name="f"><param name="text"><![CDATA[a </param> "b"]]></param>'
        '<param name="n">1</param><param name="flag">True</param></function>\n'
        '<function name="g"></function>',
        [CallBegin("f"), {"text": 'a </param> "b"', "n": 1, "flag": True}, *G],
    ),
    (
        "dots",
        '<dots_function_call>\n<invoke name="f">\n<parameter name="n">1</parameter>\n</invoke>\n'
        '</dots_function_call><dots_function_call>{"name": "g", "arguments": {}}'
        "</dots_function_call>",
        [*F1, *G],
    ),
    (
        "solar",
        "Sure.<|begin|>assistant<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>f"
        '<|tool_call:args|>{"n": 1}<|tool_call:end|><|tool_call:begin|>a2<|tool_call:name|>g'
        "<|tool_call:args|>{}<|tool_call:end|><|calls|>",
        [Text("Sure."), *F1, *G],
    ),
    (
        "gigachat3",
        'Sure.<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "f", "arguments": {"n": 1}}'
        "<|message_sep|>",
        [Text("Sure."), *F1],
    ),
    ("gigachat3", 'Sure.<|function_call|>{"name": "g", "arguments": {}}', [Text("Sure."), *G]),
    ("apertus", '<|tools_prefix|>[{"f": {"n": 1}}, {"g": {}}]<|tools_suffix|>', [*F1, *G]),
    ("apertus", "<|tools_prefix|>[1]", [Text("<|tools_prefix|>[1]")]),
    (
        "longcat",
        '<longcat_tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</longcat_tool_call>',
        F1,
    ),
    (
        "internlm",
        'Sure.<|action_start|><|plugin|>\n{"name": "f", "parameters": {"n": 1}}<|action_end|>',
        [Text("Sure."), *F1],
    ),
    ("llama3", '<function=f>{"n": 1}</function><function=g>{}</function>', [*F1, *G]),
    ("llama3", "See <function=NAME> tags", [Text("See <function=NAME> tags")]),
    (
        "gemma4",
        '<|tool_call>call:f{list:[1,<|"|>x<|"|>,{a:null}],n:1,text:<|"|>"a" \\d\n}<|"|>}'
        "<tool_call|>"
        "<|tool_call>call:g{}<tool_call|>",
        [CallBegin("f"), {"list": [1, "x", {"a": None}], "n": 1, "text": '"a" \\d\n}'}, *G],
    ),
    (
        "functiongemma",
        "<start_function_call>call:f{n:1,text:<escape>a, b<escape>}<end_function_call>",
        [CallBegin("f"), {"n": 1, "text": "a, b"}],
    ),
    (
        "phi4_mini_json",
        'functools[{"name": "f", "arguments": {"n": 1}}, {"name": "g", "arguments": {}}]',
        [*F1, *G],
    ),
    (
        "phi4_mini_json",
        '<|tool_call|>[{"name": "f", "arguments": {"n": 1}}]<|/tool_call|>',
        F1,
    ),
    ("phi4_mini_json", "import functools, re", [Text("import functools, re")]),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"n": 1}}]', F1),
    (
        "cohere_command3",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"n": 1}},\n'
        '    {"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n]<|END_ACTION|>',
        [*F1, *G],
    ),
    ("nemotron_json", '<TOOLCALL>[{"name": "f", "arguments": {"n": 1}}]</TOOLCALL>', F1),
    (
        "hunyuan_a13b",
        '<tool_calls>\n{"name": "f", "arguments": {"n": 1}}\n{"name": "g", "arguments": {}}\n'
        "</tool_calls>",
        [*F1, *G],
    ),
    ("lfm2", "<|tool_call_start|>[f(n=1), g()]<|tool_call_end|>Well", [*F1, *G, Text("Well")]),
    (
        "olmo3",
        "<function_calls>\nf(n=1, flag=true, either=null, text='It's')\ng()\n</function_calls>",
        [CallBegin("f"), {"n": 1, "flag": True, "either": None, "text": "It's"}, *G],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.f <|constrain|>json<|message|>{"n": 1}<|call|>',
        [Reasoning("hm"), *F1],
    ),
    (
        "harmony",
        'to=functions.f<|channel|>commentary json<|message|>{"n": 1}<|call|>',
        F1,
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I will look.<|end|><|start|>assistant<|channel|>commentary to=functions.f<|constrain|>json"
        '<|message|>{"n": 1}<|call|>'
        "<|start|>assistant to=g<|channel|>commentary<|message|><|call|>",
        [Reasoning("a"), Text("I will look."), *F1, *G],
    ),
    (
        "harmony",
        "<|channel|>analysis to=python code<|message|>1+1<|call|>",
        [Reasoning("1+1")],
    ),
    ("harmony", "<|channel|>final<|message|>Hi<|return|>", [Text("Hi")]),
    ("harmony", "Hi", [Text("Hi")]),
    ("harmony", "Hi " * 500, [Text("Hi " * 500)]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), EXAMPLES)
def test_calls_are_read_as_each_family_writes_them(name, text, expected):
    assert simplified(read(tools(name), [text])) == expected
    assert simplified(read(tools(name), text)) == expected


def test_every_format_is_among_the_examples():
    assert {name for name, _, _ in EXAMPLES} == set(FORMATS)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"text": "a long te'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"text": "a long te'),
        ("qwen3_coder", "<tool_call><function=f><parameter=text>\na long te"),
        ("glm", "<tool_call>f\n<arg_key>text</arg_key><arg_value>a long te"),
        ("harmony", '<|channel|>commentary to=functions.f<|message|>{"text": "a long te'),
    ],
)
def test_arguments_come_as_they_are_written(name, text):
    reader = ChatReader(tools(name))
    so_far = joined([part for char in text for part in reader.push(char)])
    assert [part.replace(" ", "") for part in (so_far[0].name, so_far[1].text)] == [
        "f", '{"text":"alongte',
    ]  # fmt: skip
    assert all(isinstance(part, Arguments) for part in reader.flush())


def test_the_beginning_of_a_call_that_was_cut_off_is_left_out():
    for cut in ("", "\n{", '\n{"name": "f', '\n{"name": "f", "argu'):
        assert read(tools("hermes"), [f"Hi <tool_call>{cut}"]) == [Text("Hi ")]
    forced = OutputFormat(tools=FORCED, forced=True)
    assert read(forced, ['{"name": "f"']) == []
    assert read(forced, ['{"name": "f", "arguments": {"n"']) == call("f", "{}")


def test_calls_beyond_the_limit_are_text():
    one = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    parts = read(tools("hermes"), [one * (MAX_CALLS + 1)])
    assert parts == [*call("g", "{}") * MAX_CALLS, Text(one)]


@pytest.mark.parametrize("form", THINKING)
def test_reasoning_is_split_from_the_answer(form):
    text = f"\n{form.begin}Let me see.\n{form.end}\n\nHi"
    expected = [Reasoning("Let me see.\n"), Text("Hi")]
    assert read(OutputFormat(form), [text]) == read(OutputFormat(form), text) == expected
    inside = OutputFormat(form, in_reasoning=True)
    assert read(inside, f"Let me see.\n{form.end}Hi") == expected
    assert read(inside, "cut o") == [Reasoning("cut o")]
    assert read(OutputFormat(form), "Hi") == [Text("Hi")]
    assert read(OutputFormat(form), f"{form.end}Hi") == [Text("Hi")]
    assert read(OutputFormat(), text) == [Text(text)]


def test_an_end_of_reasoning_without_a_beginning_is_no_text():
    form = OutputFormat(THINKING[0], FORMATS["hermes"])
    assert read(form, "So it is.</think>\nYes") == [Text("So it is.\nYes")]
    for mentions in ("Write <think>a</think> or </think>", "<think>a</think>b</think>c"):
        written = "".join(p.text for p in read(form, mentions) if isinstance(p, Text))
        assert written == mentions.removeprefix("<think>a</think>")


def test_marks_around_an_answer_are_not_part_of_it():
    form = OutputFormat(reasoning_format("", "kimi_k3"), FORMATS["kimi_k3"], in_reasoning=True)
    text = (
        "hm<|close|>think<|sep|><|open|>response<|sep|>Hi<|close|>response<|sep|>"
        "<|close|>message<|sep|>"
    )
    assert read(form, text) == read(form, [text]) == [Reasoning("hm"), Text("Hi")]


def test_calls_follow_reasoning():
    form = OutputFormat(THINKING[0], FORMATS["hermes"])
    thought = "<think>call <tool_call>?</think>"
    parts = read(form, f'{thought}<tool_call>{{"name": "g", "arguments": {{}}}}</tool_call>')
    assert parts == [Reasoning("call <tool_call>?"), *call("g", "{}")]


def test_settings_know_the_formats():
    assert (server.TOOL_PARSERS, server.REASONING_PARSERS) == (TOOL_PARSERS, REASONING_PARSERS)


TEMPLATES = [  # what tells a family's template, its tool format, its reasoning format
    ("<tool_call>", "hermes", None),
    ("<tool_call><think></think>", "hermes", "think"),
    ("<tool_call><function=x><parameter=y><think>", "qwen3_coder", "think"),
    ("<seed:tool_call><function=x><parameter=y><seed:think>", "seed_oss", "seed"),
    ("<tool_call><arg_key>", "glm", None),
    ("<tool_call><tool_sep><arg_key>", "hy_v3", "hy_v3"),
    ("<|open|>{{ 'tools' }}{{ 'think' }}", "kimi_k3", "kimi_k3"),
    ("]<]minimax[>[<invoke name=<mm:think>", "minimax_m3", "minimax_m3"),
    ("<function name=<param name=<think>", "minicpm5", "think"),
    ("<dots_function_call>", "dots", None),
    ("<|tool_call:begin|><|think|>", "solar", "solar"),
    ("{{ 'function call' }}<|role_sep|>", "gigachat3", None),
    ("<|function_call|>", "gigachat3", None),
    ("<|tools_prefix|><|inner_prefix|>", "apertus", "apertus"),
    ("<tool_calls>Here are my reasoning steps:", "hunyuan_a13b", "apriel"),
    ("<longcat_tool_call>", "longcat", None),
    ("<|action_start|>", "internlm", None),
    ("<minimax:tool_call><invoke name=", "minimax_m2", None),
    ("{% set token = '｜DSML｜' %}<think></think>", "deepseek_v32", "think"),
    ("<steptml:invoke name=", "step3", None),
    ("<|tool_calls_section_begin|><|tool_call_argument_begin|>", "kimi_k2", None),
    ("<|tool_call>call:<|channel>thought", "gemma4", "gemma4"),
    ("<start_function_call>call:", "functiongemma", None),
    ("functools[", "phi4_mini_json", None),
    ("<|tool|><|/tool|>", "phi4_mini_json", None),
    ("<|tool_call|><think></think><response>", "granite", "ernie45"),
    ("<tool_call><think></think><response>", "hermes", "ernie45"),
    ("<|START_ACTION|><|START_THINKING|>", "cohere_command3", "cohere_command3"),
    ("<TOOLCALL>", "nemotron_json", None),
    ("<tool_calls><think></think><answer>", "hunyuan_a13b", "hunyuan_a13b"),
    ("<|tool_list_start|>", "lfm2", None),
    ("<function_calls>f(a=1)", "olmo3", None),
    ("[TOOL_CALLS][THINK]", "mistral", "mistral"),
    ("<|python_tag|>", "llama3", None),
    ('{"name": ..., "parameters": dictionary of argument name and its value}', "llama3", None),
    ("<｜tool▁call▁begin｜>```json", "deepseek_v3", None),
    ("<｜tool▁call▁begin｜>", "deepseek_v31", None),
    ("[func_name1(a)]", "pythonic", None),
    ("<|channel|>", "harmony", "harmony"),
    ("Here is my thought process:", "hermes", "granite"),
    ("", "hermes", None),
]


@pytest.mark.parametrize(("shown", "name", "reasoning"), TEMPLATES)
def test_formats_follow_from_the_template(shown, name, reasoning):
    template = "{{ tools }}" + shown
    found = reasoning_format(template)
    assert (tool_format(template).name, found and found.name) == (name, reasoning)


def test_tags_of_hunyuan_have_the_suffix_of_the_checkpoint():
    for template in (
        "{% set HYTK = ':ab1' %}<tool_sep{}><arg_key{}>",
        "<tool_call:ab1><tool_sep><arg_key",
    ):
        template = "{{ tools }}" + template
        form = OutputFormat(reasoning_format(template), tool_format(template), SCHEMAS)
        text = "<think>hm</think>a<tool_calls><tool_call>g<tool_sep></tool_call></tool_calls>"
        written = re.sub(r"<(/?\w+)>", r"<\1:ab1>", text)
        assert read(form, [written]) == [Reasoning("hm"), Text("a"), *call("g", "{}")]


def test_formats_can_be_chosen():
    assert tool_format("[TOOL_CALLS]").name == "hermes"  # it describes no tools
    assert tool_format("", "glm").name == "glm"
    assert reasoning_format("<think>", "none") is None
    assert reasoning_format("", "mistral").name == "mistral"


PIECES = st.lists(
    st.sampled_from(
        [
            *[mark for form in TOOL_FORMATS for mark in form.marks],
            *[text for _, text, _ in EXAMPLES],
            '{"name": "f", "arguments": {}}',
            "<function=f>",
            "<parameter=text>",
            "</parameter>",
            "<arg_key>",
            "<|message|>",
            "<think>",
            "</think>",
            "[f(",
            ")]",
            *'[]{}"<\\\n;, ',
        ]
    )
    | st.text(max_size=5),
    max_size=12,
)


@settings(max_examples=examples(2000), deadline=30_000)
@given(
    st.sampled_from(list(FORMATS.values())),
    st.sampled_from([None, *THINKING]),
    st.booleans(),
    PIECES,
    st.randoms(),
)
def test_what_is_read_does_not_depend_on_the_pieces(form, reasoning, inside, pieces, dice):
    text = "".join(pieces)
    output = OutputFormat(reasoning, form, SCHEMAS, inside)
    split = []
    at = 0
    while at < len(text):
        split.append(text[at : at + dice.randint(1, 4)])
        at += len(split[-1])
    assert read(output, split) == read(output, [text])


@settings(max_examples=examples(300), deadline=30_000)
@given(st.text(max_size=40))
def test_text_without_marks_is_text(text):
    plain = "".join(char for char in text if char not in "<[{")
    for name in FORMATS:
        if name != "harmony":
            assert read(tools(name), plain) == ([Text(plain)] if plain else [])


MALFORMED = [  # format, text, parts
    ("hermes", '<tool_call>```json\n{"name": "f", "arguments": {"n": 1}}\n```</tool_call>', F1),
    ("hermes", '{"name": "f", "arguments": {"n": 1}}\n</tool_call>', F1),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 1}\n<tool_call>{"name": "g"}', F1 + G),
    ("hermes", "<tool_call>{'name': 'f', 'arguments': {'n': 1, }}</tool_call>.", [*F1, Text(".")]),
    ("hermes", '<tool_call>{{"name": "f", "arguments": {{"n": 1}}}}</tool_call>', F1),
    ("hermes", '<tool_call>[{"name": "f", "arguments": {"n": 1}},\n{"name": "g"}]', [*F1, *G]),
    (
        "hermes",
        '<tool_call>{"type": "function", "function": {"name": "f", "arguments": "{\\"n\\": 1}"}}',
        F1,
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"text": "a "b" \\d\n\\ud83d"}}</tool_call>',
        [CallBegin("f"), {"text": 'a "b" \\d\n\ufffd'}],
    ),
    ("hermes", '{"name": "Ann", "arguments": {}}', [Text('{"name": "Ann", "arguments": {}}')]),
    (
        "qwen3_coder",
        "See <function=NAME> and <tool_call> tags",
        [Text("See <function=NAME> and <tool_call> tags")],
    ),
    (
        "qwen3_coder",
        "<function=f>\n<parameter=text>\na </parameter> b\n<parameter=n>\n1\n</function>\n"
        "<function=g>\n</function>\n</tool_call>",
        [CallBegin("f"), {"text": "a </parameter> b", "n": 1}, *G],
    ),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=n>\n12", []),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=n", []),
    ("glm", "<tool_call>f<arg_key>n</arg_key>\n<arg_va", []),
    ("qwen3_coder", '<tool_call><function=f>\n{"n": 1}</function></tool_call>.', [*F1, Text(".")]),
    ("deepseek_v32", '<｜DSML｜invoke name="f">{"n": 1</｜DSML｜invoke> x', [*F1, Text(" x")]),
    ("deepseek_v31", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"n": 1}\n```', F1),
    ("deepseek_v3", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"n": 1}<｜tool▁call▁end｜>', F1),
    (
        "kimi_k2",
        "<|tool_call_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>{'n': 1}"
        "<|tool_call_end|><|tool_call_section_end|>",
        F1,
    ),
    (
        "kimi_k2",
        '<|tool_calls_section_begin|>functions.f:0<|tool_call_argument_begin|>{"n": 1}'
        "<|tool_calls_section_end|>",
        F1,
    ),
    ("gemma4", "<|tool_call>call:f{n:1}<tool_call|><|tool_response>", F1),
    (
        "lfm2",
        '<|tool_call_start|>[{"name": "f", "arguments": {"n": 1}}, {"name": "g"}]<|tool_call_end|>',
        [*F1, *G],
    ),
    ("pythonic", '[{"name": "Ann"}]', [Text('[{"name": "Ann"}]')]),
    ("glm", "<tool_call>f<arg_key>text</arg_key><arg_value>a", [CallBegin("f"), {"text": "a"}]),
    (
        "glm",
        "<tool_call>f<arg_key>text</arg_key>a b</arg_value><arg_key>n</arg_key>1</arg_value>"
        "</tool_call>",
        [CallBegin("f"), {"text": "a b", "n": 1}],
    ),
    ("llama3", '[{"name": "f", "parameters": {"n": 1}}] Done', [*F1, Text("Done")]),
    ("pythonic", "[f(n=1), g(text=", F1),
    ("pythonic", '[f(text="""a\n"b" """)]', [CallBegin("f"), {"text": 'a\n"b" '}]),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>Rome<|call|>", [Text("Rome")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), MALFORMED)
def test_malformed_calls_are_repaired_or_text(name, text, expected):
    assert simplified(read(tools(name), [text])) == expected
    assert simplified(read(tools(name), text)) == expected


def test_reasoning_without_an_end_ends_at_a_call():
    form = OutputFormat(THINKING[0], FORMATS["hermes"])
    written = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    expected = [Reasoning("a "), *call("g", "{}")]
    assert read(form, f"<think>a {written}") == expected
    assert read(form, f"<think>a {written}</think>\n\nb") == [*expected, Text("\n\nb")]
    assert read(form, "<think>a <tool_call> b") == [Reasoning("a <tool_call> b")]
    assert read(form, "<think>\n\n</think>\n<think>a </think>\n" + written) == expected


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "007", "007"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"$ref": "#/$defs/code"}, "1e5", "1e5"),
        ({"allOf": [{"$ref": "#/$defs/code"}, {"minLength": 1}]}, "[1]", "[1]"),
        ({"oneOf": [{"type": "integer"}, {"$ref": "#/$defs/code"}]}, "41", 41),
        ({"type": "integer", "nullable": True}, "None", None),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "integer"}, "three", "three"),
        ({"type": "boolean"}, "TRUE", True),
        ({"const": "5"}, "5", "5"),
        ({"type": "object"}, "{'a': None,}", {"a": None}),
        ({"type": "array"}, '"[1, 2]"', [1, 2]),
        ({}, "5", 5),
        ({"$ref": "#/$defs/loop"}, "x", "x"),
    ],
)
def test_values_between_tags_have_the_types_of_their_parameters(schema, written, value):
    defs = {"code": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}
    schemas = {"f": {"properties": {"a": schema}, "$defs": defs}}
    form = OutputFormat(tools=FORMATS["minimax_m2"], schemas=schemas)
    text = f'<invoke name="f"><parameter name="a">{written}</parameter></invoke>'
    assert simplified(read(form, text)) == [CallBegin("f"), {"a": value}]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("{<at>{<x>1{</x>{<x>2{</x>{<y>007{</y>{</at>", {"at": {"x": 1, "y": "007"}}),
        ("{<at>{<y>[5]{</at>", {"at": {"y": "[5]"}}),
        ("{<list>{<item>1{</item>{</list>", {"list": ["1"]}),
        ("{<list>[1, 2]{</list>{<n>two", {"list": [1, 2], "n": "two"}),
        ("{<text>1 {</b> < 2{</text>", {"text": "1 {</b> < 2"}),
        ("", {}),
    ],
)
def test_elements_have_the_types_that_the_schema_gives_them(written, value):
    schema = {
        "properties": {
            "at": {"$ref": "#/$defs/place"},
            "list": {"type": "array", "items": {"type": "string"}},
            "n": {"type": "integer"},
            "text": {"type": "string"},
        },
        "$defs": {"place": {"properties": {"x": {"type": "integer"}, "y": {"type": "string"}}}},
    }
    text = f'{{<invoke name="f">{written}{{</invoke>'.replace("{<", "]<]minimax[>[<")
    form = OutputFormat(tools=FORMATS["minimax_m3"], schemas={"f": schema})
    expected = json.loads(json.dumps(value).replace("{</b>", "]<]minimax[>[</b>"))
    assert simplified(read(form, text)) == [CallBegin("f"), expected]


@pytest.mark.parametrize(
    ("form", "written"),
    [
        ("harmony", "<|channel|>commentary to=functions.a/b:c<|message|>{{}}<|call|>"),
        ("kimi_k2", "<|tool_call_begin|>functions.a/b:c:0<|tool_call_argument_begin|>{{}}"),
    ],
)
def test_names_may_have_slashes_and_colons(form, written):
    assert read(tools(form), written.format()) == call("a/b:c", "{}")


@pytest.mark.parametrize(
    ("written", "json_of"),
    [
        ('{"a": "x"' + " " * 1000 + '"y"}', '{"a": "x"}'),
        ('{"a": ' + "x" * 70_000 + "}", None),
        ("{'a': 'say \"hi\"\\t'}", '{"a": "say \\"hi\\"\\t"}'),
        ('{"a\tb": 1}', '{"a\\tb": 1}'),
        ('{"a": "\\u00e9\\/"}', '{"a": "\\u00e9\\/"}'),
    ],
)
def test_objects_of_any_length_are_json_however_they_are_cut(written, json_of):
    whole = repaired(written)
    json.loads(whole)
    assert json_of is None or whole == json_of
    reader = LenientJson()
    pieces = [piece for i in range(0, len(written), 5) for piece in reader.push(written[i : i + 5])]
    assert "".join(piece.text for piece in [*pieces, *reader.finish()]) == whole
