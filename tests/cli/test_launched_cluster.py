"""Replicas of several processes (`jaxserve launch`) prefill and decode for each other behind a
conductor: tokens are the reference's, KV is fetched, and faults cost no answer."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from jaxserve.api.sampling import SamplingParams
from jaxserve.group.channel import lasting_ports
from jaxserve.server.client import Client
from tests.waiting import eventually

SECRET = "of the tests of launched clusters"
ENVIRONMENT = {**os.environ, "JAXSERVE_CLUSTER_SECRET": SECRET}
START_SECONDS = 400.0
COMMON = [
    "--dtype=float32", "--max_model_len=512", "--max_seqs=2", "--pages=80", "--profile=none",
    "--chunk_tokens=64",
    "--policy=fcfs", "--chunking=static", "--admission=queue", "--host_cache_gib=0.1",
    "--grpc_port=0", "--port=0",
]  # fmt: skip
FIRST_LAYERS = ("smollm2_first_layers", "golden_first_layers")
WHOLE = ("smollm2_gguf", "golden")


class Cluster:
    """Launched replicas and single ones, and their conductor. url: of the conductor's metrics."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path):
        self._stack = stack
        self._folder = folder
        self.processes: dict[str, subprocess.Popen] = {}
        self.addresses: dict[str, str] = {}
        self.url = ""

    def replica(self, name: str, *flags: str, workers: int = 0, launch: tuple[str, ...] = ()):
        """Starts a replica, of several processes if there are workers."""
        (port,) = lasting_ports(1, "127.0.0.1")
        self.addresses[name] = f"127.0.0.1:{port}"
        before = ["launch", f"--processes={workers}", *launch, "--"] if workers else []
        self._start(name, *before, "serve", *COMMON, f"--replica_port={port}", *flags)

    def conductor(self, model: str, *more: str) -> Client:
        """Starts a conductor of all replicas; returns a client of it once all can serve."""
        ports = lasting_ports(2, "127.0.0.1")
        replicas = ",".join(self.addresses.values())
        flags = [f"--grpc_port={ports[0]}", f"--port={ports[1]}", f"--replicas={replicas}"]
        self._start("conductor", "conductor", f"--model={model}", *flags, *more)
        self.url = f"http://127.0.0.1:{ports[1]}"
        client = self._stack.enter_context(Client(f"127.0.0.1:{ports[0]}"))
        client.wait_ready(START_SECONDS)
        eventually(lambda: self.alive() == len(self.addresses), START_SECONDS)
        return client

    def _start(self, name: str, *arguments: str) -> None:
        log = self._stack.enter_context(self.log(name).open("wb"))
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxserve", *arguments],
            stdout=log,
            stderr=log,
            env={**ENVIRONMENT, "REPLICA_OF_TEST": str(self.log(name))},
        )
        self.processes[name] = process
        self._stack.callback(self._end, process)

    @staticmethod
    def _end(process: subprocess.Popen) -> None:
        process.terminate()
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def metric(self, name: str) -> float:
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=20).read().decode()
        found = re.findall(rf"^jaxserve:{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.M)
        return sum(map(float, found))

    def alive(self) -> int:
        """Replicas that can be sent requests."""
        for name, process in self.processes.items():
            assert process.poll() is None, self.log(name).read_text()[-4000:]
        return int(self.metric("replica_alive"))

    def workers(self, name: str) -> list[int]:
        """Process ids of a replica's workers, by number."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = (folder / "environ").read_bytes().decode().split("\0")
                number = re.search(r'"worker": (\d+)', "".join(variables))
                if f"REPLICA_OF_TEST={self.log(name)}" in variables and number:
                    found[int(number[1])] = int(folder.name)
        return [found[number] for number in sorted(found)]


@pytest.fixture
def cluster(tmp_path) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        yield Cluster(stack, tmp_path)


def says_what_the_reference_says(client: Client, case: dict) -> int:
    """Asks a golden case; returns how many tokens of its prompt were cached."""
    count = len(case["output_ids"])
    sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    done = client.complete(case["prompt_ids"], sampling, ids_only=True)[0]
    assert list(done.ids) == case["output_ids"]
    return done.usage.cached


@pytest.mark.parametrize(
    "model, prefill, decode",
    [
        pytest.param(FIRST_LAYERS, ("spp=2", 2), ("kvp=2", 2), id="first layers"),
        pytest.param(WHOLE, ("spp=2", 2), ("kvp=2,tp=3", 2), marks=pytest.mark.matrix),
        pytest.param(WHOLE, ("spp=2,kvp=2,tp=3", 4), ("spp=3", 3), marks=pytest.mark.matrix),
        pytest.param(WHOLE, ("spp=2", 2), ("tp=3", 0), marks=pytest.mark.matrix),
        pytest.param(WHOLE, ("kvp=2", 0), ("spp=2", 2), marks=pytest.mark.matrix),
    ],
)
def test_one_group_prefills_and_another_decodes(model, prefill, decode, request, cluster):
    checkpoint, golden = map(request.getfixturevalue, model)
    for role, (mesh, workers) in (("prefill", prefill), ("decode", decode)):
        flags = [f"--model={checkpoint}", f"--mesh={mesh}", f"--role={role}"]
        cluster.replica(role, *flags, workers=workers)
    client = cluster.conductor(checkpoint)
    cases = [case for case in golden["cases"] if 70 < len(case["prompt_ids"]) < 400]
    assert cases
    blocks = 0
    for case in cases:
        whole = (len(case["prompt_ids"]) - 1) // 16
        assert says_what_the_reference_says(client, case) == 16 * whole
        blocks += whole
    eventually(lambda: cluster.metric("kv_blocks_from_peers_total") == blocks)


TINY = ["--model=random:tiny", "--chunk_tokens=32"]
SAMPLING = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def drawn(sizes: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Returns prompts of these numbers of tokens, and what one process says to each."""
    from jaxserve.llm import LLM

    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 500, size).tolist() for size in sizes]
    with LLM("random:tiny", max_model_len=512, profile="none", pages=80, max_seqs=2) as llm:
        return prompts, [list(done.ids) for done in llm.generate(prompts, SAMPLING)]


