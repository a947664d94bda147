"""A checkpoint of each family, with a chat template in the form of the published one, is served
over HTTP: chats, streams, tools, guided answers, log-probabilities."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import LLM
from jaxserve.api.sampling import SamplingParams
from jaxserve.checkpoint.model_config import from_hf
from jaxserve.group.channel import free_port
from jaxserve.llm import open_engine
from jaxserve.server.supervisor import Background
from jaxserve.settings.options import make
from jaxserve.settings.schema import EngineConfig, ServerConfig
from jaxserve.weights.names import tensors_of
from tests.models.oracle.cases import CASES
from tests.server.http_client import events
from tests.text.vocabulary import tokenizer

SPECIAL = re.compile(r"<[|｜]?[a-z_▁]+[|｜]>|<(?:start|end)_of_turn>|\[/?[A-Z_]+\]|\]~b\]|\[e~\[")
SETTINGS = {
    "max_model_len": 768,
    "chunk_tokens": 64,
    "max_seqs": 2,
    "pages": 128,
    "dtype": "float32",
    "host_cache_gib": 0,
}
GREEDY = {"temperature": 0, "max_tokens": 12}


@dataclass(frozen=True)
class Chat:
    """A chat template by its pieces. turn: with {role} and {content}. answer: what is written
    before the model's answer. tools: what precedes a list of tools; '': the template takes none.
    call: how the model writes calls."""

    turn: str
    answer: str
    begin: str = ""
    tools: str = ""
    call: str = ""

    @property
    def template(self) -> str:
        text = self.begin
        if self.tools:
            listed = f"{self.tools}\n{{{{ tools | tojson }}}}\n{self.call}"
            text += f"{{% if tools %}}{self._turn('system', listed)}{{% endif %}}"
        written = "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
        turn = self._turn("{{ m.role }}", "{{ m.content or '' }}" + written)
        text += f"{{% for m in messages %}}{turn}{{% endfor %}}"
        return f"{text}{{% if add_generation_prompt %}}{self.answer}{{% endif %}}"

    def _turn(self, role: str, content: str) -> str:
        return self.turn.replace("{role}", role).replace("{content}", content)


HERMES = '<tool_call>\n{"name": name, "arguments": object}\n</tool_call>'
CHATML = Chat(
    "<|im_start|>{role}\n{content}<|im_end|>\n", "<|im_start|>assistant\n", "", "# Tools", HERMES
)
GEMMA = Chat(
    "<start_of_turn>{role}\n{content}<end_of_turn>\n", "<start_of_turn>model\n", "{{ bos_token }}"
)
GLM = Chat("<|{role}|>\n{content}", "<|assistant|>\n", "[gMASK]<sop>")
DEEPSEEK = "<｜User｜>{content}<｜end▁of▁sentence｜>"
CHATS = {
    "phi3": Chat("<|{role}|>\n{content}<|end|>\n", "<|assistant|>\n"),
    "olmo2": Chat("<|{role}|>\n{content}\n", "<|assistant|>\n", "<|endoftext|>"),
    "olmo3": Chat(
        CHATML.turn, CHATML.answer, "", "functions", "<function_calls>name(a=1)</function_calls>"
    ),
    "granite": Chat(
        "<|start_of_role|>{role}<|end_of_role|>{content}<|end_of_text|>\n",
        "<|start_of_role|>assistant<|end_of_role|>",
        "",
        "available_tools",
        '<|tool_call|>[{"name": name, "arguments": object}]',
    ),
    "smollm3": Chat(CHATML.turn, CHATML.answer, "", "# Tools", HERMES),
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "mixtral": Chat("[INST] {content} [/INST]", "", "{{ bos_token }}", "[AVAILABLE_TOOLS]"),
    "qwen3_moe": CHATML,
    "gpt_oss": Chat(
        "<|start|>{role}<|message|>{content}<|end|>",
        "<|start|>assistant",
        "",
        "# Tools",
        "namespace functions {} // <|channel|>commentary to=functions.name",
    ),
    "glm": GLM,
    "glm4": GLM,
    "glm4_moe": Chat(
        GLM.turn,
        GLM.answer,
        GLM.begin,
        "# Tools",
        "<tool_call>name\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n</tool_call>",
    ),
    "minimax_m2": Chat(
        "]~b]{role}\n{content}[e~[\n",
        "]~b]ai\n",
        "",
        "# Tools",
        '<minimax:tool_call><invoke name="name"><parameter name="key">value</parameter></invoke>',
    ),
    "deepseek_v2": Chat(DEEPSEEK, "<｜Assistant｜>", "{{ bos_token }}"),
    "deepseek_v3": Chat(
        DEEPSEEK,
        "<｜Assistant｜>",
        "{{ bos_token }}",
        "## Tools",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>name\n```json\n{}\n```",
    ),
    "qwen3_next": CHATML,
    "qwen3_5": Chat(
        CHATML.turn,
        CHATML.answer,
        "",
        "# Tools",
        "<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n"
        "</tool_call>",
    ),
}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "dark": {"type": "boolean"}},
    "required": ["colour", "dark"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}
QUESTION = {"role": "user", "content": "Which colour?"}


def write_model(folder: Path, name: str) -> Path:
    """Writes a family's tiny checkpoint with a tokenizer and its chat template."""
    folder.mkdir()
    template = CHATS[name].template
    text = tokenizer(tuple(dict.fromkeys(SPECIAL.findall(template))), template)
    case = CASES[name]
    config = case.config | {"vocab_size": text.vocab, "max_position_embeddings": 1024}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(case.weights(tensors_of(from_hf(config))), folder / "model.safetensors")
    text.save(folder)
    return folder


