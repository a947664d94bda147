"""`jaxserve demo`: a small model served over real gRPC on one device and on a mesh with all three
axes, one long prompt and several short ones at once; or by a cluster of replicas (see
`demo_cluster`), or by two lanes with one pool of KV (see `demo_pool`)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.api.events import Accepted, Finished, Progress
from jaxserve.api.sampling import SamplingParams
from jaxserve.cli.display import Streams, Waiting, table
from jaxserve.cli.engine_flags import engine_config, engine_groups
from jaxserve.cli.own_server import OwnServer, StartingServer, cpu_devices, starting_server
from jaxserve.lab.cli import demo_cluster, demo_pool
from jaxserve.lab.quotients import per_later_token
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.text.output import Delta

ABOUT = """\
Fetches the model if it is not there, serves it on a free port of this machine, and sends one
prompt of a thousand tokens together with several short ones, through the same client that any
program would use: first on one device, at the speed that this machine has, then on twelve devices
of its CPU with all three axes of parallelism. There the long prompt is prefilled in chunks, stage
after stage, its KV grows from the first lane into the second, and the short answers go on
meanwhile. Tables tell how long all that took, and that the tokens are the same.

With --cluster two replicas that prefill, two that decode and a conductor are started as processes
of this machine instead, and several users ask about one document: its KV is computed once, goes
from replica to replica, and is used again. Tables tell what came from where, and the live page,
whose address is printed, shows it meanwhile.

With --pool twelve users ask about one document at once, of a server with two lanes: first its KV
is on one lane, which answers nearly all of them; then copies are on both. A table tells what the
lanes read and how long it took. Give each form --model to use another one.
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
    Option("pool", bool, False, "two lanes with one pool of KV, with copies and without"),
    Option("long", int, 700, "tokens of the long prompt", 64),
    Option("short", int, 3, "short prompts", 0, len(QUESTIONS)),
    Option("max_tokens", int, 8, "most tokens of an answer of all devices; one gives more", 1),
    Option("stay", bool, False, "serve on at the end, with the live page, until Ctrl-C"),
]
DEFAULTS = {
    "mesh": "spp=2,kvp=2,tp=3",
    "dtype": "float32",  # in which tokens are the same on every mesh
    "max_model_len": 4096,
    "lane_tokens": 256,
    "chunk_tokens": 128,
    "max_seqs": 4,
    "kv_memory_gib": 0.25,
    "profile": "none",
    "compile_all": False,
}
ONE_DEVICE_TOKENS = 5  # times as many tokens
ONE_DEVICE = {"mesh": "", "lane_tokens": None, "chunk_tokens": 256}


