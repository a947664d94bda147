"""LlamaIndex: OpenAILike (complete, chat, streams, tools, structured output, an agent), and
OpenAIResponses."""

from typing import Any, Literal

from check import BASE, KEY, MODEL, call, main
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai import OpenAIResponses
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

QUESTION = "What is the capital of France?"
MESSAGES = [ChatMessage(role="user", content=QUESTION)]


class City(BaseModel):
    """A city."""

    city: Literal["Paris", "Rome"]


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"18 degrees in {city}"


def model(most: int = 16, **more: Any) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=BASE,
        api_key=KEY,
        temperature=0,
        max_tokens=most,
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=4096,
        **more,
    )


@call
def chat_stream_is_the_same_text() -> None:
    whole = model().chat(MESSAGES).message.content
    parts = [part.delta for part in model().stream_chat(MESSAGES)]
    assert whole and "".join(part or "" for part in parts) == whole


@call
def complete_stream_is_the_same_text() -> None:
    texts = OpenAILike(
        model=MODEL, api_base=BASE, api_key=KEY, temperature=0, max_tokens=16, is_chat_model=False
    )
    whole = texts.complete("Once upon").text
    assert whole and "".join(part.delta for part in texts.stream_complete("Once upon")) == whole


@call
async def chat_async() -> None:
    whole = (await model().achat(MESSAGES)).message.content
    stream = await model().astream_chat(MESSAGES)
    assert "".join([part.delta or "" async for part in stream]) == whole


@call
def tools() -> None:
    weather = FunctionTool.from_defaults(get_weather)
    said = model(60).chat_with_tools([weather], user_msg=QUESTION, tool_required=True)
    (found,) = model().get_tool_calls_from_response(said)
    assert found.tool_kwargs["city"] in ("Paris", "Rome")


@call
def structured_output() -> None:
    there = model(60, should_use_structured_outputs=True)
    assert isinstance(there.structured_predict(City, PromptTemplate(QUESTION)), City)


@call
async def agent() -> None:
    made = FunctionAgent(tools=[get_weather], llm=model(40), system_prompt="Be brief.")
    said = await made.run(QUESTION, max_iterations=3)
    assert str(said) is not None


@call
def responses() -> None:
    there = OpenAIResponses(
        model=MODEL,
        api_base=BASE,
        api_key=KEY,
        temperature=0,
        max_output_tokens=16,
        context_window=4096,
    )
    whole = there.chat(MESSAGES).message.content
    assert whole
    assert "".join(part.delta or "" for part in there.stream_chat(MESSAGES)) == whole


main("llama-index-core", "llama-index-llms-openai-like", "llama-index-llms-openai")
