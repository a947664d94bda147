"""`jaxserve demo --cluster`: two replicas that prefill, two that decode and a conductor on this
machine; several users ask about one long document."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.api.events import Finished
from jaxserve.api.sampling import SamplingParams
from jaxserve.cli.display import Streams, table
from jaxserve.cli.engine_flags import ALL, engine_config
from jaxserve.cli.own_server import SignalsExit, flag, page_data
from jaxserve.group.child import Child
from jaxserve.group.own_code import own_command
from jaxserve.progress import progress_bar
from jaxserve.settings.schema import ConfigError
from jaxserve.text.output import Delta

DEFAULTS = {  # of settings that no flag gives: four processes share the machine
    "mesh": ALL["mesh"].default,
    "dtype": "float32",  # products of few rows in bfloat16 are slow on CPUs
    "lane_tokens": None,
    "chunk_tokens": 256,
    "pages": 320,
    "host_cache_gib": 0.5,
    "profile": "none",
    "policy": "fcfs",
    "chunking": "static",
    "admission": "queue",
}
ROLES = {"prefill": 2, "decode": 2}
# all compile the same programs, but for what others have stored in the cache by then
START_SECONDS = 900.0
ASK_SECONDS = 600.0  # for a question
STOP_SECONDS = 20.0  # for the cluster to end by itself
POLL_SECONDS = 0.2
LOG_LINES = 20  # of a cluster that did not start, that are shown
QUESTIONS = (
    "What is this text about?",
    "Which names does it define?",
    "Sum it up in one sentence.",
)

Document = Callable[[Any, int], Awaitable[list[int]]]


@dataclasses.dataclass
class Ask:
    """One user's question about the document. first: seconds from its sending to the first
    token."""

    name: str
    prompt: Any
    first: float = 0.0
    finished: Finished | None = None

    def row(self) -> list[str]:
        if self.finished is None:
            return [self.name, *["-"] * 3, "failed"]
        usage = self.finished.usage
        first = f"{self.first:.2f} s"
        return [self.name, str(usage.prompt), str(usage.cached), first, self.finished.reason]


@dataclasses.dataclass(frozen=True)
class Addresses:
    """Addresses of a running cluster's conductor."""

    grpc: str
    http: str


def run(values: Mapping[str, Any], document: Document) -> int:
    """Runs the demo. values: flags of `jaxserve demo`. document: makes a text of a number of
    tokens, by a client of the cluster. Returns an exit code. Errors: ConfigError."""
    settings = {**values, **_defaults(values)}
    roles = ", ".join(f"{number} that {role}" for role, number in ROLES.items())
    print(f"{settings['model']}: replicas on this machine, {roles}, and a conductor")
    print("they load and compile the model, which takes minutes at the first start", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="jaxserve-demo-") as folder,
        cluster(settings, Path(folder)) as addresses,
    ):
        print(f"serving on {addresses.grpc}; live page: {addresses.http}/\n", flush=True)
        return asyncio.run(talk(addresses, settings, document))


def _defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    origins = getattr(values, "origins", {})
    return {name: value for name, value in DEFAULTS.items() if name not in origins}


# --- the cluster


@contextlib.contextmanager
def cluster(values: Mapping[str, Any], folder: Path) -> Iterator[Addresses]:
    """Runs `jaxserve cluster` within the block, which begins when all replicas take requests.
    folder: for its addresses and its log. However the block ends, the cluster is ended before this
    returns. Errors: ConfigError for settings that cannot be used, and where it does not start in
    START_SECONDS."""
    engine_config(values)  # mistakes are reported under this command's name
    ports, log = folder / "ports.json", folder / "log"
    with SignalsExit() as signals, log.open("wb") as out:
        process = Child(cluster_command(values, ports), os.environ, stdout=out, stderr=out)
        try:
            signals.arm()
            yield _started(process, ports, log)
        finally:
            _end(process)


def cluster_command(values: Mapping[str, Any], ports: Path) -> list[str]:
    roles = [f"--{role}={number}" for role, number in ROLES.items()]
    ours = ["--grpc_port=0", "--port=0", f"--port_file={ports}", "--drain_timeout=1"]
    names = [name for name in ALL if name != "role" and values[name] is not None]
    flags = [flag(name, values[name]) for name in names]
    return own_command("jaxserve", "cluster", *roles, *ours, *flags)


def _started(process: Child, ports: Path, log: Path) -> Addresses:
    """Waits until all replicas take requests, and shows for what. Errors: ConfigError."""
    deadline = time.monotonic() + START_SECONDS
    show = sys.stderr.isatty()
    with progress_bar("starting", 1 + sum(ROLES.values()), show) as step:
        while not ports.exists():
            _check(process, log, deadline)
        addresses = Addresses(**json.loads(ports.read_text()))
        step("the conductor listens")
        usable: set[str] = set()
        while len(usable) < sum(ROLES.values()):
            _check(process, log, deadline)
            for member in _members(addresses):
                if member["usable"] and member["name"] not in usable:
                    usable.add(member["name"])
                    step(f"{member['name']}, which is to {member['role']}")
                    if not show:
                        print(f"replica {member['name']} is ready to {member['role']}", flush=True)
    return addresses


