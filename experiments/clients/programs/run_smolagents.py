"""smolagents: its model for OpenAI servers, whole and streamed, tools, and its two agents."""

from __future__ import annotations

from typing import Any

from check import BASE, KEY, MODEL, call, main
from smolagents import ChatMessage, CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

MESSAGES = [ChatMessage(role="user", content=[{"type": "text", "text": "Name a city."}])]


@tool
def get_weather(city: str) -> str:
    """Tells the weather of a city.

    Args:
        city: its name
    """
    return f"18 degrees in {city}"


def model(most: int = 16, **more: Any) -> OpenAIServerModel:
    ask = {"api_base": BASE, "api_key": KEY, "temperature": 0, "max_tokens": most}
    return OpenAIServerModel(MODEL, **ask, **more)


@call
def stream_is_the_same_text() -> None:
    whole = model().generate(MESSAGES)
    parts = [part.content or "" for part in model().generate_stream(MESSAGES)]
    assert whole.content and "".join(parts) == whole.content
    assert whole.token_usage.output_tokens <= 16


@call
def stop_sequences() -> None:
    whole = model().generate(MESSAGES).content
    stop = whole.split()[-1]
    assert stop not in model().generate(MESSAGES, stop_sequences=[stop]).content


@call
def tool_is_called() -> None:
    said = model(80).generate(MESSAGES, tools_to_call_from=[get_weather])
    assert said.tool_calls[0].function.name == "get_weather"


@call
def structured_output() -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    wanted = {"name": "city", "schema": schema, "strict": True}
    form = {"type": "json_schema", "json_schema": wanted}
    assert "city" in model(40).generate(MESSAGES, response_format=form).content


@call
def agents_go_through_their_steps() -> None:
    for kind in (ToolCallingAgent, CodeAgent):
        agent = kind(tools=[get_weather], model=model(40), max_steps=2, verbosity_level=0)
        assert agent.run("What is the weather in Paris?") is not None
        errors = [step.error for step in agent.memory.steps if getattr(step, "error", None)]
        assert not any("generating" in str(type(error)).lower() for error in errors), errors


main("smolagents", "openai")
