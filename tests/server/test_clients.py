"""Clients that others wrote, against a server with the real model: what they get is what the
reference implementation says."""

import asyncio
import json
import pathlib
import re
import shutil
import subprocess
import sys

import grpc
import httpx
import numpy as np
import openai
import pydantic
import pytest
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from jaxserve.llm import open_engine
from jaxserve.server.supervisor import Background
from jaxserve.settings.options import make
from jaxserve.settings.schema import EngineConfig, ServerConfig
from tests.waiting import eventually

SETTINGS = {
    "max_model_len": 1024,
    "chunk_tokens": 128,
    "max_seqs": 8,
    "pages": 400,
    "profile": "none",
}
PROTO = pathlib.Path(__file__).parents[2] / "server" / "jaxserve.proto"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}},
                "required": ["city"],
            },
        },
    }
]


WHOLE = "smollm2-135m"


@pytest.fixture(
    scope="module", params=["first layers", pytest.param("whole", marks=pytest.mark.matrix)]
)
def model(request) -> str:
    """The real model, which says what it should, or its first layers, which are compiled soon."""
    return (
        WHOLE if request.param == "whole" else str(request.getfixturevalue("smollm2_first_layers"))
    )


@pytest.fixture(scope="module")
def server(model):
    config = make(EngineConfig, {"model": model, **SETTINGS})
    with Background(
        ServerConfig(grpc_port=0, port=0),
        lambda: open_engine(config, progress=False, warm_up=False),
    ) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def brief(model, server) -> dict:
    """Fields by which the first layers come to an end of JSON: no blanks, which they like best."""
    if model == WHOLE:
        return {}
    tokenizer = server.server.frontend.tokenizer
    blanks = [id for id in range(tokenizer.vocab) if tokenizer.decode([id]).isspace()]
    return {"logit_bias": {str(id): -100 for id in blanks}}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        yield client


@pytest.fixture(scope="module")
def case(golden, golden_first_layers, model, server):
    """A prompt with what follows it in the reference implementation; special tokens are no text
    here."""
    right = golden if model == WHOLE else golden_first_layers
    found = min(
        (case for case in right["cases"] if case.get("prompt")),
        key=lambda case: len(case["prompt_ids"]),
    )
    return {**found, "text": server.server.frontend.tokenizer.decode(found["output_ids"])}


def test_openai_embeddings_are_the_states_from_which_the_reference_goes_on(
    client, case, model, server
):
    """The model's head makes the reference's first token and its log-probability of them."""
    stages = server.server.frontend.replica.worker.stages
    names = [keys[-1] for keys, _ in stages.head.program.weights.flat]
    head = np.asarray(stages.head.values[names.index("head")], np.float64)
    for given in (case["prompt_ids"], case["prompt"]):
        made = client.embeddings.create(
            model=model, input=given, extra_body={"normalize": False}, encoding_format="float"
        )
        logits = np.array(made.data[0].embedding) @ head
        logprobs = logits - logits.max()
        logprobs -= np.log(np.exp(logprobs).sum())
        assert logits.argmax() == case["output_ids"][0]
        assert logprobs.max() == pytest.approx(case["output_logprobs"][0], abs=1e-3)
        assert made.usage.total_tokens == len(case["prompt_ids"])
    made = client.embeddings.create(model=model, input=[case["prompt"], "another"], dimensions=64)
    assert all(np.linalg.norm(one.embedding) == pytest.approx(1) for one in made.data)


def test_openai_completions_are_those_of_the_reference(client, case, model):
    size = len(case["output_ids"])
    for prompt in (case["prompt_ids"], case["prompt"]):
        made = client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=size,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        assert made.choices[0].text == case["text"] and made.usage.completion_tokens == size
    stream = client.completions.create(
        model=model,
        prompt=case["prompt_ids"],
        max_tokens=size,
        temperature=0,
        stream=True,
        logprobs=1,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = list(stream)
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert (
        "".join(choice.text for choice in choices) == case["text"]
        and chunks[-1].usage.completion_tokens == size
    )
    logprobs = [
        value for choice in choices if choice.logprobs for value in choice.logprobs.token_logprobs
    ]
    assert logprobs == pytest.approx(case["output_logprobs"], abs=2e-3)


def test_openai_chats_sync_and_async_and_streamed_agree(client, server, model):
    ask = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    plain = client.chat.completions.create(**ask).choices[0]
    if model == WHOLE:
        assert "Paris" in plain.message.content and plain.finish_reason == "stop"
    streamed = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(**ask, stream=True)
    )

    async def many():
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as there:
            return await asyncio.gather(*(there.chat.completions.create(**ask) for _ in range(8)))

    assert {streamed, *(made.choices[0].message.content for made in asyncio.run(many()))} == {
        plain.message.content
    }


def test_openai_seeds_repeat_and_n_differ(client, model):
    ask = {
        "model": model,
        "prompt": "Once upon a time",
        "max_tokens": 12,
        "temperature": 1.0,
        "seed": 7,
        "n": 3,
    }
    first, second = (client.completions.create(**ask) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices] and len(set(texts)) == 3


class City(pydantic.BaseModel):
    city: str = pydantic.Field(max_length=20)
    people: int = pydantic.Field(ge=0, le=10**9)