def _check(process: Child, log: Path, deadline: float) -> None:
    """Waits a little. Errors: ConfigError where the cluster has ended, or does not start in
    time."""
    time.sleep(POLL_SECONDS)
    if process.code is None and time.monotonic() < deadline:
        return
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    print("\n".join(lines), file=sys.stderr)
    why = "did not start" if process.code is not None else f"not ready in {START_SECONDS:g} s"
    raise ConfigError("cluster", f"the cluster {why}; its last lines are above")


def _end(process: Child) -> None:
    """Ends the cluster: by itself if it does so in STOP_SECONDS. What it has started ends with
    it."""
    process.signal(signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    try:
        while process.code is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    finally:
        process.kill()


def _members(addresses: Addresses) -> list[dict[str, Any]]:
    """The replicas as the live page shows them; none before the conductor knows one."""
    return page_data(addresses.http).get("members", [])


# --- the users


async def talk(addresses: Addresses, values: Mapping[str, Any], document: Document) -> int:
    """Has one user ask about the document, then several at once; shows the answers as they come,
    and ends with tables. Returns an exit code."""
    from jaxserve.server.client import AsyncClient

    ids_only = values["model"].startswith("random:")
    sampling = SamplingParams(temperature=0, max_tokens=values["max_tokens"], ignore_eos=ids_only)
    async with AsyncClient(addresses.grpc) as client:
        prompts = await _prompts(client, values["long"], document, ids_only)
        asks = [Ask(f"user {number + 1}", prompt) for number, prompt in enumerate(prompts)]
        print(f"a document of {values['long']} tokens; who asks first, then the others at once")
        errors: list[BaseException | None] = []
        for group in (asks[:1], asks[1:]):
            view = Streams([ask.name for ask in group])
            errors += await asyncio.gather(
                *(_answer(client, ask, sampling, view, ids_only) for ask in group),
                return_exceptions=True,
            )
            view.close()
    members = await asyncio.to_thread(_members, addresses)
    print("\n" + summary(asks, members), flush=True)
    for ask, error in zip(asks, errors):
        if error is not None:
            print(f"{ask.name}: {error}", file=sys.stderr)
    return int(any(errors))


async def _prompts(client: Any, tokens: int, document: Document, ids_only: bool) -> list[Any]:
    """The document with one question behind it, for each user."""
    if ids_only:  # a random model has no text
        text = list(range(2, 130)) * (tokens // 128 + 1)
        return [[*text[:tokens], number + 3, 2] for number in range(len(QUESTIONS) + 1)]
    ids = await document(client, tokens)
    text = await client.detokenize(ids)
    questions = (QUESTIONS[0], *QUESTIONS)
    return [[{"role": "user", "content": f"{text}\n\n{question}"}] for question in questions]


async def _answer(
    client: Any, ask: Ask, sampling: SamplingParams, view: Streams, ids_only: bool
) -> None:
    began = time.monotonic()
    answer = client.generate(ask.prompt, sampling, timeout=ASK_SECONDS, ids_only=ids_only)
    async for output in answer:
        match output:
            case Delta():
                if not ask.first:
                    ask.first = time.monotonic() - began
                    view.note(ask.name, f"first token after {ask.first:.2f} s")
                view.add(ask.name, "".join(f"{id} " for id in output.ids) * ids_only or output.text)
            case Finished():
                ask.finished = output
                view.end(ask.name, f"done: {output.usage.completion} tokens")


# --- the tables


def summary(asks: Sequence[Ask], members: Sequence[Mapping[str, Any]]) -> str:
    """Tables of requests, of prompt tokens that were not computed, and of transfers. members: as
    the live page shows them."""
    first = asks[0].first
    later = [ask.first for ask in asks[1:] if ask.finished is not None]
    mean = "-"
    if later:
        mean = f"{sum(later) / len(later):.2f} s"
    parts = [
        table(["request", "prompt", "cached", "TTFT", "ended by"], [ask.row() for ask in asks]),
        f"first token: {first:.2f} s for who asked first, {mean} (mean) for the others",
        "prompt tokens that replicas did not compute, by where their KV was:",
        table(["replica", "role", "device", "host", "disk", "other replica"], _hits(members)),
        "KV between replicas:",
        table(["from", "to", "blocks", "MiB", "seconds"], _transfers(members)),
    ]
    return "\n\n".join(parts)


def _hits(members: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Counts hits by tier; those of no other tier were on the devices."""
    rows = []
    for member in members:
        kv = member["kv"] or {}
        below = [kv.get(name, 0) for name in ("from_host", "from_disk", "from_peers")]
        device = max(0, kv.get("hit_tokens", 0) - sum(below))
        rows.append([member["name"], member["role"], *map(str, (device, *below))])
    return rows


def _transfers(members: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [
        [
            one["source"],
            member["name"],
            str(one["blocks"]),
            f"{one['bytes'] / 2**20:.1f}",
            f"{one['seconds']:.2f}",
        ]
        for member in members
        for one in (member["kv"] or {}).get("fetched", ())
    ]
