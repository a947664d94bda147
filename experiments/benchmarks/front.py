"""Measures the cost of the fronts: tokens/s and time to first token through gRPC and HTTP, beside
the same engine used without them.

    python -m experiments.benchmarks.front --json=front.json

One process holds a tiny model's engine and its server. Callers without a front hand requests to the
engine from a thread of that process; those over gRPC and HTTP are in a process of their own. Each
of the callers sends its next request a random while after the last one ended, and asks for more
or less of an output, lest all keep step. The ways take turns in every round, with the same dice,
and a round's ratio is taken within it. How long a request waits depends on which others are there,
so what a front adds to the time to its first token is also taken request by request, beside what
was noted of the same one: the seconds from its arrival, when the front has parsed it, to the
engine's token.

On a machine without an accelerator the model needs the same few cores as fronts and callers:
--cores=1 leaves it one of them, in all ways, and the others to the host, as with an
accelerator. The engine without fronts is also measured beside a process that is as busy as they
were. How long the server's event loop was held up is measured all along, and how much of that its
thread could have run but had no core, as the operating system counts it: that part is the
machine's, the rest the server's.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import heapq
import itertools
import json
import logging
import math
import os
import pathlib
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers

from experiments.script import command_line, keep
from jaxserve.api.events import Event, Finished, Token
from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.cli.display import table
from jaxserve.llm import open_engine
from jaxserve.observe.machine import described, machine
from jaxserve.server import logs
from jaxserve.server.supervisor import Background
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option, make
from jaxserve.settings.schema import EngineConfig, ServerConfig
from jaxserve.text import Tokenizer

OPTIONS = {
    "front": [
        Option("concurrency", str, "8,64", "callers at once, as N,N"),
        Option("rounds", int, 7, "of all ways in turn", 1),
        Option("seconds", float, 4.0, "of each measurement", 0.5),
        Option("model", str, "random:tiny", "a model without weights"),
        Option("cores", int, None, "that the model computes on; all of them if absent", 1),
        Option("prompt", int, 1024, "tokens of a prompt", 1),
        Option("output", int, 128, "tokens of an output, on average", 2),
        Option("pause", float, 0.05, "seconds between a caller's requests, on average", 0),
        Option("json", str, None, "file for all figures"),
    ]
}
WAYS = ("engine", "beside", "grpc", "http")
FRONTS = WAYS[2:]
BEFORE = 1.0  # seconds of calls before a measurement begins
TICK = 0.005  # seconds between looks at the event loop
SLICE = 0.005  # seconds in which a busy process is busy once
WORKER = "--worker"
IDS = (3, 256)  # of prompts: from, to
LAST_CHUNK = b"0\r\n"
FIRST = 0x20000  # of characters that stand for ids


@dataclasses.dataclass
class Figures:
    """Figures of one measurement. ttft: seconds, as callers saw it, the mean over its requests: it
    has a peak for every number of prompts that may be ahead, and a median jumps between them.
    added: those of them before the request's arrival, as a front notes it, and after the engine's
    token; over: ttft to the rest; both as medians. cores: what the callers' process and the event
    loop took."""

    tokens_per_s: float
    ttft: float
    added: float
    over: float
    requests: int
    cores: float = 0.0


class TokenTally:
    """Tokens within a number of seconds, and the seconds to the first one of each request that was
    sent in them, by its id."""

    def __init__(self, seconds: float):
        self.began = time.perf_counter() + BEFORE
        self.tokens = 0
        self.firsts = dict[str, float]()
        self._seconds = seconds
        self.until = self.began + seconds

    def heard(self, id: str, sent: float, tokens: int) -> None:
        now = time.perf_counter()
        if self.began < now < self.until:
            self.tokens += tokens
        # whenever its first token came: those of slow ones count as well
        if self.began < sent < self.until:
            self.firsts.setdefault(id, now - sent)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self._seconds


def figures_of(
    tokens_per_s: float, firsts: Mapping[str, float], noted: Mapping[str, float], cores: float = 0.0
) -> Figures:
    """firsts: seconds to the first token of each request, by its id, as its caller saw them; noted:
    as the engine did."""
    found = [(ttft, noted[id]) for id, ttft in firsts.items() if id in noted]
    seen, own = np.array(found or [(math.nan, math.nan)]).T
    return Figures(
        tokens_per_s,
        float(seen.mean()),
        float(np.median(seen - own)),
        float(np.median(seen / own)),
        len(found),
        cores,
    )


class Noted(logging.Handler):
    """Log handler for what the engine notes of requests over a front: their seconds to the first
    token, by id."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.ttft: dict[str, float] = {}
        logs.log.setLevel(logging.INFO)
        logs.log.propagate = False
        logs.log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if "ttft" in (fields := record.fields):  # type: ignore[attr-defined]
            self.ttft[record.request_id] = fields["ttft"]  # type: ignore[attr-defined]


