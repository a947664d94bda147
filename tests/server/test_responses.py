"""/v1/responses: what agents send, read and written by the protocol's own client."""

from __future__ import annotations

import httpx
import openai
import pytest
from openai.types import responses as types

from jaxserve.api.errors import RequestError
from jaxserve.server.openai.responses.stored import StoredResponses
from jaxserve.text.chat_template import ChatTemplate
from tests.server.fakes import EOS, FakeTokenizer
from tests.server.keyed import sha

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = {
    "type": "function",
    "name": "add",
    "description": "adds",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}


@pytest.fixture
def client(scripted):
    """Gives a client of a server whose model says a text."""
    clients = []

    def start(says: str | None = None, **config) -> openai.OpenAI:
        served = scripted(script=() if says is None else [*says.encode(), EOS], **config)
        made = openai.OpenAI(base_url=f"{served.server.url}/v1", api_key="none", max_retries=0)
        made.served = served
        clients.append(made)
        return made

    yield start
    for made in clients:
        made.close()


def test_a_text_is_answered_by_a_message(client):
    made = client("Hello there").responses.create(model="", input="hi", max_output_tokens=50)
    assert (made.output_text, made.status, made.incomplete_details) == (
        "Hello there", "completed", None,
    )  # fmt: skip
    (message,) = made.output
    assert message.type == "message" and message.status == "completed"
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    assert made.usage.output_tokens == len("Hello there") + 1
    assert made.id.startswith("resp_") and made.store is False


def test_an_answer_that_is_cut_off_says_so(client):
    made = client("Hello there").responses.create(model="", input="hi", max_output_tokens=5)
    assert (made.status, made.output_text) == ("incomplete", "Hello")
    assert made.incomplete_details.reason == "max_output_tokens"


def test_calls_of_tools_are_items_of_their_own(client):
    made = client("Well: " + CALL).responses.create(model="", input="hi", tools=[ADD])
    message, call = made.output
    assert (message.content[0].text, call.type) == ("Well: ", "function_call")
    assert (call.name, call.arguments, call.status) == ("add", '{"a": 1}', "completed")
    assert call.call_id.startswith("call_")