@contextlib.contextmanager
def in_process(folder: Path) -> Iterator[str]:
    """Serves a model from this process; gives the address."""
    config = make(EngineConfig, SETTINGS | {"model": str(folder)})
    ports = ServerConfig(grpc_port=0, port=0)
    with Background(ports, lambda: open_engine(config, False, warm_up=False)) as server:
        server.wait_ready()
        yield server.url


@contextlib.contextmanager
def by_command(folder: Path) -> Iterator[str]:
    """Serves a model by `jaxserve serve FOLDER`; gives the address."""
    port = free_port("127.0.0.1")
    flags = [f"--{name}={value}" for name, value in SETTINGS.items()]
    command = [sys.executable, "-m", "jaxserve", "serve", str(folder), "--grpc_port=0", *flags]
    process = subprocess.Popen([*command, f"--port={port}"])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        assert process.wait(60) == 0


Serving = Callable[[Path], contextlib.AbstractContextManager[str]]
IN_SUITE = ("gpt_oss",)


@pytest.mark.parametrize(
    "name, serving",
    [
        *((name, in_process) for name in IN_SUITE),
        *(pytest.param(name, by_command, marks=pytest.mark.matrix) for name in CHATS),
    ],
)
def test_a_family_is_served(name: str, serving: Serving, tmp_path):
    folder = write_model(tmp_path / "model", name)
    with serving(folder) as url, httpx.Client(base_url=url, timeout=120) as client:
        wait_ready(client)
        assert_chats(client)
        assert_guided(client)
        if CHATS[name].tools:
            assert_calls(client)
        echoed = assert_echoes(client)
    prompt, tokens, logprobs = echoed
    with LLM(model=str(folder), progress=False, **SETTINGS) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=12, logprobs=1, prompt_logprobs=1)
        (wanted,) = llm.generate([prompt], sampling)
    assert tokens == wanted.ids
    rows = list(wanted.prompt_logprobs[1:]) + wanted.logprobs
    assert logprobs == pytest.approx([row.chosen for row in rows], abs=1e-4)


