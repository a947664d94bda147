"""Sessions as coding agents have them, by the protocols' own clients, with a model that can do
nothing but call: they send and read what Codex (responses) and Claude Code (messages) do."""

from __future__ import annotations

import json

import anthropic
import openai
import pytest

from jaxserve.llm import open_engine
from jaxserve.server.supervisor import Background
from jaxserve.settings.options import make
from jaxserve.settings.schema import EngineConfig, ServerConfig
from tests.waiting import eventually

SETTINGS = {
    "max_model_len": 4096,
    "chunk_tokens": 256,
    "max_seqs": 4,
    "pages": 800,
    "profile": "none",
}
COMMANDS = ["ls", "cat setup.py"]
SHELL = {
    "type": "object",
    "properties": {"command": {"enum": COMMANDS}, "timeout_ms": {"enum": [1000, 2000]}},
    "required": ["command", "timeout_ms"],
}
RESULT = "setup.py\nREADME.md"
TASK = "Which files are there?"
EFFORT = {
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}
TURNS = 3
MOST = 100  # tokens of a call


@pytest.fixture(scope="module")
def server(smollm2_first_layers):
    config = make(EngineConfig, {"model": str(smollm2_first_layers), **SETTINGS})
    with Background(
        ServerConfig(grpc_port=0, port=0),
        lambda: open_engine(config, progress=False, warm_up=False),
    ) as server:
        server.wait_ready()
        yield server


def test_a_session_as_codex_has_it(server):
    """Streams of responses, which are not stored: each turn sends all items of those before."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    tool = {"type": "function", "name": "shell", "strict": False, "parameters": SHELL}
    agents = {"type": "namespace", "name": "agents", "tools": [{**tool, "name": "spawn"}]}
    search = {"type": "web_search", "external_web_access": False}
    items = [
        {"type": "message", "role": "developer", "content": [_input("You are in a sandbox.")]},
        {"type": "message", "role": "user", "content": [_input(TASK)]},
    ]
    for turn in range(TURNS):
        last = turn == TURNS - 1
        events = client.responses.create(
            model="",
            instructions="You are a coding agent.",
            input=items,
            tools=[tool, agents, search],
            tool_choice="none" if last else {"type": "function", "name": "shell"},
            parallel_tool_calls=False,
            reasoning={"effort": "medium", "summary": "auto"},
            store=False,
            include=["reasoning.encrypted_content"],
            prompt_cache_key="session",
            extra_body={"client_metadata": {"window": "session:0"}},
            max_output_tokens=16 if last else MOST,
            temperature=0,
            stream=True,
        )
        *before, end = events
        kinds = [event.type for event in before]
        response = end.response
        assert kinds[0] == "response.created"
        (item,) = response.output
        if last:
            assert item.type == "message" and response.output_text
            break
        assert end.type == "response.completed" and "response.output_item.done" in kinds
        assert "response.function_call_arguments.delta" in kinds
        arguments = json.loads(item.arguments)
        assert (item.type, item.name) == ("function_call", "shell")
        assert arguments["command"] in COMMANDS and arguments["timeout_ms"] in (1000, 2000)
        items.append(item.to_dict())
        output = {"type": "function_call_output", "call_id": item.call_id, "output": RESULT}
        items.append(output)
    _nothing_left(server)


def test_a_session_as_claude_code_has_it(server):
    """Streams of messages; the system prompt and the last message are marked to be cached."""
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    cached = {"cache_control": {"type": "ephemeral"}}
    tool = {"name": "Bash", "description": "Runs a command", "input_schema": SHELL}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": TASK, **cached}]},
        {"role": "system", "content": "Agents that may be asked: Explore."},
    ]
    asked = {
        "model": "",
        "system": [{"type": "text", "text": "You are a coding agent.", **cached}],
        "tools": [tool],
    }
    counted = client.messages.count_tokens(messages=messages, **asked).input_tokens
    for turn in range(TURNS):
        last = turn == TURNS - 1
        with client.messages.stream(
            messages=messages,
            max_tokens=16 if last else MOST,
            extra_body={"temperature": 0, **EFFORT},
            metadata={"user_id": "user"},
            tool_choice={"type": "none"} if last else {"type": "any"},
            **asked,
        ) as stream:
            events = [event.type for event in stream]
            message = stream.get_final_message()
        usage = message.usage
        assert turn != 1 or usage.cache_read_input_tokens > 0
        if turn == 0:
            assert usage.input_tokens + usage.cache_read_input_tokens == counted
        (block,) = message.content
        if last:
            assert block.type == "text" and message.stop_reason in ("max_tokens", "end_turn")
            break
        assert message.stop_reason == "tool_use" and "input_json" in events
        assert (block.type, block.name) == ("tool_use", "Bash")
        assert block.input["command"] in COMMANDS
        messages.append({"role": "assistant", "content": [block.to_dict()]})
        result = {"type": "tool_result", "tool_use_id": block.id, "content": RESULT, **cached}
        messages.append({"role": "user", "content": [result]})
    _nothing_left(server)


def _input(text):
    return {"type": "input_text", "text": text}


def _nothing_left(server):
    eventually(lambda: not server.server.frontend.streams)
    assert server.server.frontend.replica.load().running == 0
