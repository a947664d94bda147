"""Conversations that go on: what models and clients said before is taken, in every protocol."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.text.chat_template import ChatTemplate
from tests.examples import examples
from tests.server.conftest import started
from tests.server.fakes import EOS, FakeTokenizer
from tests.server.http_client import HttpClient, events, post

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "parameters": PARAMETERS}
HI = {"role": "user", "content": "hi"}
SCREEN = {"type": "computer_screenshot", "image_url": "data:"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


class Telling(FakeTokenizer):
    """A tokenizer of a model whose template shows reasoning, and takes one system message and roles
    in turn."""

    template = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('the system comes first') }}{% endif %}<{{ m.role }}>"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} "
        "{{ c.function.arguments | tojson }}</tool_call>{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}{# tools #}",
        {},
    )


@pytest.fixture(scope="module")
def client():
    with contextlib.ExitStack() as stack:
        served = started(stack, tokenizer=Telling, stored_responses_mib=1)
        yield stack.enter_context(HttpClient(served))


def told(client):
    """The last prompt."""
    return bytes(client.engine.submitted[-1].prompt.tolist()).decode()


def says(client, text):
    client.engine.play([*text.encode(), EOS])


def answered(client, path, body):
    answer = post(client, path, {"max_tokens": 500, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


# --- what the server itself said

PIECES = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>\n", "\n</tool_call>", CALL, '{"name": "weather", '),
        *('"arguments": ', '{"city": "Os', "{}", '""', "null", "}", "{", '"\\ud83d"', "Well. "),
    ]
)
TEXTS = st.lists(PIECES | st.text(max_size=5), max_size=8).map("".join)


@settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))
@given(text=TEXTS, most=st.integers(1, 60))
def test_answers_of_this_server_are_taken_back(client, text, most):
    says(client, text)
    tools = [{"type": "function", "function": FUNCTION}]
    body = {"messages": [HI], "tools": tools, "max_tokens": most}
    (choice,) = answered(client, "/v1/chat/completions", body)["choices"]
    chat = [HI, choice["message"]]
    for call in choice["message"].get("tool_calls", ()):
        chat.append({"role": "tool", "tool_call_id": call["id"], "content": None})
    answered(client, "/v1/chat/completions", {"messages": [*chat, HI]})

    body = {"input": "hi", "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": most}
    items = answered(client, "/v1/responses", body)["output"]
    calls = [item["call_id"] for item in items if item["type"] == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": id, "output": ""} for id in calls]
    answered(client, "/v1/responses", {"input": [HI, *items, *outputs, HI]})

    tool = {"name": "weather", "input_schema": PARAMETERS}
    body = {"messages": [HI], "tools": [tool], "max_tokens": most}
    blocks = answered(client, "/v1/messages", body)["content"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"]}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    user = {"role": "user", "content": [*results, {"type": "text", "text": "so?"}]}
    answered(
        client, "/v1/messages", {"messages": [HI, {"role": "assistant", "content": blocks}, user]}
    )


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "id", "output"]), inner, max_size=3)
    ),
    max_leaves=6,
)
TYPES = st.sampled_from(
    [
        *("message", "reasoning", "function_call", "function_call_output", "item_reference"),
        *("custom_tool_call", "mcp_call", "text", "thinking", "tool_use", "tool_result"),
        *("document", "search_result", "web_search_tool_result", "refusal", "image_url"),
    ]
)
ROLES = st.sampled_from(["user", "assistant", "system", "developer", "tool", "function"])
NAMES = ("content", "id", "call_id", "name", "arguments", "input", "output", "summary", "text")
BLOCKS = st.fixed_dictionaries(
    {"type": TYPES | ANYTHING}, optional=dict.fromkeys((*NAMES, "tool_use_id"), ANYTHING)
)
MESSAGES = st.fixed_dictionaries(
    {"role": ROLES | ANYTHING, "content": ANYTHING | st.lists(BLOCKS, max_size=3)},
    optional=dict.fromkeys(("tool_calls", "function_call", "reasoning", "tool_call_id"), ANYTHING),
)


@settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))
@given(history=st.lists(MESSAGES | BLOCKS, max_size=4))
def test_any_history_is_answered_or_refused(client, history):
    says(client, "ok")
    for path, name in (
        ("/v1/chat/completions", "messages"),
        ("/v1/responses", "input"),
        ("/v1/messages", "messages"),
    ):
        body = {"max_tokens": 1, "max_output_tokens": 1, name: [HI, *history]}
        answer = post(client, path, body)
        assert answer.status_code in (200, 400), (body, answer.text)


def test_conversations_over_grpc_are_fitted_too(client):
    says(client, "ok")
    rules = [{"role": "developer", "content": "Rhyme."}, {"role": "system", "content": "Now."}]
    client.served.client.complete([HI, *rules])
    assert told(client) == "<system>Rhyme.\n\nNow.<user>hi<assistant>"


# --- /v1/responses


def test_items_of_agents_are_messages_calls_and_results(client):
    says(client, "ok")
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "D"}]},
        HI,
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "content": None},
        {"type": "message", "role": "assistant", "phase": "commentary", "content": [
            {"type": "output_text", "text": "Well", "annotations": [], "logprobs": []},
            {"type": "refusal", "refusal": "but"},
        ]},
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "*** Begin"},
        {"type": "local_shell_call", "call_id": "c2", "action": {"command": ["ls"]}},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "local_shell_call_output", "id": "c2", "output": '{"stdout": "x"}'},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
        {"type": "computer_call", "call_id": "c3", "action": {"type": "screenshot"}},
        {"type": "computer_call_output", "call_id": "c3", "output": SCREEN},
        {"type": "mcp_call", "id": "m", "name": "find", "arguments": "{}", "output": "found"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"role": "user", "content": "so?"},
    ]  # fmt: skip
    body = {"instructions": "I", "input": items, "max_output_tokens": 5}
    answer = post(client, "/v1/responses", body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-jaxserve-ignored"] == "input.web_search_call"
    assert told(client) == (
        "<system>I\n\nD<user>hi<assistant><think>hm</think>Well\nbut"
        '<tool_call>patch {"input": "*** Begin"}</tool_call>'
        '<tool_call>local_shell {"command": ["ls"]}</tool_call><tool>done<tool>{"stdout": "x"}'
        '<assistant><tool_call>computer {"type": "screenshot"}</tool_call>'
        "<tool>[computer_screenshot was left out: only text can be taken]"
        "<assistant><tool_call>find {}</tool_call><tool>found<user>so?<assistant>"
    )


def test_references_are_items_of_stored_responses(client):
    says(client, "Oslo")
    first = answered(client, "/v1/responses", {"input": "Which city?", "store": True})
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    body = {"input": [HI, reference, {"type": "item_reference", "id": "msg_unknown"}, HI]}
    answer = post(client, "/v1/responses", body)
    assert told(client) == "<user>hi<assistant>Oslo<user>hi<assistant>"
    assert answer.headers["x-jaxserve-ignored"] == "input.item_reference"


def test_instructions_alone_are_a_conversation(client):
    says(client, "ok")
    answered(client, "/v1/responses", {"instructions": "Warm up.", "input": []})
    assert told(client) == "<system>Warm up.<assistant>"


# --- /v1/messages


def test_blocks_of_agents_are_messages_calls_and_results(client):
    says(client, "ok")
    searched = {"type": "web_search_result", "title": "T", "url": "u"}
    said = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Well", "citations": None},
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [searched]},
        {"type": "text", "text": "now"},
        {"type": "tool_use", "id": "t1", "name": "weather", "input": None},
        {"type": "tool_use", "id": "t2", "name": "weather", "input": {"city": "Oslo"}},
        {"type": "compaction", "content": "x"},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": "no city"},
        {"type": "tool_result", "tool_use_id": "t2", "content": [
            {"type": "text", "text": "rain"}, {"type": "image", "source": {}},
        ]},
        {"type": "text", "text": "so?", "cache_control": {"type": "ephemeral"}},
    ]  # fmt: skip
    messages = [HI, {"role": "assistant", "content": said}, {"role": "user", "content": results}]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1b2f;"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Rhyme."},
    ]
    body = {"system": system, "messages": messages, "max_tokens": 5}
    answer = post(client, "/v1/messages", body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-jaxserve-ignored"] == "messages.content.compaction"
    assert told(client) == (
        "<system>Be brief.\nRhyme.<user>hi<assistant><think>hm</think>Well"
        '<tool_call>web_search {"query": "q"}</tool_call>'
        '<tool>[{"type": "web_search_result", "title": "T", "url": "u"}]<assistant>now'
        '<tool_call>weather {}</tool_call><tool_call>weather {"city": "Oslo"}</tool_call>'
        "<tool>Error:\nno city<tool>rain\n[image was left out: only text can be taken]"
        "<user>so?<assistant>"
    )


@pytest.mark.parametrize(
    ("said", "prompt"),
    [
        ("Once upon", "<user>hi<assistant>Once upon"),
        ([{"type": "text", "text": "Once "}], "<user>hi<assistant>Once "),
        ([{"type": "tool_use", "id": "t", "name": "f", "input": {}}],
         "<user>hi<assistant><tool_call>f {}</tool_call><assistant>"),
        (" ", "<user>hi<assistant> <assistant>"),
    ],
)  # fmt: skip
def test_an_answer_that_has_begun_is_continued(client, said, prompt):
    says(client, "ok")
    messages = [HI, {"role": "assistant", "content": said}]
    answered(client, "/v1/messages", {"messages": messages})
    assert told(client) == prompt


def test_a_format_of_messages_holds_answers_to_its_schema(client):
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"]}
    form = {"type": "json_schema", "schema": schema}
    for field in ({"output_config": {"format": form, "effort": "low"}}, {"output_format": form}):
        says(client, '{"a": 7}')
        answered(client, "/v1/messages", {"messages": [HI], **field})
        assert len(client.engine.guides_seen) == 1
    answer = post(client, "/v1/messages", {"max_tokens": 5, "messages": [HI], "output_config": {
        "format": {"type": "json_schema"},
    }})  # fmt: skip
    assert answer.json()["error"]["param"] == "output_config.format.schema"


# --- functions, as they were before there were tools


def test_functions_are_called_as_they_are_described(client):
    says(client, "Well: " + CALL + CALL)
    body = {"messages": [HI], "functions": [FUNCTION], "max_tokens": 300}
    (choice,) = answered(client, "/v1/chat/completions", body)["choices"]
    called = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert choice["message"]["function_call"] == called
    assert choice["finish_reason"] == "function_call" and "tool_calls" not in choice["message"]
    chunks, _ = events(client, "/v1/chat/completions", body)
    deltas = [chunk["choices"][0]["delta"].get("function_call", {}) for chunk in chunks]
    for field, text in called.items():
        assert "".join(delta.get(field, "") for delta in deltas) == text
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"
    result = {"role": "function", "name": "weather", "content": "rain"}
    body["messages"] = [HI, choice["message"], result]
    answered(client, "/v1/chat/completions", body)
    assert told(client).endswith(
        '<tool_call>weather {"city": "Oslo"}</tool_call><tool>rain<assistant>'
    )


def test_a_function_may_be_forced_or_forbidden(client):
    says(client, '{"name": "weather", "arguments": {}}')
    body = {"messages": [HI], "functions": [FUNCTION]}
    forced = {**body, "function_call": {"name": "weather"}}
    (choice,) = answered(client, "/v1/chat/completions", forced)["choices"]
    assert choice["message"]["function_call"]["name"] == "weather"
    says(client, CALL)
    forbidden = {**body, "function_call": "none"}
    (choice,) = answered(client, "/v1/chat/completions", forbidden)["choices"]
    assert choice["message"]["content"] == CALL
    answer = post(client, "/v1/chat/completions", {**body, "function_call": {"name": "other"}})
    assert answer.status_code == 400 and "not among the tools" in answer.text
