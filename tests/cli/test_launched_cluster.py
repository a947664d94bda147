"""Replicas of several processes (`jaxserve launch`) prefill and decode for each other behind a
conductor: tokens are the reference's, KV is fetched, and faults cost no answer."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.api.sampling import SamplingParams
from jaxserve.group.channel import free_port
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
        port = free_port("127.0.0.1")
        self.addresses[name] = f"127.0.0.1:{port}"
        before = ["launch", f"--processes={workers}", *launch, "--"] if workers else []
        self._start(name, *before, "serve", *COMMON, f"--replica_port={port}", *flags)

    def conductor(self, model: str) -> Client:
        """Starts a conductor of all replicas; returns a client of it once all can serve."""
        ports = [free_port("127.0.0.1") for _ in range(2)]
        replicas = ",".join(self.addresses.values())
        flags = [f"--model={model}", f"--replicas={replicas}"]
        self._start(
            "conductor", "conductor", *flags, f"--grpc_port={ports[0]}", f"--port={ports[1]}"
        )
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
    assert cluster.metric("kv_blocks_from_peers_total") == blocks
