"""openai-agents: agents by its default model (responses) and by chats, tools, output types,
streams."""

from __future__ import annotations

from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from check import BASE, KEY, MODEL, call, main
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
QUESTION = "What is the capital of France?"


class City(BaseModel):
    city: Literal["Paris", "Rome"]


@function_tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"18 degrees in {city}"


def agent(kind: type, most: int = 16, choice: str | None = None, **more: Any) -> Agent:
    """An agent whose model is made for each call, for its connections belong to one event loop."""
    client = AsyncOpenAI(base_url=BASE, api_key=KEY, timeout=150)
    settings = ModelSettings(temperature=0, max_tokens=most, tool_choice=choice)
    model = kind(model=MODEL, openai_client=client)
    return Agent("helper", instructions="Be brief.", model=model, model_settings=settings, **more)


async def plain(kind: type) -> None:
    whole = (await Runner.run(agent(kind), QUESTION)).final_output
    stream = Runner.run_streamed(agent(kind), QUESTION)
    deltas = [
        event.data.delta
        async for event in stream.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert whole and "".join(deltas) == stream.final_output == whole


async def output_type(kind: type) -> None:
    made = await Runner.run(agent(kind, 60, output_type=City), QUESTION)
    assert isinstance(made.final_output, City)


async def tools(kind: type) -> None:
    helper = agent(kind, 60, "get_weather", tools=[get_weather])
    made = await Runner.run(helper, QUESTION, max_turns=4)
    assert "tool_call_output_item" in [item.type for item in made.new_items]


async def tools_streamed(kind: type) -> None:
    helper = agent(kind, 60, "required", tools=[get_weather])
    stream = Runner.run_streamed(helper, QUESTION, max_turns=4)
    names = [e.name async for e in stream.stream_events() if e.type == "run_item_stream_event"]
    assert "tool_called" in names and "tool_output" in names


@call
async def responses() -> None:
    await plain(OpenAIResponsesModel)


@call
async def responses_output_type() -> None:
    await output_type(OpenAIResponsesModel)


@call
async def responses_tools() -> None:
    await tools(OpenAIResponsesModel)


@call
async def responses_tools_streamed() -> None:
    await tools_streamed(OpenAIResponsesModel)


@call
async def chats() -> None:
    await plain(OpenAIChatCompletionsModel)


@call
async def chats_output_type() -> None:
    await output_type(OpenAIChatCompletionsModel)


@call
async def chats_tools() -> None:
    await tools(OpenAIChatCompletionsModel)


@call
async def chats_tools_streamed() -> None:
    await tools_streamed(OpenAIChatCompletionsModel)


@call
async def handoffs_are_offered() -> None:
    other = agent(OpenAIResponsesModel, 300)
    other.name = "other"
    helper = agent(OpenAIResponsesModel, 60, "required", handoffs=[other])
    made = await Runner.run(helper, QUESTION, max_turns=3)
    assert made.last_agent.name == "other"


main("openai-agents", "openai")
