"""`jaxserve demo --pool`: two lanes of this machine that keep one pool of KV; many users ask about
one document, which is on one lane, and then on both, as copies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from jaxserve.api.events import Finished
from jaxserve.api.sampling import SamplingParams
from jaxserve.cli.display import Streams, Waiting, table
from jaxserve.cli.own_server import OwnServer, cpu_devices, page_data, starting_server
from jaxserve.text.output import Delta

USERS = 12  # who ask at once
DEFAULTS = {  # of settings that no flag gives
    "mesh": "kvp=2",
    "dtype": "float32",  # in which tokens are the same wherever KV lies
    "max_model_len": 4096,
    "lane_tokens": None,
    "chunk_tokens": 128,  # less than all questions have: one lane cannot take them all
    "max_seqs": 16,
    "max_tokens": 48,
    "long": 2000,
    "pages": 700,
    "profile": "none",
    "compile_all": False,
}
VARIANTS = {"on one lane": False, "copied to both": True}  # values of prefix_copies
QUESTIONS = (
    "What is this text about?",
    "Which names does it define?",
    "Sum it up in one sentence.",
    "What comes first in it?",
)
POLL_SECONDS = 0.2

Document = Callable[[Any, int], Awaitable[list[int]]]


@dataclasses.dataclass
class Answer:
    """One user's answer. first, last: seconds from the question to the first and the last token."""

    name: str
    first: float = 0.0
    last: float = 0.0
    ids: list[int] = dataclasses.field(default_factory=list)
    finished: Finished | None = None


@dataclasses.dataclass
class Reads:
    """Reads and copies by lane, from the live page of a server.

    by_lane: blocks that its steps read on each, summed over all looks at it. copied: pages whose
    block other lanes have too, at most.
    """

    by_lane: list[int] = dataclasses.field(default_factory=list)
    copied: int = 0

    def add(self, view: Mapping[str, Any]) -> None:
        """Adds one look at the live page."""
        reads = view.get("reads", [])
        if reads:
            self.by_lane = [*map(sum, zip(self.by_lane or [0] * len(reads), reads))]
        self.copied = max(self.copied, sum(view.get("copied", [])))

    def shares(self) -> str:
        """The share of all reads that each lane had."""
        whole = sum(self.by_lane) or 1
        return " / ".join(f"{100 * reads / whole:.0f} %" for reads in self.by_lane)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The answers of all users who asked at once, and what the lanes read meanwhile."""

    answers: Sequence[Answer]
    reads: Reads

    @property
    def failed(self) -> bool:
        return any(answer.finished is None for answer in self.answers)

    def row(self, name: str) -> list[str]:
        done = [answer for answer in self.answers if answer.finished is not None]
        if not done:
            return [name, *["-"] * 4]
        tokens = sum(len(answer.ids) for answer in done)
        return [
            name,
            f"{tokens / max(answer.last for answer in done):.1f}",
            f"{statistics.median(answer.first for answer in done):.2f} s",
            self.reads.shares(),
            str(self.reads.copied),
        ]


HEADERS = ["the document's KV", "tokens/s", "TTFT p50", "reads by lane", "pages of copies"]


def run(values: Mapping[str, Any], document: Document) -> int:
    """Runs the demo. values: flags of `jaxserve demo`. document: makes a text of a number of
    tokens, by a client of the server. Returns an exit code. Errors: ConfigError."""
    given = getattr(values, "origins", {})
    settings = {**values, **{name: DEFAULTS[name] for name in DEFAULTS if name not in given}}
    print(f"{settings['model']} on two lanes: {USERS} users ask about one document", flush=True)
    outcomes = {}
    with contextlib.ExitStack() as stack:
        starting = {
            name: stack.enter_context(
                starting_server({**settings, "prefix_copies": copies}, cpu_devices(2))
            )
            for name, copies in VARIANTS.items()
        }
        waiting = Waiting("loading and compiling")
        servers = {name: server.ready(waiting) for name, server in starting.items()}
        waiting.done()
        for name, server in servers.items():
            print(f"\n{name}; live page: {server.url}/", flush=True)
            outcomes[name] = asyncio.run(talk(server, settings, document))
    print("\n" + table(HEADERS, [outcome.row(name) for name, outcome in outcomes.items()]))
    equal = same(*outcomes.values())
    print("The tokens are the same." if equal else "THE TOKENS DIFFER")
    print("Lanes here share the cores; on devices of their own each reads beside the other.")
    return int(not equal or any(outcome.failed for outcome in outcomes.values()))


def same(one: Outcome, other: Outcome) -> bool:
    """Returns whether all users got the same tokens twice."""
    return [answer.ids for answer in one.answers] == [answer.ids for answer in other.answers]


async def talk(server: OwnServer, values: Mapping[str, Any], document: Document) -> Outcome:
    """Has one user ask about the document, then all at once, and shows their answers as they
    come."""
    from jaxserve.server.client import AsyncClient

    sampling = SamplingParams(temperature=0, max_tokens=values["max_tokens"], ignore_eos=True)
    reads = Reads()
    async with AsyncClient(server.grpc) as client:
        text = await client.detokenize(await document(client, values["long"]))
        prompts = [
            [{"role": "user", "content": f"{text}\n\n{QUESTIONS[user % len(QUESTIONS)]} ({user})"}]
            for user in range(USERS)
        ]
        await _ask(client, Answer("first"), prompts[0], sampling, None)
        answers = [Answer(f"user {user + 1}") for user in range(USERS)]
        view = Streams([answer.name for answer in answers])
        watching = asyncio.create_task(_watch(server.url, reads))
        errors = await asyncio.gather(
            *(
                _ask(client, answer, prompt, sampling, view)
                for answer, prompt in zip(answers, prompts)
            ),
            return_exceptions=True,
        )
        watching.cancel()
        view.close()
    for answer, error in zip(answers, errors):
        if error is not None:
            print(f"{answer.name}: {error}", file=sys.stderr)
    return Outcome(answers, reads)


async def _ask(
    client: Any, answer: Answer, prompt: Any, sampling: SamplingParams, view: Streams | None
) -> None:
    began = time.monotonic()
    async for output in client.generate(prompt, sampling):
        match output:
            case Delta():
                answer.last = time.monotonic() - began
                answer.first = answer.first or answer.last
                answer.ids += output.ids
                if view is not None:
                    view.add(answer.name, output.text)
            case Finished():
                answer.finished = output
                if view is not None:
                    view.end(answer.name, f"done: {output.usage.completion} tokens")


async def _watch(url: str, reads: Reads) -> None:
    """Looks at the live page again and again."""
    while True:
        reads.add(await asyncio.to_thread(page_data, url))
        await asyncio.sleep(POLL_SECONDS)
