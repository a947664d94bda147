"""`jaxserve soak`: puts hours of mixed load on a server and looks for leaks.

Callers of every kind are drawn at random: some read to the end, over HTTP and gRPC, some hang up or
reset the connection in the middle, some send malformed requests, some want structured output, and
now and then there are more than the server can take. Once a minute the server's memory, threads,
descriptors and pages are recorded. At the end, without requests, all pages must be free or cached.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import socket
import struct
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.api.errors import RequestError
from jaxserve.api.sampling import SamplingParams
from jaxserve.cli.display import table
from jaxserve.cli.engine_flags import engine_groups
from jaxserve.cli.own_server import OwnServer, own_server
from jaxserve.observe.machine import described, machine
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema.engine import SERVED

ABOUT = """\
A server is started on this machine with the flags below, in a process of its own. Exit code 1
where anything was left behind: a page, a request, or more memory, threads or descriptors than the
noise of a run explains.

  jaxserve soak --minutes=30 --json=soak.json
"""
LOAD = [
    Option("minutes", float, 30.0, "how long", 0.1),
    Option("callers", int, 8, "callers at once; a crowd is eight times as many", 1, 1000),
    Option("prompt_tokens", int, 200, "most tokens of a prompt", 1),
    Option("output_tokens", int, 48, "most tokens of an output", 1),
    Option("seed", int, 0, "of everything that is drawn", 0),
    Option("json", str, None, "file for all figures"),
]
WARM_UP = 0.25  # share of the run that is not judged: caches and pools fill
RSS_MIB_PER_HOUR = 60.0  # growth that counts as a leak
LONG_ENOUGH = 0.25  # hours after the warm-up: before, memory is not judged
CROWD = 0.005  # probability that a caller brings eight times as many
WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "is",
    "that",
    "for",
    "it",
    "was",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "at",
    "be",
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
BAD = [
    b"",
    b"{",
    b'{"prompt": 5}',
    b'{"prompt": "x", "temperature": -1}',
    b'{"prompt": "x", "n": 1000000000}',
    b'{"prompt": "x", "nope": 1}',
    b'{"prompt": [999999999]}',
    b'{"prompt": "x", "structured_outputs": {"regex": "(("}}',
    b"\x80\x04K\x01.",
    b'{"prompt": "x", "model": "y"}',
]


@dataclasses.dataclass
class SoakSample:
    """The server at one moment."""

    minute: float
    rss_mib: float
    threads: int
    descriptors: int
    running: int
    waiting: int
    pages_held: float


def run(values: dict[str, Any]) -> int:
    with own_server(values) as server:
        samples, outcomes = asyncio.run(Soak(server, values).run())
    faults = faults_of(samples)
    print(report(samples, outcomes, faults))
    if values["json"]:
        Path(values["json"]).write_text(
            json.dumps(
                {
                    "machine": machine(),
                    "flags": values,
                    "outcomes": outcomes,
                    "faults": faults,
                    "samples": [dataclasses.asdict(s) for s in samples],
                },
                indent=1,
            )
        )
    return 1 if faults else 0


def faults_of(samples: list[SoakSample]) -> list[str]:
    """Returns what was left behind. The last sample was taken without requests."""
    last = samples[-1]
    warm = _warm(samples)
    faults = []
    if last.running or last.waiting:
        faults.append(f"{last.running} requests run and {last.waiting} wait, without clients")
    if last.pages_held:
        faults.append(f"{last.pages_held:.2%} of the pages are held, without clients")
    growth = growth_of(samples)
    hours = (warm[-1].minute - warm[0].minute) / 60
    if growth > RSS_MIB_PER_HOUR and hours >= LONG_ENOUGH:
        faults.append(f"memory grows by {growth:.0f} MiB an hour")
    for name in ("threads", "descriptors"):
        first = getattr(warm[0], name)
        after = getattr(last, name)
        if after > first + 10:
            faults.append(f"{name}: {first} before, {after} after")
    return faults


def _warm(samples: list[SoakSample]) -> list[SoakSample]:
    """Returns the samples after the warm-up."""
    return samples[max(1, int(WARM_UP * len(samples))) :]


def growth_of(samples: list[SoakSample]) -> float:
    """Returns the growth of memory in MiB an hour, after the warm-up and while there were
    callers."""
    busy = _warm(samples)[:-1]
    return slope([s.minute for s in busy], [s.rss_mib for s in busy]) * 60


def slope(x: list[float], y: list[float]) -> float:
    """Returns the slope of the least-squares line; 0 for fewer than three points."""
    if len(x) < 3:
        return 0.0
    return float(np.polyfit(x, y, 1)[0])


def report(samples: list[SoakSample], outcomes: dict[str, int], faults: list[str]) -> str:
    rows = [
        [
            f"{s.minute:.1f}",
            f"{s.rss_mib:.0f}",
            *map(str, (s.threads, s.descriptors, s.running, s.waiting)),
            f"{s.pages_held:.1%}",
        ]
        for s in samples
    ]
    shown = rows
    if len(rows) > 12:
        shown = [*rows[:: max(1, len(rows) // 10)], rows[-1]]
    return "\n".join(
        [
            described(machine()),
            "",
            table(
                ["minute", "RSS MiB", "threads", "descriptors", "running", "waiting", "pages held"],
                shown,
            ),
            "",
            f"after the first {WARM_UP:.0%}: {growth_of(samples):+.1f} MiB an hour",
            "requests: " + ", ".join(f"{name} {count}" for name, count in sorted(outcomes.items())),
            "left behind: " + ("; ".join(faults) or "nothing"),
        ]
    )


class Soak:
    """Callers of every kind until the time is up."""

    def __init__(self, server: OwnServer, values: dict[str, Any]):
        self._server = server
        self._values = values
        self._address = urlsplit(server.url)
        self._dice = random.Random(values["seed"])
        self._outcomes: Counter[str] = Counter()
        self._crowd: set[asyncio.Task[None]] = set()
        self._kinds = {
            "http": 4,
            "http_stream": 4,
            "grpc": 4,
            "hang_up": 3,
            "reset": 3,
            "cancel": 3,
            "wrong": 2,
            "schema": 1,
            "scrape": 1,
        }

    async def run(self) -> tuple[list[SoakSample], dict[str, int]]:
        from jaxserve.server.client import AsyncClient

        began = time.monotonic()
        samples = [await self._sample(0.0)]
        until = began + 60 * self._values["minutes"]
        async with AsyncClient(self._server.grpc) as self._client:
            callers = [
                asyncio.create_task(self._caller(until)) for _ in range(self._values["callers"])
            ]
            period = min(60.0, (until - began) / 20)
            while (seconds := until - time.monotonic()) > 0:
                await asyncio.sleep(min(seconds, period))
                samples.append(await self._sample((time.monotonic() - began) / 60))
                ended = sum(self._outcomes.values())
                print(
                    f"minute {samples[-1].minute:.1f}: {samples[-1].rss_mib:.0f} MiB, {ended} "
                    "requests",
                    file=sys.stderr,
                )
            await asyncio.gather(*callers, *self._crowd)
        await self._quiet()
        samples.append(await self._sample((time.monotonic() - began) / 60))
        return samples, dict(self._outcomes)

    async def _caller(self, until: float) -> None:
        while time.monotonic() < until:
            if self._dice.random() < CROWD and not self._crowd:
                for _ in range(7 * self._values["callers"]):
                    task = asyncio.create_task(self._one("http"))
                    self._crowd.add(task)
                    task.add_done_callback(self._crowd.discard)
            await self._one(self._dice.choices(list(self._kinds), list(self._kinds.values()))[0])
            await asyncio.sleep(self._dice.expovariate(5.0))

    async def _one(self, kind: str) -> None:
        try:
            async with asyncio.timeout(300):
                outcome = await getattr(self, f"_{kind}")()
        except (OSError, TimeoutError) as error:
            outcome = type(error).__name__
        self._outcomes[f"{kind} {outcome}"] += 1

    async def _http(self) -> str:
        return (await self._post(self._body()))[0]

    async def _http_stream(self) -> str:
        status, body = await self._post(self._body(stream=True))
        if status == "200" and b"[DONE]" not in body:
            return "200 with an error event"
        return status

    async def _schema(self) -> str:
        status, body = await self._post(
            self._body(structured_outputs={"json": SCHEMA}, max_tokens=100, temperature=1.0)
        )
        if status != "200":
            return status
        choice = json.loads(body)["choices"][0]
        if choice["finish_reason"] == "stop":
            json.loads(choice["text"])  # raises where it is no JSON: the run ends
        return status

    async def _grpc(self) -> str:
        return await self._generate(10**9)

    async def _cancel(self) -> str:
        return await self._generate(self._dice.randrange(12))

    async def _wrong(self) -> str:
        return (await self._post(self._dice.choice(BAD)))[0]

    async def _scrape(self) -> str:
        return (await self._get("/metrics"))[0]

    async def _hang_up(self) -> str:
        return await self._leave(linger=False)

    async def _reset(self) -> str:
        return await self._leave(linger=True)

    async def _generate(self, events: int) -> str:
        """Reads `events` events, then leaves."""
        sampling = SamplingParams(
            temperature=self._dice.choice((0, 1)),
            max_tokens=self._dice.randint(1, self._values["output_tokens"]),
        )
        outputs = self._client.generate(
            self._text(), sampling, timeout=self._dice.choice((None, None, None, 0.5))
        )
        try:
            async for _ in outputs:
                events -= 1
                if events < 0:
                    return "left"
        except RequestError as error:
            return error.status
        finally:
            await outputs.aclose()  # type: ignore[attr-defined]
        return "OK"

    async def _leave(self, linger: bool) -> str:
        """Sends a request and goes at a random moment, some with a reset."""
        reader, writer = await self._send(
            "POST", "/v1/completions", self._body(stream=self._dice.random() < 0.5)
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._dice.random() * 0.8):
                await reader.read()
        if linger:
            writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            writer.transport.abort()
        writer.close()
        return "left"

    def _text(self) -> str:
        return " ".join(
            self._dice.choices(WORDS, k=self._dice.randint(1, self._values["prompt_tokens"]))
        )

    def _body(self, **fields: Any) -> bytes:
        plain = {
            "prompt": self._text(),
            "max_tokens": self._dice.randint(1, self._values["output_tokens"]),
            "temperature": 0,
        }
        return json.dumps({**plain, **fields}).encode()

    async def _post(self, body: bytes) -> tuple[str, bytes]:
        return await self._whole(*await self._send("POST", "/v1/completions", body))

    async def _get(self, path: str) -> tuple[str, bytes]:
        return await self._whole(*await self._send("GET", path, b""))

    async def _whole(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[str, bytes]:
        """The status and what follows the header."""
        data = await reader.read()
        writer.close()
        head, _, body = data.partition(b"\r\n\r\n")
        return (head.split()[1].decode() if head else "closed"), body

    async def _send(
        self, method: str, path: str, body: bytes
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(
            self._address.hostname, self._address.port, limit=1 << 20
        )
        writer.write(
            f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: "
            "application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        return reader, writer

    async def _quiet(self) -> None:
        """Returns once nothing runs, or after a minute."""
        for _ in range(120):
            sample = await self._sample(0.0)
            if not sample.running and not sample.waiting:
                return
            await asyncio.sleep(0.5)

    async def _sample(self, minute: float) -> SoakSample:
        _, body = await self._get("/metrics")
        values = {
            sample.name: sample.value
            for family in text_string_to_metric_families(body.decode())
            for sample in family.samples
        }
        status = dict(
            line.split(":", 1)
            for line in Path(f"/proc/{self._server.pid}/status").read_text().splitlines()
        )
        return SoakSample(
            minute,
            int(status["VmRSS"].split()[0]) / 1024,
            int(status["Threads"]),
            len(os.listdir(f"/proc/{self._server.pid}/fd")),
            int(values["jaxserve:num_requests_running"]),
            int(values["jaxserve:num_requests_waiting"]),
            values["jaxserve:kv_cache_usage_perc"],
        )


COMMAND = Command({"load": LOAD, **engine_groups(**SERVED)}, run, ABOUT, argument="[MODEL]")
