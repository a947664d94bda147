"""LiteLLM's proxy in front of the server, which it calls as several of its providers."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

import httpx
from check import BASE, KEY, MODEL, URL, call, main, running_server, scratch
from openai import BadRequestError, OpenAI

PROXY_KEY = f"sk-{secrets.token_hex(16)}"
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
FORCED = {"type": "function", "function": {"name": "get_weather"}}
PROVIDERS = {  # by the model's name at the proxy
    "vllm": f"hosted_vllm/{MODEL}",
    "openai": f"openai/{MODEL}",
    "text": f"text-completion-openai/{MODEL}",
    "claude": f"anthropic/{MODEL}",
}


def configuration() -> str:
    """Writes the proxy's configuration; returns the file's name."""
    models = [
        {
            "model_name": name,
            "litellm_params": {
                "model": model,
                "api_base": URL if name == "claude" else BASE,
                "api_key": KEY,
            },
        }
        for name, model in PROVIDERS.items()
    ]
    file = Path(scratch(), "proxy.yaml")
    file.write_text(json.dumps({"model_list": models}))  # JSON is YAML
    return str(file)


os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "true", "LITELLM_MASTER_KEY": PROXY_KEY}
PROXY = running_server(
    "litellm", "--config", configuration(), "--host", "127.0.0.1", ready="/health/liveliness"
)
client = OpenAI(base_url=f"{PROXY}/v1", api_key=PROXY_KEY, timeout=120, max_retries=0)


def post(path: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"authorization": f"Bearer {PROXY_KEY}"}
    return httpx.post(f"{PROXY}{path}", json=body, headers=headers, timeout=120).raise_for_status()


def ask(model: str, **fields: Any) -> Any:
    given = {"temperature": 0, "max_tokens": 16, "messages": MESSAGES, **fields}
    return client.chat.completions.create(model=model, **given)


@call
def models_are_listed() -> None:
    assert {model.id for model in client.models.list()} == set(PROVIDERS)


@call
def chats_of_all_providers_are_the_same_text() -> None:
    texts = {ask(model).choices[0].message.content for model in ("vllm", "openai", "claude")}
    assert len(texts) == 1 and all(texts)


@call
def streams_have_the_text_and_usage() -> None:
    for model in ("vllm", "openai", "claude"):
        whole = ask(model)
        chunks = list(ask(model, stream=True, stream_options={"include_usage": True}))
        deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(deltas) == whole.choices[0].message.content
        (usage,) = [chunk.usage for chunk in chunks if chunk.usage]
        assert usage.completion_tokens == whole.usage.completion_tokens


@call
def tools_whole_and_streamed() -> None:
    for model in ("vllm", "openai", "claude"):
        wanted: dict[str, Any] = {"tools": [TOOL], "tool_choice": FORCED, "max_tokens": 60}
        message = ask(model, **wanted).choices[0].message
        assert json.loads(message.tool_calls[0].function.arguments)["city"] in ("Paris", "Rome")
        chunks = [chunk for chunk in ask(model, stream=True, **wanted) if chunk.choices]
        calls = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
        assert json.loads("".join(part.function.arguments or "" for part in calls))["city"]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"


@call
def structured_output() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    made = ask("vllm", response_format=form, max_tokens=60).choices[0].message.content
    assert json.loads(made)["city"] in ("Paris", "Rome")


@call
def completions() -> None:
    made = client.completions.create(model="text", prompt="The capital of France is", max_tokens=8)
    assert made.choices[0].text
    chunks = client.completions.create(model="text", prompt="One, two,", max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].text or "" for chunk in chunks if chunk.choices)


@call
def embeddings() -> None:
    for model in ("vllm", "openai"):
        made = client.embeddings.create(model=model, input=["Paris", "Rome"])
        first, second = [entry.embedding for entry in made.data]
        assert len(first) == len(second) > 1 and first != second


@call
def rerank() -> None:
    body = {"model": "vllm", "query": "a city", "documents": ["Paris", "a tree"]}
    made = post("/v1/rerank", body).json()
    assert {entry["index"] for entry in made["results"]} == {0, 1}


@call
def responses() -> None:
    made = client.responses.create(model="openai", input="Hello", max_output_tokens=16)
    assert made.output_text
    events = client.responses.create(
        model="openai", input="Hello", max_output_tokens=16, stream=True
    )
    kinds = [event.type for event in events]
    assert "response.output_text.delta" in kinds


def messages(model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "max_tokens": 16, "temperature": 0, "messages": MESSAGES, **fields}
    return post("/v1/messages", body)


@call
def anthropic_messages() -> None:
    texts = {messages(model).json()["content"][0]["text"] for model in ("vllm", "claude")}
    assert len(texts) == 1 and all(texts)


@call
def anthropic_messages_streamed() -> None:
    for model in ("vllm", "claude"):
        written = messages(model, stream=True).text
        assert "event: content_block_delta" in written and "event: message_stop" in written


@call
def anthropic_tools() -> None:
    tool = {"name": "get_weather", "description": "The weather", "input_schema": CITY}
    choice = {"type": "tool", "name": "get_weather"}
    for model in ("vllm", "claude"):
        made = messages(model, tools=[tool], tool_choice=choice, max_tokens=60).json()
        (found,) = [part for part in made["content"] if part["type"] == "tool_use"]
        assert found["input"]["city"] in ("Paris", "Rome")


@call
def context_overflow_is_an_error_of_the_request() -> None:
    for model in ("vllm", "openai", "claude"):
        try:
            ask(model, messages=[{"role": "user", "content": "word " * 20_000}])
        except BadRequestError as error:
            assert "maximum context length" in str(error)
        else:
            raise AssertionError("no error")


main("litellm")
