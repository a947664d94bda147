"""Tools that are no functions are left out of what models see, and said; the others work as alone.
Functions are taken in every form in which clients write them."""

from __future__ import annotations

import json

import openai
import pytest

from tests.server.fakes import EOS
from tests.server.http_client import events, post

PARAMETERS = {"type": "object", "properties": {"day": {"type": "string"}}}
CALL = '{"name": "plan", "arguments": {"day": "Monday"}}'
HI = {"role": "user", "content": "hi"}


def chat_function(name="plan"):
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}


def responses_function(name="plan"):
    return {"type": "function", "name": name, "parameters": PARAMETERS}


def messages_function(name="plan"):
    return {"name": name, "input_schema": PARAMETERS}


CHAT = ("/v1/chat/completions", {"messages": [HI], "max_tokens": 90}, chat_function)
RESPONSES = ("/v1/responses", {"input": "hi", "max_output_tokens": 90}, responses_function)
MESSAGES = ("/v1/messages", {"messages": [HI], "max_tokens": 90}, messages_function)
PROTOCOLS = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}
OPENAI_TOOLS = [
    {"type": "web_search_preview", "search_context_size": "low"},
    {"type": "file_search", "vector_store_ids": ["vs_1"], "function": 5},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "image_generation"},
    {"type": "computer_use_preview", "display_width": 800},
    {"type": "mcp", "server_label": "wiki", "server_url": "https://example.com"},
    {"type": "shell"},
    {"type": "tool_search", "name": 5, "parameters": "none"},
    {"type": "browser:search"},
]
OTHERS = {
    "chat": [
        *OPENAI_TOOLS,
        {"type": "custom", "custom": {"name": "patch"}},
        {"type": "namespace", "name": "mcp__x", "tools": [responses_function("inner")]},
    ],
    "responses": [*OPENAI_TOOLS, {"type": "local_shell"}],
    "messages": [
        {"type": "web_fetch_20250910", "name": "web_fetch", "max_uses": 3},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "computer_20250124", "name": "computer", "display_width_px": 1},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
        {"type": "tool_search_tool_regex_20251119", "name": 5},
    ],
}
CHOICES = {  # of a call, whichever, of a tool, of no call
    "chat": ("required", {"type": "function", "function": {"name": "plan"}}, "none"),
    "responses": ("required", {"type": "function", "name": "plan"}, "none"),
    "messages": ({"type": "any"}, {"type": "tool", "name": "plan"}, {"type": "none"}),
}


def told(client):
    """The last prompt."""
    prompt = client.engine.submitted[-1].prompt.tolist()
    return bytes(token for token in prompt if token < 256).decode()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_tools_that_are_no_functions_are_left_out_and_said(http, protocol, caplog):
    path, body, function = PROTOCOLS[protocol]
    client = http(script=[*CALL.encode(), EOS])
    alone = post(client, path, {**body, "tools": [function()]})
    assert alone.status_code == 200 and "x-jaxserve-ignored" not in alone.headers
    prompt = told(client)
    for other in OTHERS[protocol]:
        answer = post(client, path, {**body, "tools": [function(), other]})
        assert answer.status_code == 200, (other, answer.text)
        assert answer.headers["x-jaxserve-ignored"] == f"tools.{other['type']}"
        assert told(client) == prompt
    tools = [*OTHERS[protocol], function()]
    for choice in CHOICES[protocol][:2]:
        answer = post(client, path, {**body, "tools": tools, "tool_choice": choice})
        assert answer.status_code == 200 and "Monday" in answer.text
    kinds = {other["type"] for other in OTHERS[protocol]}
    assert all(caplog.text.count(f"'tools.{kind}'") <= 1 for kind in kinds)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_without_a_function_it_is_as_without_tools(http, protocol):
    path, body, _ = PROTOCOLS[protocol]
    client = http(script=[*b"Hello", EOS])
    post(client, path, body)
    prompt = told(client)
    required, named, none = CHOICES[protocol]
    for tools in ([], None, OTHERS[protocol]):
        for choice in (None, none):
            answer = post(client, path, {**body, "tools": tools, "tool_choice": choice})
            assert (answer.status_code, told(client)) == (200, prompt), answer.text
        for choice in (required, named):
            answer = post(client, path, {**body, "tools": tools, "tool_choice": choice})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "tool_choice")
            assert ("left out" in error["message"]) == bool(tools)