@pytest.mark.parametrize(
    "path, field, limit, part, reason",
    [
        ("chat/completions", "messages", "max_tokens", {"type": "image_url"}, "not text"),
        ("responses", "input", "max_output_tokens", {"type": "input_image"}, "none of input_text"),
        ("messages", "messages", "max_tokens", {"type": "image"}, "not text"),
    ],
)
def test_images_for_the_text_of_a_multimodal_checkpoint_are_refused(
    path, field, limit, part, reason, multimodal
):
    content = [{"type": "text", "text": "What is this?"}, part]
    body = {"model": "multimodal", limit: 8, field: [{"role": "user", "content": content}]}
    answer = httpx.post(f"{multimodal}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory) -> Iterator[str]:
    """The address of a server of a Qwen3.5 checkpoint as hubs have it, with a part for images."""
    folder = write_model(tmp_path_factory.mktemp("images") / "multimodal", "qwen3_5")
    text = json.loads((folder / "config.json").read_text())
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": {"depth": 2},
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    towers = {"model.visual.patch_embed.proj.bias": np.ones(3, np.float32)}
    save_file(
        {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
        | towers,
        folder / "model.safetensors",
    )
    with in_process(folder) as url:
        yield url


def wait_ready(client: httpx.Client) -> None:
    for _ in range(600):
        with contextlib.suppress(httpx.TransportError):
            if client.get("/ready").status_code == 200:
                return
        time.sleep(0.5)
    raise AssertionError("the server is not ready")


def chat(client: httpx.Client, **fields) -> dict:
    answer = client.post("/v1/chat/completions", json={"messages": [QUESTION], **GREEDY, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def assert_chats(client: httpx.Client) -> None:
    """A chat, and the same one streamed."""
    whole = chat(client, logprobs=True, top_logprobs=3)
    (choice,) = whole["choices"]
    assert 0 < whole["usage"]["completion_tokens"] <= 12
    assert len(choice["logprobs"]["content"]) == whole["usage"]["completion_tokens"]
    for token in choice["logprobs"]["content"]:
        assert token["logprob"] == pytest.approx(token["top_logprobs"][0]["logprob"], abs=1e-6)
    body = {"messages": [QUESTION], **GREEDY}
    chunks, last = events(client, "/v1/chat/completions", body)
    assert last == "[DONE]"
    for field in ("content", "reasoning_content"):
        pieces = [choice["delta"].get(field) or "" for c in chunks for choice in c["choices"]]
        assert "".join(pieces) == (choice["message"].get(field) or "")


def assert_guided(client: httpx.Client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "paint", "schema": SCHEMA}}
    whole = chat(client, response_format=form, max_tokens=200)
    assert_paint(whole["choices"][0]["message"]["content"])


def assert_calls(client: httpx.Client) -> None:
    """A call that the request asks for, and the answer to its result."""
    whole = chat(client, tools=[TOOL], tool_choice="required", max_tokens=200)
    message = whole["choices"][0]["message"]
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    call = message["tool_calls"][0]
    assert call["function"]["name"] == "paint"
    assert_paint(call["function"]["arguments"])
    result = {"role": "tool", "tool_call_id": call["id"], "content": "painted"}
    chat(client, tools=[TOOL], messages=[QUESTION, message, result])


def assert_paint(text: str) -> None:
    found = json.loads(text)
    assert found["colour"] in ("red", "blue") and found["dark"] in (True, False)
    assert len(found) == 2


def assert_echoes(client: httpx.Client) -> tuple[list[int], list[int], list[float]]:
    """Completes a text with its log-probabilities; gives the ids of the prompt, those of the
    completion, and the log-probabilities of all but the first."""
    body = {"prompt": "true or false", "echo": True, "logprobs": 1, "return_token_ids": True}
    answer = client.post("/v1/completions", json=body | GREEDY)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["text"].startswith("true or false")
    logprobs = choice["logprobs"]["token_logprobs"]
    assert logprobs[0] is None
    return choice["prompt_token_ids"], choice["token_ids"], logprobs[1:]