class InProcess:
    """Callers of the engine itself."""

    def __init__(self, engine: Any, prompt: int, output: int, pause: float):
        self._engine = engine
        self._prompt = prompt
        self._output = output
        self._pause = pause
        self._number = 0

    def measure(self, callers: int, seconds: float, seed: int) -> Figures:
        tally = TokenTally(seconds)
        done = queue.SimpleQueue[None]()
        noted = dict[str, float]()
        dice = np.random.default_rng(seed)
        due = [0.0] * callers  # a heap: when who pauses goes on
        while (now := time.perf_counter()) < tally.until:
            while due and due[0] <= now:
                heapq.heappop(due)
                self._submit(*drawn(self._prompt, self._output, dice), tally, done, noted)
            with contextlib.suppress(queue.Empty):
                done.get(timeout=max(0.0, min([tally.until, *due[:1]]) - now))
                heapq.heappush(due, time.perf_counter() + dice.exponential(self._pause))
        for _ in range(callers - len(due)):
            done.get()
        return figures_of(tally.tokens_per_s, tally.firsts, noted)

    def _submit(
        self,
        prompt: np.ndarray,
        output: int,
        tally: TokenTally,
        done: queue.SimpleQueue[None],
        noted: dict[str, float],
    ) -> None:
        self._number += 1
        id = f"r{self._number}"
        sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        sent = time.perf_counter()

        def sink(events: Sequence[Event]) -> None:
            for event in events:
                if isinstance(event, Token):
                    tally.heard(id, sent, 1)
                elif isinstance(event, Finished):
                    noted[id] = event.timing.first_token
                    done.put(None)

        self._engine.submit(
            Request.make(
                id,
                prompt,
                sampling,
                vocab=self._engine.info.vocab,
                max_len=self._engine.info.max_model_len,
                arrival=time.monotonic(),
            ),
            sink,
        )