def says(client: Client, prompt: list[int]) -> list[int]:
    return list(client.complete(prompt, SAMPLING, ids_only=True)[0].ids)


@pytest.mark.matrix
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_is_lost_costs_no_answer(cluster, role, number):
    """Callers ask all the time; the group restarts, and KV comes again. A request whose first
    tokens the lost decode group has sent goes on at the prefill group."""
    prompts, right = drawn([300] * 24)
    for name, mesh in (("prefill", "spp=2"), ("decode", "tp=2")):
        flags = [*TINY, f"--mesh={mesh}", f"--role={name}"]
        cluster.replica(name, *flags, workers=2, launch=("--ranks_across_hosts",))
    client = cluster.conductor("random:tiny")
    assert says(client, prompts[0]) == right[0]
    said: dict[int, list[int]] = {}

    def ask(first: int) -> None:
        for place in range(first, 20, 3):
            said[place] = says(client, prompts[place])

    threads = [threading.Thread(target=ask, args=(first,)) for first in (1, 2, 3)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(said) >= 3)
    lost = cluster.workers(role)
    os.kill(lost[1], number)
    for thread in threads:
        thread.join(START_SECONDS)
    assert said == {place: right[place] for place in range(1, 20)}
    eventually(lambda: not set(lost) & set(cluster.workers(role)), START_SECONDS)
    eventually(lambda: cluster.alive() == 2, START_SECONDS)
    before = cluster.metric("kv_blocks_from_peers_total")
    for place in range(20, 24):
        assert says(client, prompts[place]) == right[place]
    eventually(lambda: cluster.metric("kv_blocks_from_peers_total") == before + 4 * (299 // 16))


def kv(port: int, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxserve", "kv", f"--url=http://127.0.0.1:{port}", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)


@pytest.mark.matrix
@pytest.mark.timeout(1200)
def test_an_operator_copies_blocks_between_groups_and_gets_no_files(cluster, tmp_path):
    ((prompt,), right) = drawn([200])
    admin = lasting_ports(2, "127.0.0.1")
    for name, mesh, port in (("one", "spp=2", admin[0]), ("two", "kvp=2", 0)):
        ports = [f"--admin_port={port}"] if port else []
        cluster.replica(name, *TINY, f"--mesh={mesh}", *ports, workers=2)
    client = cluster.conductor("random:tiny", f"--admin_port={admin[1]}")
    assert says(client, prompt) == right[0]
    tokens = f"--tokens={','.join(map(str, prompt))}"
    asked = kv(admin[1], "--find", tokens, "--json")
    assert asked.returncode == 0, asked.stderr
    found = json.loads(asked.stdout)
    held = {one["replica"]: one["on_devices"] for one in found}
    assert sorted(held.values()) == [0, 12]
    other = min(held, key=held.__getitem__)
    copied = kv(admin[1], f"--replicate={other}", tokens, "--json")
    assert copied.returncode == 0, copied.stderr
    eventually(lambda: cluster.metric("kv_blocks_from_peers_total") == 12)
    for action in (f"--get={tmp_path / 'blocks'}", "--lease=60"):
        done = kv(admin[0], action, tokens)
        if action == "--lease=60":
            assert done.returncode == 0, done.stderr
        else:
            assert done.returncode != 0 and "replicas of one process" in done.stderr
