"""AIPerf: streamed chats, completions and responses; all must succeed, with as many tokens as were
asked for."""

from __future__ import annotations

import json
from pathlib import Path

from check import MODEL, TOKENIZER, URL, call, command, main, scratch

INPUT, OUTPUT, REQUESTS = 16, 8, 4


def checked(endpoint: str) -> None:
    folder = scratch()
    command(
        "aiperf",
        "profile",
        f"--model={MODEL}",
        f"--url={URL}",
        f"--endpoint-type={endpoint}",
        "--streaming",
        f"--request-count={REQUESTS}",
        "--concurrency=2",
        f"--isl={INPUT}",
        f"--osl={OUTPUT}",
        f"--tokenizer={TOKENIZER}",
        f"--artifact-dir={folder}",
        "--ui=none",
        "--extra-inputs=ignore_eos:true",
        "--extra-inputs=temperature:0",
    )
    found = json.loads(Path(folder, "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == REQUESTS, found["error_summary"]
    assert not found["error_summary"], found["error_summary"]
    assert found["output_sequence_length"]["avg"] == OUTPUT
    assert found["time_to_first_token"]["avg"] > 0 and found["inter_token_latency"]["avg"] > 0


@call
def chats() -> None:
    checked("chat")


@call
def completions() -> None:
    checked("completions")


@call
def responses() -> None:
    checked("responses")


@call
def messages() -> None:
    checked("messages")


main("aiperf")