def test_openai_json_schemas_are_obeyed_at_any_temperature(client, model, brief):
    ask = {
        "model": model,
        "messages": [{"role": "user", "content": "Describe a city in JSON."}],
        "max_tokens": 200,
        **brief,
    }
    for seed in range(4):
        made = client.chat.completions.parse(
            **ask, temperature=1.5, seed=seed, response_format=City
        )
        assert made.choices[0].finish_reason == "stop" and isinstance(
            made.choices[0].message.parsed, City
        )
    made = client.completions.create(
        model=model,
        prompt="A date:",
        max_tokens=40,
        temperature=1.5,
        extra_body={"structured_outputs": {"regex": r"\d{4}-\d{2}-\d{2}"}},
    )
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", made.choices[0].text)


@pytest.mark.matrix  # the first layers alone find no end of a call
@pytest.mark.parametrize("model", ["whole"], indirect=True)
def test_openai_tools_are_called_and_their_results_go_back(client, model):
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    ask = {"model": model, "tools": TOOLS, "max_tokens": 100, "temperature": 0}
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        made = client.chat.completions.create(**ask, messages=messages, tool_choice=choice).choices[
            0
        ]
        (call,) = made.message.tool_calls
        assert made.finish_reason == "tool_calls" and set(json.loads(call.function.arguments)) >= {
            "city"
        }
        chunks = client.chat.completions.create(
            **ask, messages=messages, tool_choice=choice, stream=True
        )
        (streamed,) = [
            found for chunk in chunks for found in chunk.choices[0].delta.tool_calls or ()
        ]
        assert (
            streamed.function == call.function.model_copy()
            or streamed.function.arguments == call.function.arguments
        )
    answer = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}
    made = client.chat.completions.create(
        **ask, messages=[*messages, made.message.model_dump(exclude_none=True), answer]
    )
    assert made.choices[0].message.content and made.usage.prompt_tokens > 100


def test_openai_errors_have_the_clients_own_types(client, model):
    for error, change in (
        (openai.NotFoundError, {"model": "gpt-5"}),
        (openai.BadRequestError, {"max_tokens": -1}),
    ):
        with pytest.raises(error):
            client.completions.create(**{"model": model, "prompt": "x", **change})


def test_a_stream_that_is_closed_frees_its_request(client, server, model):
    stream = client.completions.create(
        model=model, prompt="Once", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    engine = server.server.frontend.replica
    eventually(lambda: not engine.load().running)
    load = engine.load()
    assert load.pages_free + load.pages_cached == load.pages_total


def test_the_requests_of_vllm_bench_serve_are_answered_as_it_expects(server, model):
    """`vllm bench serve --backend=openai`: the fields that it sends, and what it reads of each
    chunk."""
    body = {
        "model": model,
        "prompt": "word " * 30,
        "repetition_penalty": 1.0,
        "max_tokens": 16,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "ignore_eos": True,
    }
    texts = []
    usage = None
    with httpx.stream(
        "POST",
        f"{server.url}/v1/completions",
        json=body,
        timeout=60,
        headers={"Authorization": "Bearer x", "x-request-id": "bench-0"},
    ) as answer:
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if line.startswith("data: ") and data != "[DONE]":
                chunk = json.loads(data)
                texts += [choice.get("text") for choice in chunk.get("choices", ())]
                usage = chunk.get("usage") or usage
    assert usage["completion_tokens"] == 16 and len([text for text in texts if text]) > 1


def test_reflection_is_enough_to_call_us_as_grpcurl_does(server, case):
    with grpc.insecure_channel(server.target) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {"jaxserve.v1.Inference", "jaxserve.v1.Control", "grpc.health.v1.Health"} <= set(
            database.get_services()
        )
        pool = descriptor_pool.DescriptorPool(database)
        method = pool.FindServiceByName("jaxserve.v1.Inference").FindMethodByName("Generate")
        request, event = (
            message_factory.GetMessageClass(kind)
            for kind in (method.input_type, method.output_type)
        )
        size = len(case["output_ids"])
        fields = {
            "text": case["prompt"],
            "sampling": {"temperature": 0, "maxTokens": size, "ignoreEos": True},
        }
        message = json_format.ParseDict(fields, request())
        call = channel.unary_stream(
            "/jaxserve.v1.Inference/Generate", request.SerializeToString, event.FromString
        )
        events = [json_format.MessageToDict(answer) for answer in call(message, timeout=60)]
    assert (
        "".join(found["token"].get("text", "") for found in events if "token" in found)
        == case["text"]
    )


STOCK = """
import sys, grpc
sys.path.insert(0, sys.argv[1])
import wire_pb2 as pb, wire_pb2_grpc as rpc
stub = rpc.InferenceStub(grpc.insecure_channel(sys.argv[2]))
ids = [int(i) for i in sys.argv[3].split(",")]
sampling = pb.SamplingParams(temperature=0, max_tokens=int(sys.argv[4]), ignore_eos=True)
request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=sampling)
print(",".join(str(i) for event in stub.Generate(request, timeout=60) for i in event.token.ids))
"""


def test_a_client_generated_from_the_proto_alone(server, case, tmp_path):
    shutil.copy(PROTO, tmp_path / "wire.proto")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{tmp_path}",
            f"--python_out={tmp_path}",
            f"--grpc_python_out={tmp_path}",
            str(tmp_path / "wire.proto"),
        ],
        check=True,
        timeout=60,
    )
    arguments = [
        str(tmp_path),
        server.target,
        ",".join(map(str, case["prompt_ids"])),
        str(len(case["output_ids"])),
    ]
    done = subprocess.run(
        [sys.executable, "-c", STOCK, *arguments], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert [int(id) for id in done.stdout.split(",")] == case["output_ids"]
