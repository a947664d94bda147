"""Two engines behind Dynamo's own frontend and router, by its discovery over files: answers,
errors, and requests that go where their prefix is.

Needs Dynamo, beside jaxserve's own requirements, in the environment of JAXSERVE_DYNAMO_PYTHON (or
in this one), and a model's folder with a tokenizer and a chat template in JAXSERVE_DYNAMO_MODEL
(docs/routers.md).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from jaxserve.group.channel import free_port

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("JAXSERVE_DYNAMO_PYTHON", sys.executable)
MODEL = os.environ.get("JAXSERVE_DYNAMO_MODEL", "")
START_SECONDS = 280.0
STOP_SECONDS = 15.0
READY = "WorkerKvQuery endpoint starting"  # what a worker logs once it serves
ENGINE = ["--max_model_len=512", "--max_seqs=2", "--pages=80", "--chunk_tokens=64"]


def why_not() -> str:
    """Names what is missing; '' if nothing is."""
    code = "import dynamo.common.backend, dynamo.frontend, zmq, msgpack"
    with contextlib.suppress(OSError):
        if subprocess.run([PYTHON, "-c", code], capture_output=True, timeout=60).returncode == 0:
            return "" if MODEL else "JAXSERVE_DYNAMO_MODEL names no folder of a model"
    return f"{PYTHON} has no Dynamo (ai-dynamo 1.6): set JAXSERVE_DYNAMO_PYTHON"


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[httpx.Client]:
    """A client of a frontend with two workers that are ready."""
    if missing := why_not():
        pytest.skip(missing)
    folder = tmp_path_factory.mktemp("dynamo")
    port = free_port("127.0.0.1")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "DYN_FILE_KV": str(folder),
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
    }
    worker = ["-m", "jaxserve.integrations.dynamo", f"--model={MODEL}", "--profile=none"]
    worker += ["--served_model_name=tiny", "--discovery_backend=file", *ENGINE]
    frontend = ["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
    frontend += ["--router-mode", "kv", "--discovery-backend", "file"]
    with contextlib.ExitStack() as stack:
        workers = []
        for arguments in (frontend, worker, worker):
            log = stack.enter_context(open(folder / f"log{len(workers)}", "w"))
            workers.append(
                subprocess.Popen([PYTHON, *arguments], env=environment, stdout=log, stderr=log)
            )
            stack.callback(end, workers[-1])
        client = stack.enter_context(
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0)
        )
        wait_ready(client, workers, folder)
        yield client


def end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_ready(client: httpx.Client, processes: list[subprocess.Popen], folder: Path) -> None:
    """Waits until the frontend knows the model, of both workers."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert all(one.poll() is None for one in processes), "a process ended by itself"
        logs = [(folder / f"log{number}").read_text() for number in (1, 2)]
        serving = all(READY in log for log in logs)
        with contextlib.suppress(httpx.HTTPError):
            if serving and client.get("/v1/models").json()["data"]:
                return
        time.sleep(0.5)
    raise AssertionError("the workers were not ready in time")


def complete(client: httpx.Client, prompt: str, **fields) -> dict:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.matrix
def test_greedy_answers_are_the_same_again_and_the_second_time_from_the_cache(client):
    prompt = "one two three four " * 12
    first = complete(client, prompt)
    time.sleep(1.0)  # events need a moment to reach the router
    for _ in range(3):  # with two workers, chance alone would find the other one
        again = complete(client, prompt)
        assert again["choices"] == first["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert first["usage"]["completion_tokens"] == 8


@pytest.mark.matrix
def test_what_the_backend_cannot_do_is_refused_with_its_name(client):
    body = {"model": "tiny", "prompt": "a", "max_tokens": 4, "guided_json": {"type": "object"}}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400 and "sampling_options.guided_decoding" in answer.text


@pytest.mark.matrix
def test_chats_and_log_probabilities_come_through(client):
    assert len(complete(client, "a b", logprobs=2)["choices"][0]["logprobs"]["tokens"]) == 8
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] <= 4 and answer["choices"][0]["finish_reason"]
