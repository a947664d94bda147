"""/v1/messages: what agents made for Anthropic's protocol send, by that protocol's own client."""

from __future__ import annotations

import anthropic
import httpx
import pytest

from jaxserve.text.chat_template import ChatTemplate
from tests.server.fakes import EOS, FakeTokenizer
from tests.server.keyed import TWO

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = {
    "name": "add",
    "description": "adds",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
HI = [{"role": "user", "content": "hi"}]


class Thinker(FakeTokenizer):
    template = ChatTemplate("<think></think>", {})


@pytest.fixture
def client(scripted):
    """Gives a client of a server whose model says a text."""
    clients = []

    def start(says: str, key: str = "none", **config) -> anthropic.Anthropic:
        served = scripted(script=[*says.encode(), EOS], **config)
        made = anthropic.Anthropic(base_url=served.server.url, api_key=key, max_retries=0)
        made.served = served
        clients.append(made)
        return made

    yield start
    for made in clients:
        made.close()


def ask(client, **rest):
    return client.messages.create(**{"model": "fake", "max_tokens": 100, "messages": HI, **rest})


def test_a_text_is_answered_by_a_block(client):
    made = ask(client("Hello there"), system="Be brief.")
    assert [block.text for block in made.content] == ["Hello there"]
    assert (made.stop_reason, made.stop_sequence, made.role) == ("end_turn", None, "assistant")
    assert made.usage.output_tokens == len("Hello there") + 1
    assert made.usage.input_tokens == len("<system>Be brief.<user>hi")


def test_it_says_why_it_has_ended(client):
    said = client("Hello there")
    assert ask(said, max_tokens=5).stop_reason == "max_tokens"
    made = ask(said, stop_sequences=["xyz", " th"])
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", " th")
    assert made.content[0].text == "Hello"


def test_calls_of_tools_are_blocks_of_their_own(client):
    made = ask(client("Well: " + CALL + CALL), tools=[ADD], max_tokens=500)
    text, call, other = made.content
    assert (text.text, call.name, call.input, made.stop_reason) == (
        "Well: ", "add", {"a": 1}, "tool_use",
    )  # fmt: skip
    assert call.id.startswith("toolu_") and call.id != other.id


def test_a_stream_becomes_the_same_message(client):
    said = client("<think>Hm.</think>\nWell: " + CALL, tokenizer=Thinker)
    whole = ask(said, tools=[ADD])
    with said.messages.stream(model="fake", max_tokens=100, messages=HI, tools=[ADD]) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    left_out = {"content": {"__all__": {"id"}}, "id": True}
    assert streamed.model_dump(exclude=left_out) == whole.model_dump(exclude=left_out)
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3


def test_a_conversation_with_tools_goes_on(client):
    said = client("It is 1.")
    messages = [
        *HI,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "text", "text": "Well:"},
                {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "1"},
                {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    assert ask(said, messages=messages, tools=[ADD]).content[0].text == "It is 1."
    told = bytes(said.served.engine.submitted[0].prompt.tolist()).decode()
    assert "Hm." not in told
    assert told.endswith("<user><tool_response>\n1\n</tool_response><user>So?")
    assert '<assistant>Well:\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}' in told


def test_a_choice_of_tools_is_heeded(client):
    said = client('{"name": "add", "arguments": {"a": 1}}')
    for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
        made = ask(said, tools=[ADD], tool_choice=choice)
        assert made.content[0].input == {"a": 1} and made.stop_reason == "tool_use"
    with pytest.raises(anthropic.BadRequestError, match="is not among the tools"):
        ask(said, tools=[ADD], tool_choice={"type": "tool", "name": "sub"})


def test_tools_may_have_the_long_names_of_plugins(client):
    named = {**ADD, "name": "mcp__plugin_" + "n" * 116}
    assert ask(client("Hello"), tools=[named]).content[0].text == "Hello"
    with pytest.raises(anthropic.BadRequestError, match="name"):
        ask(client("Hello"), tools=[{**named, "name": named["name"] + "n"}])


def test_tokens_are_counted(client):
    said = client("Hello there")
    counted = said.messages.count_tokens(model="fake", messages=HI, system="Be brief.")
    assert counted.input_tokens == ask(said, system="Be brief.").usage.input_tokens
    assert said.messages.count_tokens(model="fake", messages=HI, tools=[ADD]).input_tokens > 100


def said_by(role, content):
    return {"messages": [{"role": role, "content": content}]}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (said_by("user", [{"type": "image"}]), "messages.0.content.0.type"),
        (said_by("robot", "x"), "messages.0.role"),
        (said_by("user", [{"type": "text"}]), "messages.0.content.0.text"),
        ({"tools": [{"description": "x"}]}, "tools.0"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"messages": []}, "messages"),
    ],
)
def test_what_is_wrong_is_named(client, body, field):
    said = client("x")
    answer = httpx.post(
        f"{said.served.server.url}/v1/messages",
        json={"model": "", "max_tokens": 5, "messages": HI, **body},
    )
    error = answer.json()
    assert (answer.status_code, error["type"], error["error"]["type"]) == (
        400, "error", "invalid_request_error",
    )  # fmt: skip
    assert error["error"]["param"] == field


def test_a_key_may_come_as_anthropics_clients_send_it(client, key_file):
    said = client("Hello", key="a-key", api_keys=key_file(TWO))
    assert ask(said).content[0].text == "Hello"
    with pytest.raises(anthropic.AuthenticationError):
        ask(said.copy(api_key="wrong"))
    with pytest.raises(anthropic.AuthenticationError):
        ask(said.copy(default_headers={"authorization": "Bearer wrong"}))
