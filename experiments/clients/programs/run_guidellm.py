"""GuideLLM: a few chats and completions, one after the other and at once; all must succeed, and
its counts of tokens must be the server's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from check import MODEL, TOKENIZER, URL, call, command, main, scratch

INPUT, OUTPUT, REQUESTS = 16, 8, 4


def benchmark(path: str, profile: str) -> dict[str, Any]:
    """The report of a short run over one of the server's routes."""
    report = Path(scratch(), "report.json")
    command(
        "guidellm",
        "run",
        "--backend",
        f"kind=openai_http,target={URL},model={MODEL},request_format={path}",
        "--profile",
        profile,
        "--constraint",
        f"kind=max_requests,count={REQUESTS}",
        "--data",
        f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}",
        "--tokenizer",
        f"kind=huggingface_auto,model={TOKENIZER}",
        "--output",
        f"kind=json,path={report}",
        "--disable-console",
    )
    return json.loads(report.read_text())["benchmarks"][0]


def checked(found: dict[str, Any]) -> None:
    totals = found["metrics"]["request_totals"]
    assert totals["successful"] == REQUESTS and not totals["errored"], totals
    tokens = found["metrics"]["output_token_count"]["successful"]["mean"]
    assert tokens == OUTPUT, tokens


@call
def chats() -> None:
    checked(benchmark("/v1/chat/completions", "kind=synchronous"))


@call
def chats_at_once() -> None:
    checked(benchmark("/v1/chat/completions", "kind=concurrent,streams=4"))


@call
def completions() -> None:
    checked(benchmark("/v1/completions", "kind=synchronous"))


@call
def responses() -> None:
    checked(benchmark("/v1/responses", "kind=synchronous"))


main("guidellm")