@pytest.mark.parametrize(
    ("protocol", "choice"),
    [
        ("chat", {"type": "web_search"}),
        ("chat", {"type": "custom", "custom": {"name": "patch"}}),
        ("chat", {"type": "function", "function": {"name": "patch"}}),
        ("responses", {"type": "file_search"}),
        ("responses", {"type": "mcp", "server_label": "wiki", "name": "read"}),
        ("responses", {"type": "apply_patch"}),
        ("messages", {"type": "tool", "name": "web_fetch"}),
    ],
    ids=str,
)
def test_a_choice_of_a_tool_that_is_left_out_is_refused(http, protocol, choice):
    path, body, function = PROTOCOLS[protocol]
    tools = [function(), *OTHERS[protocol]]
    answer = post(http(), path, {**body, "tools": tools, "tool_choice": choice})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tool_choice")
    assert "left out" in error["message"]


def test_allowed_tools_may_have_others_among_them(http):
    client = http(script=[*CALL.encode(), EOS])
    path, body, function = RESPONSES
    other = {"type": "web_search"}
    for mode, allowed, status in (
        ("auto", [function(), other], 200),
        ("required", [{"type": "mcp", "server_label": "x"}, function()], 200),
        ("auto", [other], 200),
        ("required", [other], 400),
    ):
        choice = {"type": "allowed_tools", "mode": mode, "tools": allowed}
        tools = [function(), function("other"), other]
        answer = post(client, path, {**body, "tools": tools, "tool_choice": choice})
        assert answer.status_code == status, answer.text
        assert "other" not in told(client)


@pytest.mark.parametrize(
    "tool", [5, None, [], {}, {"type": 5}, {"type": "function", "function": 5}]
)
def test_what_is_no_tool_is_named(http, tool):
    for path, body, _ in PROTOCOLS.values():
        answer = post(http(), path, {**body, "tools": [tool]})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("tools.0")


def test_strict_servers_refuse_them(http):
    client = http(strict_fields=True)
    for path, body, function in PROTOCOLS.values():
        answer = post(client, path, {**body, "tools": [{"type": "code_execution_20250825"}]})
        assert answer.json()["error"]["param"] == "tools.code_execution_20250825"
        assert post(client, path, {**body, "tools": [function()]}).status_code == 200


@pytest.mark.parametrize(
    "tool",
    [
        chat_function(),
        responses_function(),
        {"function": {"name": "plan", "parameters": PARAMETERS}},
        {**chat_function(), "type": "function", "strict": None},
        {"name": "plan", "input_schema": PARAMETERS},
    ],
    ids=str,
)
def test_functions_are_taken_in_every_form(http, tool):
    client = http(script=[*CALL.encode(), EOS])
    for path, body, function in (CHAT, RESPONSES):
        prompts = []
        for each in (function(), tool):
            for choice in ("auto", {"type": "function", "name": "plan"}, chat_function()):
                answer = post(client, path, {**body, "tools": [each], "tool_choice": choice})
                assert answer.status_code == 200, answer.text
            prompts.append(told(client))
        assert prompts[0] == prompts[1]