def test_a_stream_tells_each_step_and_ends_in_the_whole(client):
    asked = client("Well: " + CALL)
    events = list(asked.responses.create(model="", input="hi", tools=[ADD], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if "delta" not in event.type]
    item = ["response.output_item.added", "response.output_item.done"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        item[0],
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        item[1],
        item[0],
        "response.function_call_arguments.done",
        item[1],
        "response.completed",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == "Well: " == events[-1].response.output_text
    assert [part.type for part in events[-1].response.output] == ["message", "function_call"]
    assert isinstance(events[-1], types.ResponseCompletedEvent)
    assert events[-1].response.usage.output_tokens == len("Well: " + CALL) + 1
    assert {event.output_index for event in events if hasattr(event, "output_index")} == {0, 1}


def test_the_clients_own_stream_reads_it(client):
    with client("Well: " + CALL).responses.stream(model="", input="hi", tools=[ADD]) as stream:
        for _ in stream:
            pass
        made = stream.get_final_response()
    assert made.output_text == "Well: " and made.output[1].name == "add"


def test_a_whole_conversation_with_calls_comes_back_as_messages(client):
    asked = client("ok")
    seen = asked.served.engine.submitted
    asked.responses.create(
        model="",
        instructions="Be brief.",
        tools=[ADD],
        input=[
            {"role": "developer", "content": "More."},
            {"role": "user", "content": [{"type": "input_text", "text": "What is 1 + 1?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "two"},
            {
                "type": "message",
                "role": "assistant",
                "id": "msg_1",
                "status": "completed",
                "content": [{"type": "output_text", "text": "It is 2.", "annotations": []}],
            },
            {"role": "user", "content": "Sure?"},
        ],
    )
    prompt = bytes(token for token in seen[0].prompt.tolist() if token < 256).decode()
    told = ["Be brief.", "More.", "What is 1 + 1?", "two", "It is 2.", "Sure?"]
    assert [prompt.index(text) for text in told] == sorted(prompt.index(text) for text in told)


BAD = [
    ({"input": []}, "input"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": "x", "conversation": "conv_1"}, "conversation"),
    ({"input": "x", "background": True}, "background"),
    ({"input": "x", "top_logprobs": 2}, "top_logprobs"),
    ({"input": "x", "tools": [{"type": "function"}]}, "tools.0"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "x", "temperature": -1}, "temperature"),
    ({"input": "x", "model": "gpt-9"}, "model"),
    ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "schema"),
    ({"input": 5}, "input"),
    ({}, "input"),
]


def test_bad_fields_are_refused_by_name(client):
    asked = client("ok")
    url = f"{asked.served.server.url}/v1/responses"
    for body, named in BAD:
        answer = httpx.post(url, json=body)
        assert answer.status_code in (400, 404), (body, answer.text)
        assert named in (answer.json()["error"]["param"] or ""), (body, answer.text)
    assert asked.served.engine.prefill_steps == 0
    answer = httpx.post(url, json={"input": "x", "unheard_of": 1})
    assert (answer.status_code, answer.headers["x-jaxserve-ignored"]) == (200, "unheard_of")


def test_who_has_no_key_gets_nothing(client):
    asked = client("ok", api_key=("token-abc123",))
    with pytest.raises(openai.AuthenticationError):
        asked.responses.create(model="", input="hi")
    with_key = asked.with_options(api_key="token-abc123")
    assert with_key.responses.create(model="", input="hi").output_text == "ok"


class Thinker(FakeTokenizer):
    template = ChatTemplate("<think></think>", {})


def test_reasoning_is_an_item_of_its_own(client):
    asked = client("<think>Hm.</think>\nHi " + CALL, tokenizer=Thinker)
    made = asked.responses.create(model="", input="hi", tools=[ADD])
    reasoning, message, call = made.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Hm.")
    assert (message.content[0].text, call.arguments) == ("Hi ", '{"a": 1}')
    events = list(asked.responses.create(model="", input="hi", tools=[ADD], stream=True))
    thoughts = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
    assert "".join(thoughts) == "Hm."
    for usage in (made.usage, events[-1].response.usage):
        assert usage.output_tokens_details.reasoning_tokens == len("Hm.")
    items = [type(item) for item in events[-1].response.output]
    assert items == [type(item) for item in made.output]
    again = asked.responses.create(model="", input=[*made.output, {"role": "user", "content": "x"}])
    assert again.output_text


def test_a_call_may_be_forced_beside_a_format_and_is_told(client):
    forced = {"type": "function", "name": "add"}
    text = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}
    asked = client('{"name": "add", "arguments": {"a": 1}}')
    made = asked.responses.create(model="", input="hi", tools=[ADD], tool_choice=forced, text=text)
    (call,) = made.output
    assert (call.name, made.tool_choice.name) == ("add", "add")
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [forced]}
    made = asked.responses.create(model="", input="hi", tools=[ADD], tool_choice=allowed)
    assert made.output[0].name == "add" and made.tool_choice.mode == "required"


LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def test_tokens_of_a_message_have_log_probabilities(client):
    asked = client("<think>Hm.</think>\nHi " + CALL, tokenizer=Thinker)
    made = asked.responses.create(model="", input="hi", tools=[ADD], **LOGPROBS)
    (message,) = [item for item in made.output if item.type == "message"]
    tokens = message.content[0].logprobs
    assert [token.token for token in tokens] == list("Hi ")
    assert all(token.logprob <= 0 for token in tokens)
    events = asked.responses.create(model="", input="hi", tools=[ADD], stream=True, **LOGPROBS)
    parts = [e.logprobs for e in events if e.type == "response.output_text.delta"]
    assert [token.token for part in parts for token in part] == list("Hi ")
    without = asked.responses.create(model="", input="hi").output
    assert all(not item.content[0].logprobs for item in without if item.type == "message")


def test_log_probabilities_are_of_the_message_also_where_reasoning_has_its_text(client):
    says = "<think>Say Hi now.</think>\nHi"
    asked = client(says, tokenizer=Thinker)
    expected = [-0.5 - made / 64 for made in range(len(says) - 2, len(says))]
    whole = asked.responses.create(model="", input="hi", **LOGPROBS)
    tokens = whole.output[-1].content[0].logprobs
    events = asked.responses.create(model="", input="hi", stream=True, **LOGPROBS)
    parts = [e.logprobs for e in events if e.type == "response.output_text.delta"]
    assert [token.logprob for token in tokens] == expected
    assert [token.logprob for part in parts for token in part] == expected


# --- stored responses


def prompts_of(asked) -> list[str]:
    """Prompts of the requests so far, as texts."""
    prompts = [request.prompt.tolist() for request in asked.served.engine.submitted]
    return [bytes(token for token in prompt if token < 256).decode() for prompt in prompts]


def test_a_stored_response_is_continued_shown_and_deleted(client):
    asked = client("fine")
    first = asked.responses.create(model="", instructions="Shout.", input="How?", store=True)
    assert first.store is True
    assert asked.responses.retrieve(first.id).output_text == "fine"
    stream = asked.responses.create(
        model="", input="Sure?", previous_response_id=first.id, store=True, stream=True
    )
    second = list(stream)[-1].response
    assert second.previous_response_id == first.id
    seen = prompts_of(asked)
    assert [seen[1].index(text) for text in ("How?", "fine", "Sure?")] == sorted(
        seen[1].index(text) for text in ("How?", "fine", "Sure?")
    )
    assert "Shout." in seen[0] and "Shout." not in seen[1]  # instructions hold for one response
    items = list(asked.responses.input_items.list(second.id))
    assert [item.role for item in items] == ["user", "assistant", "user"]
    assert items[0].content[0].text == "Sure?"
    asked.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="no response"):
        asked.responses.retrieve(first.id)
    third = asked.responses.create(model="", input="So?", previous_response_id=second.id)
    assert third.store is False and "How?" in prompts_of(asked)[2]
    with pytest.raises(openai.NotFoundError, match="previous_response_id"):
        asked.responses.create(model="", input="x", previous_response_id=third.id)


KEYS = f"""
keys:
  - {{name: one, sha256: {sha("a-key")}}}
  - {{name: other, sha256: {sha("r-key")}}}
"""


def test_a_response_is_seen_by_its_own_caller_only(client, key_file):
    asked = client("ok", api_keys=key_file(KEYS))
    one = asked.with_options(api_key="a-key")
    other = asked.with_options(api_key="r-key")
    made = one.responses.create(model="", input="hi", store=True)
    assert one.responses.retrieve(made.id).id == made.id
    for call in ("retrieve", "delete"):
        with pytest.raises(openai.NotFoundError):
            getattr(other.responses, call)(made.id)
    with pytest.raises(openai.NotFoundError):
        list(other.responses.input_items.list(made.id))
    assert one.responses.retrieve(made.id).id == made.id


def test_stored_responses_are_bounded():
    stored = StoredResponses(1000)
    for number in range(20):
        stored.add("", {"id": str(number), "output": []}, [{"content": "x" * 200}])
        assert 0 < stored.bytes <= 1000
    assert stored.get("", "19").response["id"] == "19"
    with pytest.raises(RequestError):
        stored.get("", "0")
    stored.add("", {"id": "large", "output": []}, [{"content": "x" * 2000}])
    with pytest.raises(RequestError):
        stored.get("", "large")
    assert stored.get("", "19")
    for number in range(16, 20):
        stored.delete("", str(number))
    assert stored.bytes == 0
