"""The openai package for Python: completions, chats, responses, streams, tools, errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
from check import BASE, KEY, MODEL, call, main
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=BASE, api_key=KEY, timeout=150)
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 16}
CHAT = GREEDY | {"messages": FRANCE}
TEXT = GREEDY | {"prompt": "The capital of France is"}
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
FLAT = {"type": "function", **TOOL["function"], "strict": True}


class Answer(BaseModel):
    city: Literal["Paris", "Rome"]
    people: int = Field(ge=0, le=99)


def streamed(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@call
def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


@call
def completion() -> None:
    made = client.completions.create(**TEXT)
    assert made.choices[0].text
    assert made.usage.prompt_tokens > 3
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
    assert made.choices[0].finish_reason in ("length", "stop")


@call
def completion_stream_is_the_same_text() -> None:
    whole = client.completions.create(**TEXT).choices[0].text
    chunks = list(client.completions.create(**TEXT, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole
    assert chunks[-1].choices[0].finish_reason


@call
def completion_of_token_ids_and_of_several_prompts() -> None:
    one = client.completions.create(**GREEDY, prompt=[1, 100, 200])
    many = client.completions.create(**GREEDY, prompt=[[1, 100, 200], [1, 300]])
    assert many.choices[0].text == one.choices[0].text
    assert [choice.index for choice in many.choices] == [0, 1]


@call
def completion_logprobs_and_echo() -> None:
    found = client.completions.create(**TEXT, logprobs=2).choices[0]
    assert len(found.logprobs.tokens) == len(found.logprobs.token_logprobs)
    assert all(len(top) >= 2 for top in found.logprobs.top_logprobs)
    assert "".join(found.logprobs.tokens) == found.text
    echoed = client.completions.create(**TEXT, echo=True, logprobs=1).choices[0]
    assert echoed.text == TEXT["prompt"] + found.text
    assert echoed.logprobs.token_logprobs[0] is None


@call
def completion_stop_is_left_out() -> None:
    whole = client.completions.create(**TEXT).choices[0].text
    stop = whole.split()[-2]
    cut = client.completions.create(**TEXT, stop=[stop]).choices[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"


@call
def completion_n_and_best_of() -> None:
    ask = TEXT | {"temperature": 1.0, "n": 2}
    assert len(client.completions.create(**ask, best_of=2).choices) == 2


@call
def chat() -> None:
    made = client.chat.completions.create(**CHAT)
    message = made.choices[0].message
    assert message.role == "assistant"
    assert message.content
    assert made.object == "chat.completion"
    assert made.usage.completion_tokens <= 16


@call
def chat_stream_is_the_same_text() -> None:
    whole = client.chat.completions.create(**CHAT)
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options=options))
    assert streamed(chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert not chunks[-1].choices


@call
async def chat_async_many_at_once() -> None:
    whole = client.chat.completions.create(**CHAT).choices[0].message.content
    async with openai.AsyncOpenAI(base_url=BASE, api_key=KEY, timeout=150) as there:
        asked = (there.chat.completions.create(**CHAT) for _ in range(8))
        made = await asyncio.gather(*asked)
        stream = await there.chat.completions.create(**CHAT, stream=True)
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert {one.choices[0].message.content for one in made} == {whole}
    assert "".join(parts) == whole


@call
def chat_stream_helper() -> None:
    with client.chat.completions.stream(**CHAT) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in kinds and "content.done" in kinds
    assert final.choices[0].message.content


@call
def chat_max_completion_tokens() -> None:
    ask = {name: value for name, value in CHAT.items() if name != "max_tokens"}
    made = client.chat.completions.create(**ask, max_completion_tokens=3)
    assert made.usage.completion_tokens == 3
    assert made.choices[0].finish_reason == "length"


@call
def chat_seed_repeats_and_n_differ() -> None:
    ask = CHAT | {"temperature": 1.0, "n": 3, "seed": 7}
    first, second = (client.chat.completions.create(**ask) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) > 1


@call
def chat_logprobs() -> None:
    made = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3)
    tokens = made.choices[0].logprobs.content
    assert len(tokens) == made.usage.completion_tokens
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in tokens)
    text = b"".join(bytes(token.bytes or ()) for token in tokens).decode(errors="replace")
    assert text.startswith(made.choices[0].message.content)


@call
def chat_roles_and_parts() -> None:
    parts = [{"type": "text", "text": "What is the capital "}, {"type": "text", "text": "of it?"}]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "name": "ann", "content": "France."},
        {"role": "assistant", "content": [{"type": "text", "text": "Yes?"}]},
        {"role": "user", "content": parts},
    ]
    made = client.chat.completions.create(**GREEDY, messages=messages)
    assert made.choices[0].message.content is not None


@call
def chat_biased_to_one_token() -> None:
    made = client.completions.create(**TEXT, logit_bias={"300": 100})
    assert len(set(made.choices[0].text.split())) <= 2


@call
def tools_required_and_named() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        ask = CHAT | {"tools": [TOOL], "tool_choice": choice, "max_tokens": 60}
        made = client.chat.completions.create(**ask).choices[0]
        found = made.message.tool_calls[0]
        assert made.finish_reason == "tool_calls"
        assert found.function.name == "get_weather"
        assert json.loads(found.function.arguments)["city"] in ("Paris", "Rome")
        assert found.id and not made.message.content


@call
def tools_streamed_are_the_same_call() -> None:
    ask = CHAT | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}
    whole = client.chat.completions.create(**ask).choices[0].message.tool_calls
    with client.chat.completions.stream(**ask) as stream:
        list(stream)
        final = stream.get_final_completion().choices[0]
    assert final.message.tool_calls[0].function.arguments == whole[0].function.arguments
    assert len(final.message.tool_calls) == len(whole)
    assert final.finish_reason == "tool_calls"


@call
def tools_not_called_and_auto() -> None:
    made = client.chat.completions.create(**CHAT, tools=[TOOL], tool_choice="none")
    assert made.choices[0].message.tool_calls is None
    made = client.chat.completions.create(**CHAT, tools=[TOOL], tool_choice="auto")
    assert made.choices[0].message.content is not None or made.choices[0].message.tool_calls


@call
def tools_allowed_ones_and_not_in_parallel() -> None:
    name = {"type": "function", "function": {"name": "get_weather"}}
    allowed = {"mode": "required", "tools": [name]}
    other = {"type": "function", "function": {"name": "other", "parameters": CITY}}
    ask = CHAT | {"tools": [other, TOOL], "max_tokens": 60, "parallel_tool_calls": False}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    made = client.chat.completions.create(**ask, tool_choice=choice)
    names = [found.function.name for found in made.choices[0].message.tool_calls]
    assert names == ["get_weather"]


@call
def tool_results_go_back() -> None:
    ask = CHAT | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}
    said = client.chat.completions.create(**ask).choices[0].message
    result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "18 degrees"}
    messages = [*FRANCE, said.model_dump(exclude_none=True), result]
    made = client.chat.completions.create(**GREEDY, tools=[TOOL], messages=messages)
    assert made.usage.prompt_tokens > 60


@call
def old_functions() -> None:
    ask = CHAT | {"functions": [TOOL["function"]], "max_tokens": 60}
    made = client.chat.completions.create(**ask, function_call={"name": "get_weather"})
    assert json.loads(made.choices[0].message.function_call.arguments)["city"]


@call
def structured_output() -> None:
    ask = CHAT | {"max_tokens": 60}
    made = client.chat.completions.parse(**ask, response_format=Answer)
    assert isinstance(made.choices[0].message.parsed, Answer)
    with client.chat.completions.stream(**ask, response_format=Answer) as stream:
        list(stream)
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert parsed == made.choices[0].message.parsed


@call
def structured_output_beside_a_forced_call() -> None:
    made = client.chat.completions.parse(
        **CHAT | {"max_tokens": 60},
        response_format=Answer,
        tools=[TOOL | {"function": TOOL["function"] | {"strict": True}}],
        tool_choice="required",
    )
    assert made.choices[0].message.tool_calls[0].function.parsed_arguments["city"]


@call
def structured_output_beside_offered_tools() -> None:
    ask = CHAT | {"max_tokens": 80, "tools": [TOOL], "tool_choice": "auto"}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY, "strict": True}}
    said = client.chat.completions.create(**ask, response_format=form).choices[0].message
    assert said.tool_calls or json.loads(said.content)["city"] in ("Paris", "Rome")


@call
def structured_output_json_object() -> None:
    ask = CHAT | {"max_tokens": 200, "response_format": {"type": "json_object"}}
    made = client.chat.completions.create(**ask).choices[0]
    assert made.message.content.lstrip().startswith("{")
    if made.finish_reason == "stop":
        json.loads(made.message.content)


@call
def structured_output_of_vllm() -> None:
    body = {"structured_outputs": {"choice": ["Paris", "Rome"]}}
    made = client.chat.completions.create(**CHAT, extra_body=body)
    assert made.choices[0].message.content in ("Paris", "Rome")


@call
def extra_body_of_vllm() -> None:
    body = {"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2}
    body |= {"ignore_eos": True, "skip_special_tokens": True, "return_token_ids": True}
    made = client.chat.completions.create(**CHAT, extra_body=body)
    assert made.usage.completion_tokens == 16
    assert len(made.choices[0].model_extra["token_ids"]) == 16
    assert len(made.model_extra["prompt_token_ids"]) == made.usage.prompt_tokens


@call
def fields_that_ask_for_nothing() -> None:
    body = {
        "reasoning_effort": "low",
        "verbosity": "low",
        "prediction": None,
        "modalities": ["text"],
        "prompt_cache_key": "a",
        "prompt_cache_retention": "24h",
        "service_tier": "auto",
        "store": False,
        "safety_identifier": "b",
        "metadata": {"a": "b"},
        "user": "me",
        "functions": [],
        "stop": "",
        "top_logprobs": 0,
        "add_generation_prompt": True,
        "unheard_of": 1,
    }
    assert client.chat.completions.create(**CHAT, extra_body=body).choices
    assert client.completions.create(**TEXT, extra_body={"echo": False, "best_of": 1}).choices


@call
def request_ids_come_back() -> None:
    headers = {"X-Request-Id": "mine-17"}
    made = client.chat.completions.with_raw_response.create(**CHAT, extra_headers=headers)
    assert made.headers["x-request-id"] == "mine-17"
    assert made.parse()._request_id == "mine-17"


@call
def stream_closed_early_frees_the_server() -> None:
    ask = TEXT | {"max_tokens": 2000}
    with client.completions.create(**ask, stream=True, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
    assert client.chat.completions.create(**CHAT).choices


@call
def error_of_a_wrong_model() -> None:
    try:
        client.chat.completions.create(**CHAT | {"model": "gpt-5"})
    except openai.NotFoundError as error:
        assert error.code == "model_not_found" and "gpt-5" in error.message
    else:
        raise AssertionError("no error")


@call
def errors_of_wrong_fields() -> None:
    for change in ({"temperature": -1}, {"max_tokens": 0}, {"top_p": -1}, {"n": 0}):
        try:
            client.chat.completions.create(**CHAT | change)
        except openai.BadRequestError as error:
            (name,) = change
            assert error.param == name and name in error.message
        else:
            raise AssertionError(f"no error for {change}")


@call
def error_of_a_prompt_that_is_too_long() -> None:
    try:
        client.completions.create(**GREEDY, prompt=[5] * 100_000)
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded"
        assert "maximum context length" in error.message
    else:
        raise AssertionError("no error")


@call
def embeddings() -> None:
    texts = ["a river", "a stream of water"]
    made = client.embeddings.create(model=MODEL, input=texts)
    assert [one.index for one in made.data] == [0, 1] and made.usage.total_tokens > 0
    (again,) = client.embeddings.create(model=MODEL, input=texts[0], encoding_format="float").data
    assert len(again.embedding) == len(made.data[0].embedding)
    for one, other in zip(again.embedding, made.data[0].embedding):
        assert abs(one - other) < 1e-3, (one, other)


RESPONSE: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 16}


@call
def response() -> None:
    made = client.responses.create(**RESPONSE, input="What is the capital of France?")
    assert made.output_text
    assert made.status in ("completed", "incomplete")
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens


@call
def response_is_the_same_as_the_chat() -> None:
    made = client.responses.create(**RESPONSE, input=FRANCE)
    assert made.output_text == client.chat.completions.create(**CHAT).choices[0].message.content


@call
def response_stream_is_the_same_text() -> None:
    whole = client.responses.create(**RESPONSE, input="Hello")
    events = list(client.responses.create(**RESPONSE, input="Hello", stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert events[-1].response.output_text == whole.output_text


@call
def response_instructions_and_history() -> None:
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": "I am Ann."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hello Ann."}]},
        {"type": "message", "role": "user", "content": "Who am I?"},
    ]
    made = client.responses.create(**RESPONSE, instructions="Be brief.", input=history)
    assert made.output_text and made.instructions == "Be brief."


@call
def response_tools() -> None:
    ask = RESPONSE | {"max_output_tokens": 60, "tools": [FLAT], "input": "Weather in Paris?"}
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        made = client.responses.create(**ask, tool_choice=choice)
        (found,) = [item for item in made.output if item.type == "function_call"]
        assert json.loads(found.arguments)["city"] in ("Paris", "Rome")
    result = {"type": "function_call_output", "call_id": found.call_id, "output": "18 degrees"}
    asked = [{"role": "user", "content": "Weather in Paris?"}, *made.output, result]
    again = client.responses.create(**RESPONSE, tools=[FLAT], input=asked)
    assert again.output


@call
def response_repeats_what_was_asked_for() -> None:
    ask = RESPONSE | {"max_output_tokens": 60, "tools": [FLAT], "tool_choice": "required"}
    made = client.responses.create(**ask, input="Weather in Paris?", top_p=0.5, metadata={"a": "b"})
    assert made.tool_choice == "required" and made.top_p == 0.5 and made.temperature == 0
    assert made.tools[0].name == "get_weather" and made.max_output_tokens == 60


@call
def response_tools_streamed() -> None:
    ask = RESPONSE | {"max_output_tokens": 60, "tools": [FLAT], "tool_choice": "required"}
    events = list(client.responses.create(**ask, input="Weather in Paris?", stream=True))
    kinds = [event.type for event in events]
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == done.arguments
    assert "response.output_item.added" in kinds and "response.output_item.done" in kinds


@call
def response_structured_output() -> None:
    ask = RESPONSE | {"max_output_tokens": 60, "input": "Which city?"}
    assert isinstance(client.responses.parse(**ask, text_format=Answer).output_parsed, Answer)
    with client.responses.stream(**ask, text_format=Answer) as stream:
        list(stream)
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Answer)


@call
def response_reasoning_and_store_false() -> None:
    made = client.responses.create(
        **RESPONSE,
        input="Hello",
        store=False,
        reasoning={"effort": "low", "summary": "auto"},
        include=["reasoning.encrypted_content"],
        truncation="disabled",
        text={"verbosity": "low"},
        parallel_tool_calls=True,
        metadata={"a": "b"},
    )
    assert made.output_text and made.metadata == {"a": "b"}


@call
def response_of_a_stored_one_is_refused_clearly() -> None:
    try:
        client.responses.create(**RESPONSE, input="Hello", previous_response_id="resp_1")
    except openai.APIStatusError as error:
        assert error.status_code in (400, 404) and "previous_response_id" in error.message
    else:
        raise AssertionError("no error")


main("openai", "pydantic")