@dataclasses.dataclass
class Talk:
    """One request and when its tokens came, in seconds since it was sent."""

    name: str
    question: str
    first: float = 0.0
    last: float = 0.0
    finished: Finished | None = None
    ids: list[int] = dataclasses.field(default_factory=list)

    def row(self) -> list[str]:
        if self.finished is None:
            return [self.name, *["-"] * 6, "failed"]
        usage = self.finished.usage
        tpot = per_later_token(self.last - self.first, usage.completion)
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
    if values["pool"]:
        return demo_pool.run(values, document)
    from jaxserve.checkpoint.fetch import local_files

    local_files(values["model"], sys.stderr.isatty(), values["revision"])  # once, for both servers
    mesh = engine_config(values).mesh
    degrees = f"{mesh.spp} stages x {mesh.kvp} lanes x {mesh.tp} ranks"
    print(f"{values['model']} on one device, then on {mesh.devices}: {degrees}", flush=True)
    # both start at once, which takes one core each
    with starting_server(values, cpu_devices(mesh.devices)) as many:
        with starting_server(values | ONE_DEVICE, cpu_devices(1)) as one:
            server = _ready(one, "one device")
            with many.paused():
                output_tokens = ONE_DEVICE_TOKENS * values["max_tokens"]
                first = asyncio.run(talk(server.grpc, {**values, "max_tokens": output_tokens}))
        server = _ready(many, f"{mesh.devices} devices")
        print(f"live page: {server.url}/", flush=True)
        second = asyncio.run(talk(server.grpc, values))
        shown = [("one device, as fast as this machine is", first)]
        shown += [(f"{mesh.devices} devices of the same machine: {degrees}", second)]
        print("\n" + "\n\n".join(f"{title}\n\n{summary(talks)}" for title, talks in shown))
        print(f"\n{compared(first, second)}")
        if values["stay"]:
            print(f"live page: {server.url}/ (Ctrl-C ends it)", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
    return int(any(talk.finished is None for talk in (*first, *second)) or _differ(first, second))


def _ready(starting: StartingServer, name: str) -> OwnServer:
    waiting = Waiting(f"loading and compiling for {name}")
    server = starting.ready(waiting)
    waiting.done()
    return server


def _differ(first: Sequence[Talk], second: Sequence[Talk]) -> bool:
    return any(_differs(one, other) for one, other in zip(first, second))


def _differs(one: Talk, other: Talk) -> bool:
    """Returns true if the shorter of two answers is no prefix of the longer one."""
    length = min(len(one.ids), len(other.ids))
    return one.ids[:length] != other.ids[:length]


def compared(first: Sequence[Talk], second: Sequence[Talk]) -> str:
    """Describes how far both servers gave the same tokens."""
    if not _differ(first, second):
        tokens = sum(min(len(one.ids), len(other.ids)) for one, other in zip(first, second))
        return f"The tokens are the same: all {tokens} that both gave, of {len(first)} answers."
    wrong = [one.name for one, other in zip(first, second) if _differs(one, other)]
    return f"THE TOKENS DIFFER: {', '.join(wrong)}"


async def talk(target: str, values: Mapping[str, Any]) -> list[Talk]:
    """Sends all prompts at once, and shows the answers as they come."""
    from jaxserve.server.client import AsyncClient

    async with AsyncClient(target) as client:
        talks = [Talk("long", await _long_question(client, values["long"]))]
        questions = QUESTIONS[: values["short"]]
        talks += [Talk(f"short {i + 1}", question) for i, question in enumerate(questions)]
        for each in talks[1:]:
            print(f"{each.name:8} {each.question}")
        print(f"{'long':8} {_SHOWN} ({values['long']} tokens)\n", flush=True)
        view = Streams([each.name for each in talks])
        sampling = SamplingParams(temperature=0, max_tokens=values["max_tokens"])
        in_order = [*talks[1:], talks[0]]  # the short ones come first
        errors = await asyncio.gather(
            *(_ask(client, each, sampling, view) for each in in_order), return_exceptions=True
        )
        view.close()
        for each, error in zip(in_order, errors):
            if error is not None:
                print(f"{each.name}: {error}", file=sys.stderr)
        return talks


def summary(talks: Sequence[Talk]) -> str:
    tokens = sum(talk.finished.usage.completion for talk in talks if talk.finished)
    wall = max(talk.last for talk in talks)
    lines = [
        table(HEADERS, [talk.row() for talk in talks]),
        f"{tokens} tokens in {wall:.1f} s",
    ]
    return "\n".join(lines)


def accepted(expected: float) -> str:
    """Says that a request was accepted. expected: seconds to its first token; 0 where nothing was
    measured."""
    return f"accepted, first token expected after {expected:.2f} s" if expected else "accepted"


async def _ask(client: Any, talk: Talk, sampling: SamplingParams, view: Streams) -> None:
    began = time.monotonic()
    async for output in client.generate([{"role": "user", "content": talk.question}], sampling):
        now = time.monotonic() - began
        match output:
            case Accepted():
                view.note(talk.name, accepted(output.predicted_ttft))
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
                talk.ids += output.ids
                view.add(talk.name, output.text)
            case Finished():
                talk.finished = output
                view.end(talk.name, f"done: {output.usage.completion} tokens in {now:.1f} s")


_SHOWN = "What is this Python module for? [jaxserve.api.sampling, jaxserve.text.output]"


async def _long_question(client: Any, tokens: int) -> str:
    """Makes a question about `tokens` tokens of jaxserve's own source."""
    text = await client.detokenize(await document(client, tokens))
    return f"{text}\n\nWhat is this Python module for?"


async def document(client: Any, tokens: int) -> list[int]:
    """Returns the ids of `tokens` tokens of jaxserve's own source."""
    import jaxserve.api.sampling
    import jaxserve.text.output

    source = "\n".join(map(inspect.getsource, (jaxserve.api.sampling, jaxserve.text.output)))
    ids = await client.tokenize(source, special=False)
    while len(ids) < tokens:
        ids += ids
    return ids[:tokens]


COMMAND = Command({"demo": DEMO, **engine_groups(**DEFAULTS)}, run, ABOUT)
