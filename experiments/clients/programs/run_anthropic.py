"""The anthropic package: /v1/messages, streams, tools and counted tokens."""

from __future__ import annotations

from typing import Any

import anthropic
from check import KEY, MODEL, URL, call, main

client = anthropic.Anthropic(base_url=URL, api_key=KEY, timeout=150)
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0}  # the package has no argument for it, the protocol a field
ASK: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 16,
    "messages": FRANCE,
    "extra_body": GREEDY,
}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "get_weather", "description": "The weather", "input_schema": CITY}
FORCED = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}}


def text_of(message: Any) -> str:
    return "".join(part.text for part in message.content if part.type == "text")


def prompt_tokens(message: Any) -> int:
    """All tokens of its prompt: input_tokens are those that were not cached."""
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


@call
def message() -> None:
    made = client.messages.create(**ASK)
    assert made.role == "assistant" and made.type == "message"
    assert text_of(made)
    assert made.stop_reason in ("end_turn", "max_tokens")
    assert 0 < made.usage.output_tokens <= 16 and prompt_tokens(made) > 5


@call
def message_of_system_and_parts() -> None:
    parts = [{"type": "text", "text": "What is the capital of France?"}]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    ask = ASK | {"messages": [{"role": "user", "content": parts}]}
    assert text_of(client.messages.create(**ask, system=system))
    assert text_of(client.messages.create(**ask, system="Be brief."))


@call
def stream_is_the_same_text() -> None:
    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(whole) == text_of(final)
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


@call
def events_come_in_the_order_of_the_protocol() -> None:
    kinds = [event.type for event in client.messages.create(**ASK, stream=True)]
    kinds = [kind for kind in kinds if kind != "ping"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


@call
async def message_async() -> None:
    async with anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, timeout=150) as there:
        assert text_of(await there.messages.create(**ASK))


@call
def stop_sequence_is_told() -> None:
    whole = text_of(client.messages.create(**ASK))
    stop = whole.split()[-2]
    made = client.messages.create(**ASK, stop_sequences=[stop])
    assert made.stop_reason == "stop_sequence" and made.stop_sequence == stop
    assert stop not in text_of(made)


@call
def tool_is_called() -> None:
    ask = ASK | {"max_tokens": 60, **FORCED}
    for choice in ({"type": "any"}, FORCED["tool_choice"]):
        made = client.messages.create(**ask | {"tool_choice": choice})
        (found,) = [part for part in made.content if part.type == "tool_use"]
        assert made.stop_reason == "tool_use"
        assert found.name == "get_weather" and found.input["city"] in ("Paris", "Rome")


@call
def tool_streamed_is_the_same_call() -> None:
    ask = ASK | {"max_tokens": 60, **FORCED}
    (whole,) = [part for part in client.messages.create(**ask).content if part.type == "tool_use"]
    with client.messages.stream(**ask) as stream:
        final = stream.get_final_message()
    (found,) = [part for part in final.content if part.type == "tool_use"]
    assert found.input == whole.input and final.stop_reason == "tool_use"


@call
def tool_results_go_back() -> None:
    ask = ASK | {"max_tokens": 60, **FORCED}
    said = client.messages.create(**ask)
    (found,) = [part for part in said.content if part.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": found.id, "content": "18 degrees"}
    messages = [
        *FRANCE,
        {"role": "assistant", "content": said.content},
        {"role": "user", "content": [result]},
    ]
    made = client.messages.create(**ASK | {"messages": messages}, tools=[TOOL])
    assert prompt_tokens(made) > prompt_tokens(said)


@call
def tokens_are_counted_as_they_are_used() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=FRANCE)
    assert counted.input_tokens == prompt_tokens(client.messages.create(**ASK))
    with_tools = client.messages.count_tokens(model=MODEL, messages=FRANCE, tools=[TOOL])
    assert with_tools.input_tokens > counted.input_tokens


@call
def thinking_and_metadata_are_taken() -> None:
    made = client.messages.create(**ASK, thinking={"type": "disabled"}, metadata={"user_id": "me"})
    assert text_of(made)


@call
def errors_are_of_the_clients_types() -> None:
    for error, change in (
        (anthropic.NotFoundError, {"model": "claude-x"}),
        (anthropic.BadRequestError, {"max_tokens": 0}),
        (anthropic.BadRequestError, {"messages": []}),
        (anthropic.BadRequestError, {"messages": [{"role": "user", "content": "word " * 20_000}]}),
    ):
        try:
            client.messages.create(**ASK | change)
        except error as found:
            assert found.body["type"] == "error" and found.body["error"]["message"]
        else:
            raise AssertionError(f"no error for {str(change)[:80]}")


main("anthropic")
