"""instructor: objects by tools, JSON schemas and JSON, streamed in parts and several at once."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
from check import BASE, KEY, MODEL, call, main
from pydantic import BaseModel

there = openai.OpenAI(base_url=BASE, api_key=KEY, timeout=150)
ASK: dict[str, Any] = {
    "model": MODEL,
    "temperature": 0,
    "max_tokens": 80,
    "max_retries": 0,
    "messages": [{"role": "user", "content": "Name a city. Answer in JSON."}],
}


class City(BaseModel):
    city: Literal["Paris", "Rome"]


@call
def tools() -> None:
    client = instructor.from_openai(there, mode=instructor.Mode.TOOLS)
    assert isinstance(client.chat.completions.create(**ASK, response_model=City), City)


@call
def tools_strict() -> None:
    client = instructor.from_openai(there, mode=instructor.Mode.TOOLS_STRICT)
    assert isinstance(client.chat.completions.create(**ASK, response_model=City), City)


@call
def json_schema() -> None:
    client = instructor.from_openai(there, mode=instructor.Mode.JSON_SCHEMA)
    assert isinstance(client.chat.completions.create(**ASK, response_model=City), City)


@call
async def tools_async() -> None:
    client = instructor.from_openai(openai.AsyncOpenAI(base_url=BASE, api_key=KEY))
    assert isinstance(await client.chat.completions.create(**ASK, response_model=City), City)


@call
def partial_objects() -> None:
    client = instructor.from_openai(there, mode=instructor.Mode.TOOLS)
    parts = list(client.chat.completions.create_partial(**ASK, response_model=City))
    assert parts[-1].city in ("Paris", "Rome")


@call
def whole_answer_beside_the_object() -> None:
    client = instructor.from_openai(there, mode=instructor.Mode.TOOLS)
    made, answer = client.chat.completions.create_with_completion(**ASK, response_model=City)
    assert made.city and answer.usage.completion_tokens > 0


@call
def responses() -> None:
    client = instructor.from_openai(there, mode=instructor.Mode.RESPONSES_TOOLS)
    ask = {name: value for name, value in ASK.items() if name not in ("max_tokens", "messages")}
    made = client.responses.create(
        **ask, input="Name a city.", max_output_tokens=80, response_model=City
    )
    assert isinstance(made, City)


main("instructor", "openai")
