"""Conversations as clients send them, before templates that take less than that."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.api.errors import RequestError
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.conversation.arguments import read_arguments

ANY = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} "
    "{{ c.function.arguments | tojson }}]{% endfor %}"
    "{% if m.role == 'tool' %}({{ m.name }} {{ m.tool_call_id }}){% endif %}{% endfor %}"
    "{# tools #}"
)
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system comes first') }}{% endif %}<{{ m.role }}>{{ m.content }}"
    "{% endfor %}{# tools #}"
)
NO_SYSTEM = (  # as Gemma's
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('no such role') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
)
KNOWN_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' %}S:{{ m.content }}"
    "{% elif m.role == 'user' %}U:{{ m.content }}{% elif m.role == 'assistant' %}A:{{ m.content }}"
    "{% endif %};{% endfor %}"
)


def rendered(source, *messages, **rest):
    return ChatTemplate(source, {"eos_token": "</s>"}).render(list(messages), **rest)


def user(content):
    return {"role": "user", "content": content}


def system(content, role="system"):
    return {"role": role, "content": content}


def answer(content=None, *calls, **rest):
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **rest}


def call(arguments, name="look", id="c9"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content, **rest):
    return {"role": "tool", "content": content, **rest}


# --- roles


def test_a_developer_is_a_system_where_the_template_knows_none():
    assert rendered(KNOWN_ONLY, system("Rhyme.", "developer"), user("x")) == "S:Rhyme.;U:x;"
    knowing = "{# developer #}" + ANY
    assert rendered(knowing, system("Rhyme.", "developer")) == "<developer>Rhyme."


def test_texts_of_a_system_come_first_as_one_where_the_template_wants_that():
    chat = [system("one"), user("x"), answer("y"), system("two", "developer"), user("z")]
    assert rendered(SYSTEM_FIRST, *chat) == "<system>one\n\ntwo<user>x<assistant>y<user>z"
    assert rendered(ANY, *chat) == "<system>one<user>x<assistant>y<system>two<user>z"


def test_a_template_without_a_system_and_with_roles_in_turn_takes_any_conversation():
    chat = [system("one"), answer("hello"), user("a"), user("b"), system("two"), answer("c")]
    assert rendered(NO_SYSTEM, *chat) == "<user>one\n\ntwo<assistant>hello<user>a\n\nb<assistant>c"
    called = [user("x"), answer(None, call("{}")), result("found", tool_call_id="c9"), user("so?")]
    text = rendered(NO_SYSTEM, *called)
    assert [text.index(part) for part in ("x", "look", "found", "so?")] == sorted(
        text.index(part) for part in ("x", "look", "found", "so?")
    )


def test_legacy_calls_and_results_are_calls_and_results():
    old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    text = rendered(ANY, user("x"), old, {"role": "function", "name": "f", "content": "1"})
    assert text == "<user>x<assistant>[call_1 f {}]<tool>1(f call_1)"


def test_calls_of_custom_tools_have_their_input_as_an_argument():
    custom = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    assert rendered(ANY, answer(None, custom)) == '<assistant>[c1 patch {"input": "*** Begin"}]'


def test_an_unknown_role_is_given_as_it_is_and_said(caplog):
    template = ChatTemplate(ANY, {})
    for _ in range(3):
        assert template.render([{"role": "critic", "content": "x"}]) == "<critic>x"
    assert caplog.text.count("'critic'") == 1


# --- contents


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (answer(None), ""),
        ({"role": "assistant"}, ""),
        (answer(None, refusal="I will not."), "I will not."),
        (answer([{"type": "refusal", "refusal": "No."}]), "No."),
        (answer([{"type": "output_text", "text": "a", "annotations": []}, "b"]), "a\nb"),
        (answer([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]), "a"),
        (answer([{"type": "audio"}, {"type": "text", "text": "a"}]), "a"),
        (answer({"type": "text", "text": "a"}), "a"),
        (answer([]), ""),
    ],
)
def test_whatever_an_assistant_said_is_taken(message, text):
    assert rendered(ANY, user("x"), message) == f"<user>x<assistant>{text}"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        (None, ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ({"degrees": 21}, '{"degrees": 21}'),
        ({"text": "rain", "mm": 3}, '{"text": "rain", "mm": 3}'),
        ([{"type": "city", "text": "Oslo"}], '[{"type": "city", "text": "Oslo"}]'),
        ([1, "é"], '[1, "é"]'),
        (["a", "b"], "a\nb"),
        (7.5, "7.5"),
        ([], ""),
        ([{"type": "image_url"}], "[image_url was left out: only text can be taken]"),
    ],
)
def test_whatever_a_tool_said_is_taken(content, text):
    chat = [answer(None, call("{}")), result(content, tool_call_id="c9")]
    assert rendered(ANY, *chat) == f"<assistant>[c9 look {{}}]<tool>{text}(look c9)"


def test_results_without_an_id_or_a_name_are_those_of_the_calls_in_turn():
    calls = [call("{}", "one", "a"), call("{}", "two", "b"), call("{}", "three", "c")]
    chat = [answer(None, *calls), result("1"), {"role": "tool", "name": "three", "content": "3"}]
    text = rendered(ANY, *chat, result("2"), result("4"))
    assert text.endswith("<tool>1(one a)<tool>3(three c)<tool>2(two b)<tool>4(tool call_of_3)")


# --- arguments


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (" \n", {}),
        (None, {}),
        ("null", {}),
        ('""', {}),
        ('{"path": "/usr/lo', {"path": "/usr/lo"}),
        ('{"a": [1, {"b": tr', {"a": [1, {}]}),
        ('{"text": "two\nlines"}', {"text": "two\nlines"}),
        ('{"text": "two\nlin', {"text": "two\nlin"}),
        ('{"a": 1}}', {"a": 1}),
        (json.dumps('{"a": 1}'), {"a": 1}),
        ("[1, 2]", {"arguments": [1, 2]}),
        ("7", {"arguments": 7}),
        ("ls -l", {"arguments": "ls -l"}),
        ('{"half": "\\ud83d"}', {"half": "\ufffd"}),
        ('{"whole": "\\ud83d\\ude00"}', {"whole": "\U0001f600"}),
        ("[" * 5000, {"arguments": "[" * 5000}),
    ],
)
def test_arguments_of_any_shape_become_an_object(given, read):
    assert read_arguments(given)[0] == read


@given(st.text() | st.text(alphabet='{}[]":,\\ud8"a1 \n'))
def test_any_text_of_arguments_can_be_written_again(text):
    arguments, _ = read_arguments(text)
    written = json.dumps(arguments, ensure_ascii=False)
    assert read_arguments(written) == (arguments, True)
    written.encode()


def test_a_repair_is_said_once(caplog):
    template = ChatTemplate(ANY, {})
    for broken in ('{"a', '{"b'):
        template.render([answer(None, call(broken))])
    assert caplog.text.count("were repaired") == 1
    ChatTemplate(ANY, {}).render([answer(None, call('{"a": 1}'), call(""))])
    assert caplog.text.count("were repaired") == 1


# --- what templates want of calls

CALLS = "{% for c in m.tool_calls or [] %}"
ONE_CALL = ANY.replace(
    CALLS, "{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}" + CALLS
)
NINE = ANY.replace(
    CALLS, CALLS + "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
)
OWN_TEXT = "{% for m in messages %}<{{ m.role }}>{{ m.content if not m.tool_calls }}"
OWN = ANY.replace("{% for m in messages %}<{{ m.role }}>{{ m.content }}", OWN_TEXT)
AS_TEXT = ANY.replace("{{ c.function.arguments | tojson }}", "{{ '=' + c.function.arguments }}")
SILENT = "{% for m in messages if m.role in ['user', 'assistant'] %}{{ m.content }};{% endfor %}"


def test_calls_are_made_one_by_one_where_the_template_takes_one():
    calls = [call("{}", "one", "a"), call("{}", "two", "b")]
    chat = [user("x"), answer("Well", *calls), result("2", tool_call_id="b")]
    text = rendered(ONE_CALL, *chat, result("1", tool_call_id="a"), user("so?"))
    assert text == (
        "<user>x<assistant>Well[a one {}]<tool>1(one a)<assistant>[b two {}]<tool>2(two b)<user>so?"
    )


def test_ids_are_made_as_the_template_wants_them():
    chat = [
        user("x"),
        answer(None, call("{}", id="toolu_01")),
        result("1", tool_call_id="toolu_01"),
    ]
    text = rendered(NINE, *chat)
    id = text.split("[")[1].split()[0]
    assert len(id) == 9 and id.isalnum() and text.endswith(f"(look {id})")
    assert rendered(NINE, *chat) == text


def test_text_before_a_call_is_not_lost():
    assert rendered(OWN, user("x"), answer("Well", call("{}"))) == (
        "<user>x<assistant>Well<assistant>[c9 look {}]"
    )


def test_text_before_a_call_is_not_lost_where_answers_must_alternate_with_users():
    source = (  # as Mistral's: a message with calls shows no text and does not count
        "{% set seen = namespace(n=0) %}{% for m in messages %}"
        "{% if m.tool_calls %}[{{ m.tool_calls[0].function.name }}]"
        "{% elif m.role == 'tool' %}({{ m.content }})"
        "{% else %}{% if (m.role == 'user') != (seen.n % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% set seen.n = seen.n + 1 %}"
        "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}{# tools #}"
    )
    asked = [user("x"), answer("Let me see.", call("{}")), result("found", tool_call_id="c9")]
    text = "<user>x<assistant>Let me see.<user>[look](found)"
    assert rendered(source, *asked) == text
    assert rendered(source, *asked, answer("so"), user("y")) == text + "<assistant>so<user>y"
    unanswered = [*asked[:2], answer("no"), user("y")]
    assert rendered(source, *unanswered).endswith("[look]<assistant>no<user>y")


def test_arguments_are_a_text_where_the_template_takes_no_object():
    assert rendered(AS_TEXT, answer(None, call({"a": "é"}))) == '<assistant>[c9 look ={"a": "é"}]'


def test_calls_and_results_that_a_template_would_leave_out_are_text():
    text = rendered(
        SILENT + "{# tools #}", user("x"), answer(None, call('{"a": 1}')), result("yes")
    )
    assert '{"name": "look", "arguments": {"a": 1}}' in text and "yes" in text


def test_contents_are_parts_where_the_template_takes_no_text():
    parts = "{% for m in messages %}{% for p in m.content %}{{ p.text }},{% endfor %}{% endfor %}"
    assert rendered(parts, system("s"), user("x"), answer(None)) == "s,x,,"


RAISE = "{{ raise_exception('no') }}"
IN_TURN = (  # only texts count
    "{% set turn = namespace(at=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is not defined) %}"
    f"{{% if (m.role == 'user') != (turn.at % 2 == 0) %}}{RAISE}{{% endif %}}"
    "{% set turn.at = turn.at + 1 %}{% endif %}{% endfor %}" + ANY
)
WITH_QUERY = "{% if 'user' not in messages | map(attribute='role') %}" + RAISE + "{% endif %}" + ANY
NO_BLANK = ANY.replace(
    CALLS, f"{{% if not m.content and not m.tool_calls %}}{RAISE}{{% endif %}}" + CALLS
)
STRAY = f"{{% if m.role == 'tool' and not loop.previtem.tool_calls %}}{RAISE}{{% endif %}}"
AFTER_CALL = ANY.replace(CALLS, STRAY + CALLS)
NULL = ANY.replace(CALLS, "{% for c in (m.tool_calls if m.content is none else []) %}")
ONE_THOUGHT = ANY.replace(
    CALLS, f"{{% if m.tool_calls and m.content and m.thinking %}}{RAISE}{{% endif %}}" + CALLS
)
LAST_ONLY = (
    "{% if messages[-1].role == 'user' %}{{ messages[0].content }}{% endif %}"
    + ANY.replace("messages %}", "messages if m.role != 'system' %}", 1)
)
CALLED = (user("x"), answer(None, call("{}")), result("1"))
SHOWN = "<user>x<assistant>[c9 look {}]<tool>1(look c9)"


@pytest.mark.parametrize(
    ("source", "chat", "text"),
    [
        (IN_TURN, [*CALLED, user("so?")], SHOWN + "<assistant> <user>so?"),
        (IN_TURN, [*CALLED, answer("a"), user("b")], SHOWN + "<assistant>a<user>b"),
        (WITH_QUERY, [system("s"), *CALLED[1:]], "<system>s<user>" + SHOWN[7:]),
        (NO_BLANK, [user("x"), answer(None), user("y")], "<user>x<assistant> <user>y"),
        (AFTER_CALL, [user("x"), result("1")], "<user>x<user><tool_response>\n1\n</tool_response>"),
        (NULL, CALLED, SHOWN.replace("<assistant>", "<assistant>None")),
        (LAST_ONLY, [system("s"), *CALLED], SHOWN.replace("x", "s\n\nx")),
    ],
)
def test_a_template_gets_what_it_takes(source, chat, text):
    assert rendered(source, *chat) == text


def test_reasoning_and_text_before_a_call_are_one_where_the_template_takes_one():
    chat = [user("x"), answer("So", call("{}"), thinking="hm"), result("1")]
    assert rendered(ONE_THOUGHT, *chat) == SHOWN.replace("[", "hm\n\nSo[", 1)


# --- reasoning


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_earlier_reasoning_is_given_under_the_name_that_the_template_has(name):
    source = f"{{% for m in messages %}}{{{{ m.{name} }}}}|{{{{ m.content }}}};{{% endfor %}}"
    for key in ("reasoning_content", "reasoning", "thinking"):
        assert rendered(source, user("x"), answer("y", **{key: "hm"})) == "|x;hm|y;"
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "y"}]
    assert rendered(source, answer(parts)) == "hm|y;"


def test_earlier_reasoning_is_a_part_where_the_template_reads_it_there():
    source = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{% if p.type == 'thinking' %}[{{ p.thinking }}]{% else %}"
        "{{ p.text }}{% endif %}{% endfor %}{% endif %};{% endfor %}"
    )
    assert rendered(source, user("x"), answer("y", reasoning="hm"), user("z")) == "x;[hm]y;z;"


def test_earlier_reasoning_is_dropped_where_the_template_has_no_place_for_it():
    source = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    assert "hm" not in rendered(source, user("x"), answer("y", reasoning_content="hm"))


# --- the last message


def test_a_last_message_is_continued_whatever_the_template_does_with_its_text():
    source = KNOWN_ONLY.replace("A:{{ m.content }}", "A:{{ m.content | trim | upper }}")
    chat = [user("x"), answer("It is ")]
    assert rendered(source, *chat, continue_final_message=True) == "U:x;A:IT IS "
    chat = [user("A"), answer("A"), user("A"), answer("A")]
    assert rendered(NO_SYSTEM, *chat, continue_final_message=True).endswith("<user>A<assistant>A")
    with pytest.raises(RequestError, match="shows"):
        rendered("{{ messages[0].content }}", *chat, continue_final_message=True)


# --- any conversation

WORDS = st.text("ab{}<\n", max_size=6)
ARGUMENTS = st.none() | WORDS | st.just({"a": 1}) | st.sampled_from(['{"a": "b', '{"a": 1}', "[]"])
MESSAGES = st.one_of(
    st.builds(user, WORDS),
    st.builds(system, WORDS, st.sampled_from(["system", "developer"])),
    st.builds(answer, st.none() | WORDS, st.builds(call, ARGUMENTS), reasoning=WORDS),
    st.builds(answer, st.none() | WORDS, refusal=st.none() | WORDS),
    st.builds(result, st.none() | WORDS | st.just([{"type": "image"}]), tool_call_id=st.just("c9")),
    st.builds(result, WORDS),
)
TEMPLATES = [
    ChatTemplate(source, {})
    for source in (ANY, SYSTEM_FIRST, NO_SYSTEM, KNOWN_ONLY, ONE_CALL, NINE, OWN, AS_TEXT, SILENT)
]


@given(st.lists(MESSAGES, min_size=1, max_size=8), st.sampled_from(TEMPLATES))
def test_no_conversation_is_refused(messages, template):
    template.render(messages).encode()


def test_what_a_template_needs_is_logged_once(caplog):
    caplog.set_level(logging.INFO)
    template = ChatTemplate(SYSTEM_FIRST, {})
    for _ in range(3):
        template.render([user("x")])
    assert caplog.text.count("all texts of a system come first") == 1