@pytest.mark.parametrize("name", ["a.b", "server/tool", "ns:tool", "x" * 128, "mcp__a-b__c_d"])
def test_names_are_those_that_tool_servers_use(http, name):
    call = json.dumps({"name": name, "arguments": {}})
    client = http(script=[*call.encode(), EOS])
    for protocol, (path, body, function) in PROTOCOLS.items():
        choice = CHOICES[protocol][0]
        whole = {**body, "tools": [function(name)], "tool_choice": choice}
        for key in ("max_tokens", "max_output_tokens"):
            whole |= {key: 300} if key in whole else {}
        assert f'"{name}"' in post(client, path, whole).text


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_of_two_functions_of_one_name_the_first_counts_and_the_other_is_said(http, protocol):
    path, body, function = PROTOCOLS[protocol]
    client = http(script=[*CALL.encode(), EOS])
    told_once = post(client, path, {**body, "tools": [function("x"), function()]})
    prompt = told(client)
    again = {**function(), "description": "another"}
    twice = post(client, path, {**body, "tools": [function("x"), function(), again]})
    assert "x-jaxserve-ignored" not in told_once.headers
    assert twice.status_code == 200, twice.text
    assert "tools.plan (repeated)" in twice.headers["x-jaxserve-ignored"]
    assert told(client) == prompt


@pytest.mark.parametrize("protocol", ["chat", "responses"])
@pytest.mark.parametrize("choice", ["any", {"type": "any"}, {"type": "required"}])
def test_a_call_may_be_demanded_in_the_words_of_other_protocols(http, protocol, choice):
    path, body, function = PROTOCOLS[protocol]
    client = http(script=[*CALL.encode(), EOS])
    answer = post(client, path, {**body, "tools": [function()], "tool_choice": choice})
    assert answer.status_code == 200, answer.text
    assert "Monday" in answer.text
    auto = post(client, path, {**body, "tools": [function()], "tool_choice": {"type": "auto"}})
    assert auto.status_code == 200, auto.text


@pytest.mark.parametrize("parameters", [None, {}, True, {"type": "object", "properties": {}}])
def test_functions_may_have_no_parameters(http, parameters):
    client = http(script=[*b'{"name": "plan", "arguments": {}}', EOS])
    function = {"name": "plan", "parameters": parameters}
    tools = {
        "chat": [{"type": "function", "function": function}, {"function": {"name": "f"}}],
        "responses": [{"type": "function", **function}, {"type": "function", "name": "f"}],
        "messages": [{"name": "plan", "input_schema": parameters}, {"name": "f"}],
    }
    for protocol, (path, body, _) in PROTOCOLS.items():
        for choice in CHOICES[protocol][:2]:
            answer = post(client, path, {**body, "tools": tools[protocol], "tool_choice": choice})
            assert answer.status_code == 200 and "plan" in answer.text, answer.text


def test_a_forced_call_in_a_stream_ends_as_one(http):
    client = http(script=[*CALL.encode(), EOS])
    path, body, function = CHAT
    tools = [function(), {"type": "web_search"}]
    chunks, _ = events(client, path, {**body, "tools": tools, "tool_choice": "required"})
    calls = [
        call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])
    ]
    arguments = "".join(call["function"].get("arguments", "") for call in calls)
    assert json.loads(arguments) == {"day": "Monday"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_tool_with_a_schema_that_no_guide_enforces_does_not_hinder_the_others(http):
    client = http(script=[*CALL.encode(), EOS])
    odd = {"type": "object", "properties": {"to": {"type": "string", "pattern": "^(?=.{3})"}}}
    for strict, status in ((False, 200), (True, 400)):
        mail = {"type": "function", "function": {"name": "m", "parameters": odd, "strict": strict}}
        for choice in ("required", *([chat_function()] if status == 200 else [])):
            body = {**CHAT[1], "tools": [chat_function(), mail], "tool_choice": choice}
            answer = post(client, CHAT[0], body)
            assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == "tools"
    assert "pattern at #/properties/to" in answer.json()["error"]["message"]


PATCH = '*** Begin Patch\n+a "quoted" line\n'
EDIT = {
    "type": "custom",
    "name": "edit",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "***" /.+/'},
}


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "custom", "name": "edit"}])
def test_custom_tools_of_responses_are_called_with_a_text(http, choice):
    """Codex has its patches made by one."""
    call = json.dumps({"name": "edit", "arguments": {"input": PATCH}})
    script = f"<tool_call>\n{call}\n</tool_call>" if choice == "auto" else call
    client = http(script=[*script.encode(), EOS])
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none") as asked:
        wanted = {"model": "", "input": "hi", "tools": [responses_function(), EDIT]}
        made = asked.responses.create(**wanted, tool_choice=choice)
        (item,) = made.output
        assert (item.type, item.name, item.input) == ("custom_tool_call", "edit", PATCH)
        assert made.tools[1].name == "edit" and made.status == "completed"
        prompt = told(client)
        assert "Edits files." in prompt and "start: " in prompt and '"input"' in prompt
        seen = list(asked.responses.create(**wanted, tool_choice=choice, stream=True))
        kinds = [event.type for event in seen]
        assert kinds.count("response.output_item.added") == 1
        assert not any("function_call" in kind for kind in kinds)
        (done,) = [each for each in seen if each.type == "response.custom_tool_call_input.done"]
        texts = [each.delta for each in seen if each.type.endswith("custom_tool_call_input.delta")]
        assert done.input == "".join(texts) == seen[-1].response.output[0].input == PATCH
        assert done.item_id == seen[-1].response.output[0].id


