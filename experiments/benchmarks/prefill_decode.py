"""Bursts of prompts on replicas that prefill for others that decode, beside as many mixed ones.

    python -m experiments.benchmarks.prefill_decode --prompts=17,60,300 --json=prefill_decode.json

Two clusters of `jaxserve cluster` take turns: one that prefills and others that decode, and mixed
replicas, as many. In each round all prompts of a burst are sent at once, no two of which have a
common prefix. Of each request it is known how much of its prompt was not computed where it was
decoded; all replicas together say how many tokens of prompts they computed. So a prompt was
fetched, computed where it was decoded, or both: computed twice.

The verdict: every prompt is answered, no request is refused, and at most `--twice` of the prompts
are computed twice. Times are those of this machine, whose cores all replicas share.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.script import command_line, keep
from jaxserve.api.sampling import SamplingParams
from jaxserve.cli.display import table
from jaxserve.observe.machine import described, machine
from jaxserve.server.client import AsyncClient, Client, ServerError
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.text.output import Delta, Finished

OPTIONS = {
    "prefill_decode": [
        Option("model", str, "random:tiny", "model: a fetched name, a folder or a .gguf file"),
        Option("prompts", str, "17,60,300,1000", "prompts of a burst, as N,N"),
        Option("tokens", int, 800, "of a prompt", 64),
        Option("answer", int, 8, "tokens of an answer", 2),
        Option("prefill", int, 1, "replicas that prefill", 1),
        Option("decode", int, 2, "replicas that decode", 1),
        Option("rounds", int, 3, "of all bursts on both clusters", 1),
        Option("twice", float, 0.01, "share of the prompts that may be computed twice", 0.0),
        Option("slots", int, 16, "sequences that run at once on a replica", 1),
        Option("first_port", int, 23500, "of two ports that are free for each cluster", 1),
        Option("limit", float, 300.0, "seconds that a burst may take"),
        Option("json", str, None, "file for all figures"),
    ]
}
START_SECONDS = 180.0
STOP_SECONDS = 30.0
COMPUTED = "chunk_size_tokens_sum"  # tokens of prompts that were computed
FETCHED = "kv_blocks_from_peers_total"
COUNTS = ("fetched", "computed", "twice", "refused", "failed")
TIMES = ("ttft", "late", "seconds")


@dataclass(frozen=True)
class Ended:
    """A request's end. status: of its error, "" without one. ttft: seconds; cached: tokens of its
    prompt that were not computed where it was decoded."""

    status: str
    ttft: float = 0.0
    cached: int = 0


@dataclass(frozen=True)
class Burst:
    """Requests of one burst, by what became of them. ttft: median seconds; late: the 99th of 100;
    seconds: to the last end; blocks: of KV that came from other replicas."""

    fetched: int
    computed: int
    twice: int
    refused: int
    failed: int
    ttft: float
    late: float
    seconds: float
    blocks: int


class Cluster:
    """`jaxserve cluster` with these replicas, on two given ports."""

    def __init__(self, values: dict[str, Any], replicas: dict[str, int], port: int, log: Path):
        self.target = f"127.0.0.1:{port}"
        self._url = f"http://127.0.0.1:{port + 1}/metrics"
        length = values["tokens"] + values["answer"] + 16
        pages = 2 * values["slots"] * -(-length // 16)
        command = [
            sys.executable, "-m", "jaxserve", "cluster", f"--model={values['model']}",
            *(f"--{role}={count}" for role, count in replicas.items()),
            f"--grpc_port={port}", f"--port={port + 1}", "--dtype=float32", "--block_size=16",
            f"--max_model_len={length}", f"--max_seqs={values['slots']}", "--chunk_tokens=512",
            f"--pages={pages}", "--host_cache_gib=4", "--profile=none", "--policy=fcfs",
            "--admission=queue", "--max_queue=4096", "--nocompile_all",
        ]  # fmt: skip
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out)

    def ready(self, replicas: int) -> None:
        """Waits until all replicas take requests. Errors: TimeoutError."""
        with Client(self.target) as client:
            client.wait_ready(START_SECONDS)
        until = time.monotonic() + START_SECONDS
        while (
            len(re.findall(r"^jaxserve:replica_alive\{.*\} 1\.0$", self._page(), re.M)) < replicas
        ):
            if time.monotonic() > until:
                raise TimeoutError(f"not all replicas are ready after {START_SECONDS} s")
            time.sleep(0.2)

    def _page(self) -> str:
        return urllib.request.urlopen(self._url, timeout=20).read().decode()

    def count(self, name: str) -> float:
        """Sums a counter over all replicas."""
        found = re.findall(rf"^jaxserve:{name}(?:\{{.*\}})? (\S+)$", self._page(), re.M)
        return sum(map(float, found))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        self.process.kill()


async def ask(client: AsyncClient, prompt: list[int], values: dict[str, Any]) -> Ended:
    sampling = SamplingParams(temperature=0, max_tokens=values["answer"], ignore_eos=True)
    sent = time.monotonic()
    ttft = 0.0
    cached = 0
    try:
        outputs = client.generate(prompt, sampling, timeout=values["limit"], ids_only=True)
        async for output in outputs:
            if isinstance(output, Delta):
                ttft = ttft or time.monotonic() - sent
            elif isinstance(output, Finished):
                cached = output.usage.cached
    except ServerError as error:
        return Ended(error.status)
    return Ended("", ttft, cached)


async def burst(target: str, prompts: Sequence[list[int]], values: dict[str, Any]) -> list[Ended]:
    """Sends all prompts at once; returns their ends."""
    async with AsyncClient(target) as client:
        return await asyncio.gather(*(ask(client, prompt, values) for prompt in prompts))


def measure(cluster: Cluster, count: int, seed: int, values: dict[str, Any]) -> Burst:
    rng = np.random.default_rng(seed)
    size = values["tokens"]
    prompts = rng.integers(20, 500, (count, size)).tolist()
    computed, blocks = cluster.count(COMPUTED), cluster.count(FETCHED)
    began = time.monotonic()
    ends = asyncio.run(burst(cluster.target, prompts, values))
    seconds = time.monotonic() - began
    # jobs of prompts that were computed elsewhere meanwhile may still be running
    time.sleep(1.0)
    computed = cluster.count(COMPUTED) - computed
    served = [end for end in ends if not end.status]
    fetched = sum(end.cached > size / 2 for end in served)
    decoding = sum(size - end.cached for end in served)
    elsewhere = max(computed - decoding, 0.0) / size
    waits = [end.ttft for end in served] or [float("nan")]
    refused = sum(end.status == "RESOURCE_EXHAUSTED" for end in ends)
    return Burst(
        fetched,
        len(served) - fetched,
        max(round(elsewhere) - fetched, 0),
        refused,
        count - len(served) - refused,
        statistics.median(waits),
        float(np.quantile(waits, 0.99)),
        seconds,
        round(cluster.count(FETCHED) - blocks),
    )


@contextlib.contextmanager
def clusters(values: dict[str, Any], folder: Path) -> Iterator[dict[str, Cluster]]:
    """Runs both clusters within the block. In `mixed` no KV is moved."""
    prefill, decode = values["prefill"], values["decode"]
    kinds = {
        f"{prefill}P+{decode}D": {"prefill": prefill, "decode": decode},
        f"{prefill + decode} mixed": {"mixed": prefill + decode},
    }
    running: dict[str, Cluster] = {}
    try:
        for number, (name, replicas) in enumerate(kinds.items()):
            port = values["first_port"] + 2 * number
            running[name] = Cluster(values, replicas, port, folder / f"{number}.log")
            running[name].ready(prefill + decode)
        yield running
    finally:
        for cluster in running.values():
            cluster.stop()


def show(found: dict[tuple[str, int], list[Burst]]) -> None:
    """Prints sums of what became of the prompts, and medians of times."""
    rows = []
    for (name, count), bursts in found.items():
        totals = [sum(getattr(one, field) for one in bursts) for field in COUNTS]
        medians = [statistics.median(getattr(one, field) for one in bursts) for field in TIMES]
        times = [f"{seconds:.2f}" for seconds in medians]
        rows.append([name, str(count), *map(str, totals), *times])
    print(table(["cluster", "prompts", *COUNTS, *(f"{name} s" for name in TIMES)], rows))


def faults(found: dict[tuple[str, int], list[Burst]], share: float) -> list[str]:
    """Lists what the verdict finds wrong."""
    wrong = []
    for (name, count), bursts in found.items():
        for one in bursts:
            if one.refused or one.failed:
                wrong.append(f"{name}, {count} prompts: {one.refused} refused, {one.failed} failed")
            if one.twice > share * count:
                wrong.append(f"{name}, {count} prompts: {one.twice} computed twice")
    return wrong


def run(values: dict[str, Any]) -> int:
    counts = [int(count) for count in values["prompts"].split(",")]
    found: dict[tuple[str, int], list[Burst]] = {}
    with tempfile.TemporaryDirectory() as folder, clusters(values, Path(folder)) as both:
        for number, cluster in enumerate(both.values()):  # what is first used is slow
            measure(cluster, 8, number, values)
        for turn in range(values["rounds"]):
            for count in counts:
                for name, cluster in both.items():
                    one = measure(cluster, count, 1000 * turn + count, values)
                    found.setdefault((name, count), []).append(one)
                    print(name, count, json.dumps(asdict(one)), file=sys.stderr, flush=True)
    print(f"{described(machine())}\n{values['rounds']} rounds; times are medians of them\n")
    show(found)
    wrong = faults(found, values["twice"])
    keep(
        values,
        bursts={
            f"{name}, {count}": [asdict(one) for one in bursts]
            for (name, count), bursts in found.items()
        },
        faults=wrong,
    )
    print("\n" + ("\n".join(["WRONG:", *wrong]) if wrong else "all prompts were computed once"))
    return bool(wrong)


COMMAND = Command(OPTIONS, run, __doc__.partition("\n\n")[2] if __doc__ else "")
if __name__ == "__main__":
    sys.exit(
        command_line(
            "experiments.benchmarks.prefill_decode",
            "bursts of prompts on replicas that prefill for others",
            COMMAND,
            sys.argv[1:],
        )
    )
