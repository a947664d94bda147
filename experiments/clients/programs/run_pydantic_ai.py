"""pydantic-ai: agents over chats and over responses, outputs by tools and by schemas, streams."""

from __future__ import annotations

from typing import Any, Literal

from check import BASE, KEY, MODEL, call, main
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

PROVIDER = OpenAIProvider(base_url=BASE, api_key=KEY)
CHATS = OpenAIChatModel(MODEL, provider=PROVIDER)
RESPONSES = OpenAIResponsesModel(MODEL, provider=PROVIDER)
QUESTION = "What is the capital of France?"


class City(BaseModel):
    """A city."""

    city: Literal["Paris", "Rome"]


def agent(model: Any, most: int = 16, **more: Any) -> Agent[None, Any]:
    settings = {"temperature": 0, "max_tokens": most, **more.pop("settings", {})}
    return Agent(model, model_settings=settings, **more)


@call
def plain() -> None:
    made = agent(CHATS, system_prompt="Be brief.").run_sync(QUESTION)
    assert made.output and made.usage.output_tokens <= 16


@call
async def stream_is_the_same_text() -> None:
    whole = await agent(CHATS).run(QUESTION)
    async with agent(CHATS).run_stream(QUESTION) as stream:
        parts = [part async for part in stream.stream_text(delta=True)]
    assert "".join(parts) == whole.output


@call
def output_by_a_tool_and_by_a_schema() -> None:
    for kind in (ToolOutput(City), NativeOutput(City)):
        assert isinstance(agent(CHATS, 60, output_type=kind).run_sync(QUESTION).output, City)


@call
async def output_streamed() -> None:
    async with agent(CHATS, 60, output_type=City).run_stream(QUESTION) as stream:
        made = [part async for part in stream.stream_output()]
    assert made[-1].city in ("Paris", "Rome")


@call
def history_goes_on() -> None:
    first = agent(CHATS).run_sync(QUESTION)
    again = agent(CHATS).run_sync("And of Italy?", message_history=first.all_messages())
    assert len(again.all_messages()) == 4


@call
def thinking_and_extra_body() -> None:
    settings = {"openai_reasoning_effort": "low", "seed": 3, "extra_body": {"top_k": 3}}
    assert agent(CHATS, settings=settings).run_sync(QUESTION).output


@call
def responses() -> None:
    assert agent(RESPONSES).run_sync(QUESTION).output
    for kind in (ToolOutput(City), NativeOutput(City)):
        assert isinstance(agent(RESPONSES, 60, output_type=kind).run_sync(QUESTION).output, City)


@call
async def responses_stream_is_the_same_text() -> None:
    whole = await agent(RESPONSES).run(QUESTION)
    async with agent(RESPONSES).run_stream(QUESTION) as stream:
        parts = [part async for part in stream.stream_text(delta=True)]
    assert "".join(parts) == whole.output


main("pydantic-ai-slim", "openai")
