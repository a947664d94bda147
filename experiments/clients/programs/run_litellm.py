"""LiteLLM: chats, its bridge for Anthropic's protocol, and errors by its own types."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
from check import BASE, KEY, MODEL, call, main

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
HOSTED: dict[str, Any] = {"model": f"hosted_vllm/{MODEL}", "api_base": BASE, "api_key": KEY}
OPENAI: dict[str, Any] = HOSTED | {"model": f"openai/{MODEL}"}
SHORT: dict[str, Any] = {"temperature": 0, "max_tokens": 16}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather", "parameters": CITY},
}
FORCED = {"type": "function", "function": {"name": "get_weather"}}


@call
def chat() -> None:
    for provider in (HOSTED, OPENAI):
        made = litellm.completion(**provider, **SHORT, messages=MESSAGES)
        assert made.choices[0].message.content and made.usage.completion_tokens <= 16


@call
def chat_stream_is_the_same_text() -> None:
    whole = litellm.completion(**HOSTED, **SHORT, messages=MESSAGES).choices[0].message.content
    ask = HOSTED | SHORT | {"stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(**ask, messages=MESSAGES, stream=True))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole
    rebuilt = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert rebuilt.choices[0].message.content == whole and rebuilt.usage.completion_tokens > 0


@call
async def chat_async() -> None:
    asked = (litellm.acompletion(**HOSTED, **SHORT, messages=MESSAGES) for _ in range(3))
    made = await asyncio.gather(*asked)
    assert len({one.choices[0].message.content for one in made}) == 1


@call
def text_completion() -> None:
    ask = HOSTED | SHORT | {"model": f"text-completion-openai/{MODEL}"}
    assert litellm.text_completion(**ask, prompt="The capital of France is").choices[0].text


@call
def tools_and_structured_output() -> None:
    ask = HOSTED | SHORT | {"max_tokens": 60, "messages": MESSAGES}
    made = litellm.completion(**ask, tools=[TOOL], tool_choice=FORCED).choices[0]
    assert json.loads(made.message.tool_calls[0].function.arguments)["city"]
    wanted = {"name": "city", "schema": CITY, "strict": True}
    form = {"type": "json_schema", "json_schema": wanted}
    made = litellm.completion(**ask, response_format=form).choices[0]
    assert json.loads(made.message.content)["city"]


@call
def reasoning_effort() -> None:
    made = litellm.completion(**HOSTED, **SHORT, messages=MESSAGES, reasoning_effort="low")
    assert made.choices[0].message.content


@call
def context_overflow_is_recognised() -> None:
    messages = [{"role": "user", "content": "word " * 20_000}]
    for provider in (HOSTED, OPENAI):
        try:
            litellm.completion(**provider, **SHORT, messages=messages)
        except litellm.ContextWindowExceededError:
            continue
        raise AssertionError("no error")


@call
def a_wrong_model_is_not_found() -> None:
    try:
        litellm.completion(**OPENAI | {"model": "openai/another"}, **SHORT, messages=MESSAGES)
    except litellm.NotFoundError:
        return
    raise AssertionError("no error")


@call
async def anthropic_bridge() -> None:
    ask = OPENAI | {"max_tokens": 16, "temperature": 0}
    made = await litellm.anthropic.messages.acreate(**ask, messages=MESSAGES)
    text = "".join(part["text"] for part in made["content"] if part["type"] == "text")
    assert text and made["usage"]["output_tokens"] > 0


@call
async def anthropic_bridge_streamed() -> None:
    ask = HOSTED | {"max_tokens": 16, "temperature": 0, "stream": True}
    stream = await litellm.anthropic.messages.acreate(**ask, messages=MESSAGES)
    events = b"".join([part async for part in stream]).decode()
    assert "event: content_block_delta" in events and "event: message_stop" in events


@call
async def anthropic_bridge_tools() -> None:
    tool = {"name": "get_weather", "description": "The weather", "input_schema": CITY}
    ask = HOSTED | {"max_tokens": 60, "temperature": 0, "tools": [tool]}
    choice = {"type": "tool", "name": "get_weather"}
    made = await litellm.anthropic.messages.acreate(**ask, messages=MESSAGES, tool_choice=choice)
    (found,) = [part for part in made["content"] if part["type"] == "tool_use"]
    assert found["input"]["city"] in ("Paris", "Rome")


@call
def responses() -> None:
    ask = OPENAI | {"temperature": 0, "max_output_tokens": 16}
    made = litellm.responses(**ask, input="What is the capital of France?")
    assert made.output[0].content[0].text


@call
def responses_streamed() -> None:
    ask = OPENAI | {"temperature": 0, "max_output_tokens": 16, "stream": True}
    kinds = [event.type for event in litellm.responses(**ask, input="Hello")]
    assert "response.output_text.delta" in kinds and kinds[-1] in (
        "response.completed",
        "response.incomplete",
    )


main("litellm")