def test_functions_of_a_namespace_are_called_with_it(http):
    """Codex names its MCP servers so."""
    tools = [
        responses_function(),
        {"type": "namespace", "name": "mcp__files", "tools": [responses_function(), EDIT]},
        {"type": "namespace", "name": "mcp__web", "tools": [{"type": "web_search"}]},
    ]
    calls = [("mcp__files.plan", {"day": "Monday"}), ("mcp__files.edit", {"input": PATCH})]
    said = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    script = "".join(f"<tool_call>\n{each}\n</tool_call>" for each in said)
    client = http(script=[*script.encode(), EOS])
    path, body, function = RESPONSES
    wanted = {**body, "tools": tools, "max_output_tokens": 400}
    answer = post(client, path, wanted)
    assert answer.headers["x-jaxserve-ignored"] == "tools.tools.web_search"
    plan, edit = answer.json()["output"]
    assert (plan["type"], plan["name"], plan["namespace"]) == (
        "function_call",
        "plan",
        "mcp__files",
    )
    assert (edit["type"], edit["name"], edit["namespace"], edit["input"]) == (
        "custom_tool_call",
        "edit",
        "mcp__files",
        PATCH,
    )
    assert [each["name"] for each in answer.json()["tools"][1]["tools"]] == ["plan", "edit"]
    result = {"type": "function_call_output", "call_id": plan["call_id"], "output": "done"}
    post(client, path, {**wanted, "input": [HI, plan, result]})
    assert told(client).count('"mcp__files.plan"') == 2 and '"plan"' in told(client)
    client = http(script=[*said[0].encode(), EOS])
    choice = {"type": "function", "name": "plan", "namespace": "mcp__files"}
    made = post(client, path, {**wanted, "tool_choice": choice}).json()
    assert made["output"][0]["namespace"] == "mcp__files"
    twice = post(client, path, {**wanted, "tools": [tools[1], tools[1]]})
    ignored = twice.headers["x-jaxserve-ignored"]
    assert "tools.mcp__files.plan (repeated), tools.mcp__files.edit (repeated)" in ignored


def test_a_text_of_a_custom_tool_that_is_cut_off_is_as_far_as_it_goes(http):
    client = http(script=[*b'{"name": "edit", "arguments": {"input": "abc\\ndef"}}', EOS])
    path, body, _ = RESPONSES
    for most, text in ((44, "abc"), (45, "abc"), (46, "abc\n"), (47, "abc\nd")):
        wanted = {**body, "tools": [EDIT], "tool_choice": "required", "max_output_tokens": most}
        made = post(client, path, wanted).json()
        assert (made["status"], made["output"][0]["input"]) == ("incomplete", text)
