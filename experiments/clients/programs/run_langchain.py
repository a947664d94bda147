"""LangChain: ChatOpenAI over chats and over responses, OpenAI's completions, an agent."""

from __future__ import annotations

from typing import Any, Literal

from check import BASE, KEY, MODEL, call, main
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

QUESTION = "What is the capital of France?"
ASK: dict[str, Any] = {"model": MODEL, "base_url": BASE, "api_key": KEY, "temperature": 0}


def chat(most: int = 16, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(**ASK, max_tokens=most, **more)


class City(BaseModel):
    """A city."""

    city: Literal["Paris", "Rome"]


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"18 degrees in {city}"


@call
def invoke() -> None:
    said = chat().invoke([SystemMessage("Be brief."), HumanMessage(QUESTION)])
    assert said.text
    assert said.usage_metadata["output_tokens"] <= 16
    assert said.response_metadata["finish_reason"] in ("stop", "length")


@call
def stream_is_the_same_text() -> None:
    chunks = list(chat(stream_usage=True).stream(QUESTION))
    assert "".join(chunk.text for chunk in chunks) == chat().invoke(QUESTION).text
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    assert total.usage_metadata["output_tokens"] > 0


@call
def batch() -> None:
    made = chat().batch([QUESTION, QUESTION, QUESTION])
    assert len({said.text for said in made}) == 1


@call
async def invoke_and_stream_async() -> None:
    said = await chat().ainvoke(QUESTION)
    parts = [chunk.text async for chunk in chat().astream(QUESTION)]
    assert "".join(parts) == said.text


@call
def logprobs() -> None:
    said = chat(logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert len(said.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2


@call
def structured_output_by_each_method() -> None:
    for method in ("json_schema", "function_calling"):
        bound = chat(60).with_structured_output(City, method=method)
        assert isinstance(bound.invoke(QUESTION), City), method


@call
def tools_and_their_results() -> None:
    bound = chat(60).bind_tools([get_weather], tool_choice="get_weather")
    said = bound.invoke(QUESTION)
    (found,) = said.tool_calls
    assert found["args"]["city"] in ("Paris", "Rome")
    result = ToolMessage(get_weather.invoke(found["args"]), tool_call_id=found["id"])
    again = chat().bind_tools([get_weather]).invoke([HumanMessage(QUESTION), said, result])
    assert isinstance(again, AIMessage)


@call
def tools_streamed() -> None:
    bound = chat(60).bind_tools([get_weather], tool_choice="any")
    chunks = list(bound.stream(QUESTION))
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    assert total.tool_calls[0]["args"]["city"] in ("Paris", "Rome")


@call
def agent() -> None:
    made = create_agent(chat(40), [get_weather])
    said = made.invoke({"messages": [("user", QUESTION)]}, {"recursion_limit": 6})
    assert len(said["messages"]) >= 2


@call
def agent_with_tools_and_an_output_schema() -> None:
    form = ProviderStrategy(City)
    made = create_agent(chat(60), [get_weather], response_format=form)
    said = made.invoke({"messages": [("user", QUESTION)]}, {"recursion_limit": 8})
    assert isinstance(said["structured_response"], City)


@call
def completions() -> None:
    model = OpenAI(**ASK, max_tokens=16)
    assert "".join(model.stream("Once upon")) == model.invoke("Once upon")


@call
def responses() -> None:
    model = chat(use_responses_api=True)
    said = model.invoke(QUESTION)
    assert said.text
    assert "".join(chunk.text for chunk in model.stream(QUESTION)) == said.text


@call
def responses_tools_and_structured_output() -> None:
    model = chat(60, use_responses_api=True)
    (found,) = (
        model.bind_tools([get_weather], tool_choice="get_weather").invoke(QUESTION).tool_calls
    )
    assert found["args"]["city"] in ("Paris", "Rome")
    bound = model.with_structured_output(City, method="json_schema")
    assert isinstance(bound.invoke(QUESTION), City)


@call
def reasoning_effort() -> None:
    assert chat(reasoning_effort="low").invoke(QUESTION).text


main("langchain", "langchain-openai", "openai")