def drawn(prompt: int, output: int, dice: np.random.Generator) -> tuple[np.ndarray, int]:
    """Draws the ids of a prompt, and the tokens of its output; both have these lengths on
    average."""
    return dice.integers(*IDS, prompt), int(
        dice.integers(output - output // 2, output + output // 2 + 1)
    )


async def over_grpc(
    client: Any, id: str, prompt: np.ndarray, output: int, tally: TokenTally
) -> None:
    from jaxserve.text.output import Delta

    sent = time.perf_counter()
    async for event in client.generate(
        prompt.tolist(),
        SamplingParams(temperature=0, max_tokens=output, ignore_eos=True),
        request_id=id,
    ):
        if isinstance(event, Delta):
            tally.heard(id, sent, len(event.ids))


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def over_http(
    address: tuple[str, int],
    idle: list[Connection],
    id: str,
    prompt: np.ndarray,
    output: int,
    tally: TokenTally,
) -> None:
    """Counts characters: every token of this tokenizer is one, but for those that are none. idle:
    connections that are open."""
    sent = time.perf_counter()
    body = json.dumps(
        {
            "prompt": prompt.tolist(),
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    reader, writer = idle.pop(0) if idle else await asyncio.open_connection(*address)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
        b"application/json\r\nx-request-id: %s\r\n"
        b"content-length: %d\r\n\r\n" % (id.encode(), len(body)) + body
    )
    while (line := await reader.readline()) != LAST_CHUNK:
        assert line, "the server closed the connection"
        if line.startswith(b"data: {"):
            tally.heard(id, sent, len(json.loads(line[6:])["choices"][0]["text"]))
    await reader.readline()
    idle.append((reader, writer))


async def worker(target: str, port: int, prompt: int, output: int, pause: float) -> None:
    """The process of those who call: reads 'way callers seconds seed busy' from its input, writes
    what they saw."""
    from jaxserve.server.client import AsyncClient

    loop = asyncio.get_running_loop()
    idle = list[Connection]()
    number = itertools.count()

    async def one(
        call: Callable[..., Awaitable[None]], tally: TokenTally, dice: np.random.Generator
    ) -> None:
        while time.perf_counter() < tally.until:
            await call(f"w{next(number)}", *drawn(prompt, output, dice), tally)
            await asyncio.sleep(dice.exponential(pause))

    async with AsyncClient(target) as client:
        calls: dict[str, Callable[..., Awaitable[None]]] = {
            "grpc": functools.partial(over_grpc, client),
            "http": functools.partial(over_http, ("127.0.0.1", port), idle),
        }
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            way, callers, seconds, seed, busy = line.split()
            tally = TokenTally(float(seconds))
            cpu = time.process_time()
            began = time.perf_counter()
            if way == "beside":
                be_busy(tally.until, float(busy))
                continue

            dice = np.random.default_rng(int(seed))
            ending = asyncio.gather(*(one(calls[way], tally, dice) for _ in range(int(callers))))
            await asyncio.sleep(tally.until - time.perf_counter())
            cores = (time.process_time() - cpu) / (time.perf_counter() - began)
            await ending
            while idle:  # the server closes those unused for a while
                idle.pop()[1].close()
            print(
                json.dumps(
                    {"tokens_per_s": tally.tokens_per_s, "firsts": tally.firsts, "cores": cores}
                ),
                flush=True,
            )


def be_busy(until: float, cores: float) -> None:
    """Takes so much of a core."""
    while (now := time.perf_counter()) < until:
        while time.perf_counter() < now + cores * SLICE:
            pass
        time.sleep(max(0.0, 1 - cores) * SLICE)


class FrontBench:
    """All ways to one engine. Made once its server is ready."""

    def __init__(self, server: Background, outside: subprocess.Popen, inside: InProcess):
        self._inside = inside
        self._input = outside.stdin
        self._output = outside.stdout
        self._noted = Noted()
        self._clock = time.pthread_getcpuclockid(server._thread.ident)  # type: ignore[arg-type]
        # by callers: the cores that fronts and callers took
        self._busy: dict[int, list[float]] = {}

    def measure(self, way: str, callers: int, seconds: float, seed: int = 0) -> Figures:
        if way == "engine":
            return self._inside.measure(callers, seconds, seed)
        busy = min(1.0, float(np.median(self._busy[callers]))) if way == "beside" else 0.0
        cpu = time.clock_gettime(self._clock)
        began = time.perf_counter()
        print(way, callers, seconds, seed, busy, file=self._input, flush=True)
        if way == "beside":
            figures = self._inside.measure(callers, seconds, seed)
            figures.cores = busy
            return figures
        seen = json.loads(self._output.readline())  # type: ignore[union-attr]
        cores = seen["cores"] + (time.clock_gettime(self._clock) - cpu) / (
            time.perf_counter() - began
        )
        figures = figures_of(seen["tokens_per_s"], seen["firsts"], self._noted.ttft, cores)
        self._busy.setdefault(callers, []).append(figures.cores)
        return figures

    def round(self, number: int, callers: int, seconds: float) -> dict[str, Any]:
        first = number % len(WAYS)
        found = {
            way: dataclasses.asdict(self.measure(way, callers, seconds, number))
            for way in WAYS[first:] + WAYS[:first]
        }
        return {"callers": callers, **found}


class Lag:
    """Delay of an event loop beyond what was asked of it, in seconds. worst: in all;
    own: without its thread's waits for a core, where the operating system counts them (Linux
    does, in the second number of schedstat)."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self.reset()
        loop.call_soon_threadsafe(self._begin)

    def reset(self) -> None:
        self.worst = self.own = 0.0

    def _begin(self) -> None:
        self._waits = pathlib.Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._look(self._loop.time(), self._waited())

    def _waited(self) -> float:
        return int(self._waits.read_text().split()[1]) / 1e9 if self._waits.exists() else 0.0

    def _look(self, due: float, waited: float) -> None:
        now = self._loop.time()
        until = self._waited()
        self.worst = max(self.worst, now - due)
        self.own = max(self.own, now - due - (until - waited))
        self._loop.call_at(now + TICK, self._look, now + TICK, until)


def tokenizer() -> Tokenizer:
    """A character for every id."""
    vocabulary = {chr(FIRST + id): id for id in range(0x10000)}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, chr(FIRST)))
    library.decoder = tokenizers.decoders.Metaspace(prepend_scheme="never")
    return Tokenizer(library, {})


def run(values: dict[str, Any]) -> int:
    if values["cores"] is not None:  # XLA's client for CPUs reads it when it is made
        os.environ["PJRT_NPROC"] = os.environ["NPROC"] = str(values["cores"])
    callers = [int(text) for text in values["concurrency"].split(",")]
    length = 2 * (values["prompt"] + values["output"])
    config = make(
        EngineConfig,
        {
            "model": values["model"],
            "max_model_len": length,
            "max_seqs": max(callers),
            "prefix_caching": False,
            "pages": 2 + max(callers) * length // 16,
            "profile": "none",
        },
    )
    with Background(
        ServerConfig(grpc_port=0, port=0),
        lambda: (open_engine(config, progress=False)[0], tokenizer()),
    ) as server:
        server.wait_ready()
        inside = InProcess(
            server.server.frontend.replica, values["prompt"], values["output"], values["pause"]
        )
        lag = Lag(server._loop)
        command = [
            sys.executable,
            "-m",
            "experiments.benchmarks.front",
            WORKER,
            server.target,
            str(server.server.ports["http"]),
            *(str(values[name]) for name in ("prompt", "output", "pause")),
        ]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as outside:
            bench = FrontBench(server, outside, inside)
            for count in callers:  # the first time for everything, and how busy the ways are
                bench.measure("engine", count, 1.0)
                for way in FRONTS:
                    bench.measure(way, count, 1.0)
            lag.reset()
            rounds = [
                bench.round(number, count, values["seconds"])
                for number in range(values["rounds"])
                for count in callers
            ]
            held = {"worst": lag.worst, "own": lag.own}
            outside.stdin.close()  # type: ignore[union-attr]
    print(report(rounds, held))
    keep(values, rounds=rounds, held=held)
    return 0


def report(rounds: Sequence[dict[str, Any]], held: Mapping[str, float]) -> str:
    rows = []
    for count in sorted({found["callers"] for found in rounds}):
        mine = [found for found in rounds if found["callers"] == count]
        for way in WAYS:
            cores, speed, wait, added = (
                float(np.median([found[way][name] for found in mine]))
                for name in ("cores", "tokens_per_s", "ttft", "added")
            )
            ratios = {
                name: [
                    [found[way][name] / found[peer][name] for found in mine] for peer in WAYS[:2]
                ]
                for name in ("tokens_per_s", "ttft")
            }
            rows.append(
                [
                    f"{count} callers, {way}",
                    f"{cores:.2f}",
                    f"{speed:.0f}",
                    *map(_spread, ratios["tokens_per_s"]),
                    f"{1000 * wait:.1f}",
                    *map(_spread, ratios["ttft"]),
                    f"{1000 * added:.1f}",
                    _spread([found[way]["over"] for found in mine]),
                ]
            )
    headers = [
        "",
        "cores",
        "tokens/s",
        "to engine",
        "to beside",
        "TTFT ms",
        "to engine",
        "to beside",
        "added ms",
        "to its engine's",
    ]
    said = (
        f"the event loop was held up at most {1000 * held['worst']:.1f} ms; without waits for a "
        f"core {1000 * held['own']:.1f} ms"
    )
    return "\n".join([described(machine()), "", table(headers, rows), "", said])


def _spread(ratios: Sequence[float]) -> str:
    return f"{np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])

if __name__ == "__main__":
    if WORKER in sys.argv:
        asyncio.run(
            worker(
                sys.argv[2],
                int(sys.argv[3]),
                int(sys.argv[4]),
                int(sys.argv[5]),
                float(sys.argv[6]),
            )
        )
    else:
        sys.exit(command_line("front", "what the fronts cost", COMMAND, sys.argv[1:]))
