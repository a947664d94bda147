"""`jaxserve complete`: one text goes on, with a model of this machine or of a server."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from typing import Any

from jaxserve.cli.engine_flags import engine_groups
from jaxserve.cli.openai_client import ANSWER, CLIENT, answer_fields, client_of
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError
from jaxserve.settings.schema.engine import SERVED

ABOUT = """\
Without a PROMPT, or with -, the text is read from standard input. Without --url a server is
started for as long as it takes; `jaxserve generate` is faster for many prompts.

  jaxserve complete 'The capital of France is' --max_tokens=8
  git diff | jaxserve complete --url=http://gpu-host:8000 --json
"""
TEXT = [
    Option("prompt", str, "-", "the text to go on with; -: standard input"),
    Option("json", bool, False, "write one object: model, text, tokens, seconds, reason"),
]


def run(values: dict[str, Any]) -> int:
    prompt = sys.stdin.read() if values["prompt"] == "-" else values["prompt"]
    if not prompt:
        raise ConfigError("prompt", "is empty")
    said = []
    with client_of(values) as client:
        with contextlib.closing(client.complete(prompt, answer_fields(values))) as pieces:
            for piece in pieces:
                said.append(piece.text)
                if not values["json"]:
                    print(piece.text, end="", flush=True)
        if values["json"]:
            statistics = dataclasses.asdict(client.answered)
            print(json.dumps({"model": client.model, "text": "".join(said), **statistics}))
        else:
            print()
    return 0


COMMAND = Command(
    {"text": TEXT, "server": CLIENT, "sampling": ANSWER, **engine_groups(**SERVED)},
    run,
    ABOUT,
    argument="[PROMPT]",
)
