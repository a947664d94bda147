"""`jaxserve demo`: a small model served over real gRPC on a mesh with all three axes, one long
prompt and several short ones at once; or by a cluster of replicas (see `demo_cluster`)."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import sys
import time
from collections.abc import Sequence
from typing import Any

from jaxserve.api.events import Accepted, Finished, Progress
from jaxserve.api.sampling import SamplingParams
from jaxserve.cli import demo_cluster
from jaxserve.cli.display import Streams, table
from jaxserve.cli.engine_flags import engine_config, engine_groups
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.text.output import Delta

ABOUT = """\
Fetches the model if it is not there, serves it on a free port of this machine, and sends one
prompt of some thousand tokens together with several short ones, through the same client that any
program would use. The long prompt is prefilled in chunks, stage after stage, its KV grows from
the first lane into the second, and the short answers go on meanwhile.

With --cluster two replicas that prefill, two that decode and a conductor are started as processes
of this machine instead, and several users ask about one document: its KV is computed once, goes
from replica to replica, and is used again. Tables tell what came from where, and the live page,
whose address is printed, shows it meanwhile. Give both forms --model to use another one.
"""
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Name three primary colours.",
    "Why is the sky blue?",
    "Count from one to ten.",
    "What do bees make?",
    "Give a short definition of gravity.",
    "Who wrote Hamlet?",
]
DEMO = [
    Option("cluster", bool, False, "a cluster of five processes in place of one process"),
    Option("long", int, 2500, "tokens of the long prompt", 64),
    Option("short", int, 3, "short prompts", 0, len(QUESTIONS)),
    Option("max_tokens", int, 40, "most tokens of an answer", 1),
]
DEFAULTS = {
    "mesh": "spp=2,kvp=2,tp=3",
    "max_model_len": 4096,
    "lane_tokens": 1024,
    "chunk_tokens": 128,
    "max_seqs": 4,
}


@dataclasses.dataclass
class Talk:
    """One request and when its tokens came, in seconds since it was sent."""

    name: str
    question: str
    first: float = 0.0
    last: float = 0.0
    finished: Finished | None = None

    def row(self) -> list[str]:
        if self.finished is None:
            return [self.name, *["-"] * 6, "failed"]
        usage = self.finished.usage
        tpot = (self.last - self.first) / (usage.completion - 1) if usage.completion > 1 else 0.0
        return [
            self.name,
            str(usage.prompt),
            str(usage.cached),
            str(usage.completion),
            f"{self.first:.2f} s",
            f"{1000 * tpot:.0f} ms",
            f"{usage.completion / self.last:.1f}",
            self.finished.reason,
        ]


HEADERS = ["request", "prompt", "cached", "output", "TTFT", "TPOT", "tokens/s", "ended by"]


def run(values: dict[str, Any]) -> int:
    if values["cluster"]:
        return demo_cluster.run(values, document)
    from jaxserve.llm import open_engine
    from jaxserve.server.supervisor import Background
    from jaxserve.settings.schema import ServerConfig

    config = engine_config(values)
    mesh = config.mesh
    degrees = f"{mesh.spp} stages x {mesh.kvp} lanes x {mesh.tp} ranks"
    print(
        f"{config.source.model} on {mesh.devices} devices: {degrees}",
        flush=True,
    )
    with Background(
        ServerConfig(grpc_port=0, port=0), lambda: open_engine(config, progress=sys.stderr.isatty())
    ) as server:
        began = time.monotonic()
        server.wait_ready()
        print(f"serving on {server.target} after {time.monotonic() - began:.0f} s\n", flush=True)
        return asyncio.run(
            talk(server.target, values["long"], values["short"], values["max_tokens"])
        )


async def talk(target: str, long: int, short: int, max_tokens: int) -> int:
    """Sends all prompts at once, shows the answers as they come, ends with a table. Returns an exit
    code."""
    from jaxserve.server.client import AsyncClient

    async with AsyncClient(target) as client:
        talks = [Talk("long", await _long_question(client, long))]
        talks += [Talk(f"short {i + 1}", question) for i, question in enumerate(QUESTIONS[:short])]
        for each in talks[1:]:
            print(f"{each.name:8} {each.question}")
        print(f"{'long':8} {_SHOWN} ({long} tokens)\n", flush=True)
        view = Streams([each.name for each in talks])
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
        errors = await asyncio.gather(
            *(_ask(client, each, sampling, view) for each in talks), return_exceptions=True
        )
        view.close()
        print("\n" + summary(talks))
        for each, error in zip(talks, errors):
            if error is not None:
                print(f"{each.name}: {error}", file=sys.stderr)
        return int(any(errors))


def summary(talks: Sequence[Talk]) -> str:
    tokens = sum(talk.finished.usage.completion for talk in talks if talk.finished)
    wall = max(talk.last for talk in talks)
    lines = [
        table(HEADERS, [talk.row() for talk in talks]),
        "",
        f"{tokens} tokens in {wall:.1f} s",
        "TTFT: time to first token; TPOT: time per output token after it; tokens/s: over the "
        "whole request",
    ]
    return "\n".join(lines)


async def _ask(client: Any, talk: Talk, sampling: SamplingParams, view: Streams) -> None:
    began = time.monotonic()
    async for output in client.generate([{"role": "user", "content": talk.question}], sampling):
        now = time.monotonic() - began
        match output:
            case Accepted():
                view.note(
                    talk.name, f"accepted, first token expected after {output.predicted_ttft:.2f} s"
                )
            case Progress() if output.total > 1000:
                view.note(
                    talk.name,
                    f"prefilled {output.prefilled} of {output.total} tokens after {now:.1f} s",
                )
            case Delta():
                if not talk.first:
                    talk.first = now
                    view.note(talk.name, f"first token after {now:.2f} s")
                talk.last = now
                view.add(talk.name, output.text)
            case Finished():
                talk.finished = output
                view.end(talk.name, f"done: {output.usage.completion} tokens in {now:.1f} s")


_SHOWN = (
    "What is this Python module for? [the source of jaxserve.api.sampling and jaxserve.text.output]"
)


async def _long_question(client: Any, tokens: int) -> str:
    """A question about so many tokens of jaxserve's own source."""
    text = await client.detokenize(await document(client, tokens))
    return f"{text}\n\nWhat is this Python module for?"


async def document(client: Any, tokens: int) -> list[int]:
    """Ids of so many tokens of jaxserve's own source."""
    import jaxserve.api.sampling
    import jaxserve.text.output

    source = "\n".join(map(inspect.getsource, (jaxserve.api.sampling, jaxserve.text.output)))
    ids = await client.tokenize(source, special=False)
    while len(ids) < tokens:
        ids += ids
    return ids[:tokens]


COMMAND = Command({"demo": DEMO, **engine_groups(**DEFAULTS)}, run, ABOUT)
