"""`jaxserve cluster`: a conductor and two replicas of a real engine, end to end."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.api.sampling import SamplingParams
from jaxserve.group.channel import free_port
from jaxserve.server.client import Client
from jaxserve.server.remote_replica import RemoteReplica
from tests.waiting import eventually

SECRET = "of the tests of clusters"
MARK = f"CLUSTER_OF_TEST={os.getpid()}"  # tells our processes from others on this machine
ENVIRONMENT = {**os.environ, **dict([MARK.split("=")])}
TINY = [
    "--model=random:tiny", "--max_model_len=256", "--profile=none", "--policy=fcfs",
    "--chunking=static", "--admission=queue", "--max_seqs=2", "--chunk_tokens=32", "--pages=40",
]  # fmt: skip
SAMPLING = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
START_SECONDS = 400.0
RESTART_SECONDS = 100.0


def processes(word: str = "") -> list[int]:
    """Returns the processes of our clusters with this word on their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            ours = MARK.encode() in (folder / "environ").read_bytes().split(b"\0")
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if ours and (not word or word.encode() in words):
                found.append(int(folder.name))
    return found


def secret_of(number: int) -> bytes:
    variables = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
    (found,) = [text for text in variables if text.startswith(b"JAXSERVE_CLUSTER_SECRET=")]
    return found.partition(b"=")[2]


def alive(url: str) -> list[float]:
    """Returns 1 for each replica that the conductor can send requests to, 0 for the others."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=20).read().decode()
    found = re.findall(r"^jaxserve:replica_alive\{.*\} (\S+)$", text, re.M)
    return [float(number) for number in found]


def metric(url: str, name: str) -> float:
    text = urllib.request.urlopen(f"{url}/metrics", timeout=20).read().decode()
    return float(re.search(rf"^jaxserve:{re.escape(name)} (\S+)$", text, re.M)[1])


@contextlib.contextmanager
def cluster(tmp_path: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], Client]]:
    """Runs a cluster until the block ends, and what there is of it after."""
    port_file = tmp_path / "ports.json"
    command = [sys.executable, "-m", "jaxserve", "cluster", "--grpc_port=0", "--port=0"]
    with open(tmp_path / "log", "w+") as log:
        process = subprocess.Popen(
            [*command, f"--port_file={port_file}", *flags],
            stdout=log,
            stderr=log,
            env=ENVIRONMENT,
        )
        try:
            eventually(lambda: port_file.exists() or process.poll() is not None, START_SECONDS)
            assert process.poll() is None, (tmp_path / "log").read_text()
            with Client(json.loads(port_file.read_text())["grpc"]) as client:
                client.wait_ready(START_SECONDS)
                yield process, client
        finally:
            process.kill()
            process.wait()
    eventually(lambda: not processes())


def of_one_process(sizes: tuple[int, ...]) -> tuple[list[list[int]], list[list[int]]]:
    """Returns prompts of these numbers of tokens, and the output of one process for each."""
    from jaxserve.llm import LLM

    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 500, size).tolist() for size in sizes]
    with LLM("random:tiny", max_model_len=256, profile="none", pages=40, max_seqs=2) as llm:
        return prompts, [list(done.ids) for done in llm.generate(prompts, SAMPLING)]


def answers(client: Client, prompts: list[list[int]]) -> list[list[int]]:
    return [list(client.complete(prompt, SAMPLING, ids_only=True)[0].ids) for prompt in prompts]


@pytest.mark.matrix
def test_tokens_are_one_processs_a_killed_replica_begins_anew_and_nothing_is_left(tmp_path):
    prompts, golden = of_one_process((3, 20, 50, 90))
    tiers = ["--host_cache_gib=0.01", f"--disk_cache={tmp_path}/kv:0.01"]  # a folder for each
    with cluster(tmp_path, *TINY, *tiers) as (process, client):
        ask = functools.partial(answers, client, prompts)
        assert ask() == golden
        assert len(processes("serve")) == 2 and len(processes("conductor")) == 1
        url = json.loads((tmp_path / "ports.json").read_text())["http"]
        eventually(lambda: alive(url) == [1.0, 1.0], START_SECONDS)
        first = processes("serve")[0]
        os.kill(first, signal.SIGKILL)
        assert ask() == golden, "by the other one"
        anew = lambda: len(processes("serve")) == 2 and first not in processes("serve")
        eventually(anew, RESTART_SECONDS)
        (secret,) = {secret_of(number) for number in processes("serve")}
        for number in processes():
            assert secret not in Path(f"/proc/{number}/cmdline").read_bytes()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert not (tmp_path / "ports.json").exists()
        assert not processes()


@pytest.mark.matrix
def test_tokens_are_one_processs_where_one_replica_prefills_and_another_decodes(tmp_path):
    prompts, golden = of_one_process((3, 50, 90, 130, 200, 230))
    roles = ["--prefill=1", "--decode=1"]
    with cluster(tmp_path, *TINY, *roles) as (_, client):
        url = json.loads((tmp_path / "ports.json").read_text())["http"]
        eventually(lambda: alive(url) == [1.0, 1.0], START_SECONDS)
        assert answers(client, prompts) == golden
        fetched = metric(url, "kv_blocks_from_peers_total")
        assert fetched >= sum(len(prompt) // 16 for prompt in prompts[2:]) / 2
        (prefill,) = processes("--role=prefill")
        os.kill(prefill, signal.SIGKILL)
        assert answers(client, prompts) == golden, "by the other one alone"
        eventually(lambda: processes("--role=prefill") not in ([], [prefill]), RESTART_SECONDS)
        eventually(lambda: alive(url) == [1.0, 1.0], START_SECONDS)
        fresh, again = of_one_process((151, 152))
        assert answers(client, fresh) == again
        (decode,) = processes("--role=decode")
        os.kill(decode, signal.SIGKILL)
        assert answers(client, prompts) == golden, "as the last resort"


@pytest.mark.matrix
def test_the_real_model_says_what_the_reference_says(golden, smollm2_gguf, tmp_path):
    flags = [
        f"--model={smollm2_gguf}", "--max_model_len=512", "--max_seqs=4", "--pages=160",
        "--profile=none", "--policy=fcfs", "--chunking=static", "--admission=queue",
    ]  # fmt: skip
    cases = [case for case in golden["cases"] if len(case["prompt_ids"]) < 400]
    with cluster(tmp_path, *flags) as (_, client):
        for case in cases * 2:
            count = len(case["output_ids"])
            sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            found = client.complete(case["prompt_ids"], sampling, ids_only=True)[0].ids
            assert list(found) == case["output_ids"]


def test_prompts_are_computed_by_one_replica_and_decoded_by_another(tmp_path):
    prompts, right = of_one_process((3, 90, 200, 129))
    with cluster(tmp_path, "--prefill=1", "--decode=1", *TINY) as (_, client):
        url = json.loads((tmp_path / "ports.json").read_text())["http"]
        eventually(lambda: alive(url) == [1.0, 1.0], START_SECONDS)
        done = [client.complete(prompt, SAMPLING, ids_only=True)[0] for prompt in prompts]
        assert [list(one.ids) for one in done] == right
        assert [one.usage.cached for one in done] == [0, 80, 192, 128]
        assert metric(url, "kv_blocks_from_peers_total") == 5 + 12 + 8


def replica(stack: contextlib.ExitStack, *flags: str) -> str:
    """Starts `jaxserve serve`; returns its replica port's address."""
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    ports = ["--grpc_port=0", "--port=0", f"--replica_port={address.partition(':')[2]}"]
    start(stack, "serve", *ports, *flags)
    return address


def start(stack: contextlib.ExitStack, command: str, *flags: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxserve", command, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**ENVIRONMENT, "JAXSERVE_CLUSTER_SECRET": SECRET},
    )
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process


@pytest.mark.matrix
def test_the_real_model_disaggregated_with_other_meshes_on_both_sides(golden, smollm2_gguf):
    """Sizes of pages differ too; requests go through two conductors at once."""
    flags = [
        f"--model={smollm2_gguf}", "--max_model_len=2048", "--max_seqs=4", "--pages=160",
        "--profile=none", "--policy=fcfs", "--chunking=static", "--admission=queue",
        "--dtype=float32", "--host_cache_gib=0.5", "--chunk_tokens=256",
    ]  # fmt: skip
    cases = [case for case in golden["cases"] if len(case["prompt_ids"]) < 1600]
    with contextlib.ExitStack() as stack:
        replicas = [
            replica(stack, *flags, "--role=prefill", "--mesh=tp=3", "--block_size=16"),
            replica(stack, *flags, "--role=decode", "--mesh=spp=2,kvp=2", "--block_size=24"),
        ]
        clients = []
        for _ in range(2):
            conductor = start(
                stack, "conductor", f"--model={smollm2_gguf}", f"--replicas={','.join(replicas)}",
                "--grpc_port=0", "--port=0",
            )  # fmt: skip
            address, url = (conductor.stdout.readline().strip() for _ in range(2))
            clients.append(stack.enter_context(Client(address)))
            clients[-1].wait_ready(START_SECONDS)
            eventually(lambda url=url: sum(alive(url)) == 2, START_SECONDS)
        for case, client in itertools.product(cases, clients):
            prompt = case["prompt_ids"]
            sampling = SamplingParams(
                temperature=0, max_tokens=len(case["output_ids"]), ignore_eos=True
            )
            done = client.complete(prompt, sampling, ids_only=True)[0]
            assert list(done.ids) == case["output_ids"]
        assert metric(url, "kv_blocks_from_peers_total") == 13 + 62  # of 333 and of 1500 tokens


LONG_LIST = {
    "type": "array",
    "minItems": 24,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}
STREAMS = {
    "greedy": {"temperature": 0, "logprobs": 2},
    "seeded": {"temperature": 0.9, "top_p": 0.9, "seed": 7, "logprobs": 0},
    "penalties": {"temperature": 0.7, "seed": 8, "frequency_penalty": 1.0},
    "several": {"temperature": 1.0, "seed": 9, "n": 2, "stop": ["the end of"]},
    "guided": {
        "temperature": 0.8,
        "seed": 10,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "people", "schema": LONG_LIST},
        },
    },
}


def answers_at(address: str) -> bool:
    """Returns whether a replica takes requests of conductors."""
    with contextlib.closing(RemoteReplica(address, SECRET.encode())) as remote:
        return remote.wait_connected(5) and remote.available


class Streamed:
    """The events of a streamed completion over HTTP, read on a thread until it ends."""

    def __init__(self, url: str, body: Mapping[str, Any]):
        whole = {"prompt": "A list of people in a story:", "max_tokens": 96, **body}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        self._request = urllib.request.Request(
            f"{url}/v1/completions",
            json.dumps({"model": "", "ignore_eos": True, **whole, **options}).encode(),
            {"content-type": "application/json"},
        )
        self.events: list[dict[str, Any]] = []
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        with urllib.request.urlopen(self._request, timeout=START_SECONDS) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    self.events.append(json.loads(line.removeprefix(b"data: ")))

    def said(self) -> dict[int, tuple[Any, ...]]:
        """Waits for the end; returns text, log-probabilities and reason by completion, and usage
        as completion -1."""
        self.thread.join()
        found: dict[int, tuple[Any, ...]] = {}
        for event in self.events:
            for choice in event["choices"]:
                text, scores, _ = found.get(choice["index"], ("", [], None))
                scores = [*scores, *((choice.get("logprobs") or {}).get("token_logprobs") or ())]
                found[choice["index"]] = text + choice["text"], scores, choice["finish_reason"]
        usage = self.events[-1]["usage"]
        return {**found, -1: ("usage", [usage["prompt_tokens"], usage["completion_tokens"]], None)}


@pytest.mark.matrix
@pytest.mark.timeout(1200)
def test_streams_of_real_layers_are_the_same_when_their_replica_is_killed(
    smollm2_first_layers, tmp_path
):
    flags = [
        f"--model={smollm2_first_layers}", "--max_model_len=512", "--max_seqs=8", "--pages=160",
        "--dtype=float32", "--profile=none", "--policy=fcfs", "--chunking=static",
        "--admission=queue",
    ]  # fmt: skip
    targets = tmp_path / "replicas"
    with contextlib.ExitStack() as stack:
        first = replica(stack, *flags)
        targets.write_text(first)
        conductor = start(
            stack, "conductor", f"--model={smollm2_first_layers}", f"--replicas_file={targets}",
            "--grpc_port=0", "--port=0",
        )  # fmt: skip
        address, url = (conductor.stdout.readline().strip() for _ in range(2))
        stack.enter_context(Client(address)).wait_ready(START_SECONDS)
        whole = {name: Streamed(url, body) for name, body in STREAMS.items()}
        undisturbed = {name: one.said() for name, one in whole.items()}
        second = replica(stack, *flags)  # only now: it finds the programs of the first
        eventually(lambda: answers_at(second), START_SECONDS)
        streams = {name: Streamed(url, body) for name, body in STREAMS.items()}
        eventually(lambda: all(len(one.events) > 4 for one in streams.values()), START_SECONDS)
        targets.write_text(f"{first} {second}")
        eventually(lambda: alive(url) == [1.0, 1.0], START_SECONDS)
        assert all(one.thread.is_alive() for one in streams.values()), "they must be longer"
        (killed,) = processes(f"--replica_port={first.rpartition(':')[2]}")
        os.kill(killed, signal.SIGKILL)
        for name, one in streams.items():
            said = one.said()
            assert said.keys() == undisturbed[name].keys(), name
            for index, (text, scores, reason) in undisturbed[name].items():
                assert (said[index][0], said[index][2]) == (text, reason), name
                assert said[index][1] == pytest.approx(scores, abs=1e-3), name
        assert metric(url, 'migrations_total{cause="lost"}') == len(STREAMS)


@pytest.mark.parametrize(
    "flags, fault",
    [
        (["--prefill=1"], "--decode"),
        (["--mixed=0"], "--prefill"),
        (["--mixed=65"], "--mixed"),
        (["--mixed=40", "--prefill=40", "--decode=1"], "--mixed"),
    ],
)
def test_a_cluster_that_could_serve_nothing_is_refused(flags, fault):
    done = subprocess.run(
        [sys.executable, "-m", "jaxserve", "cluster", *flags], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith("jaxserve cluster:")
    assert fault in done.stderr


@pytest.mark.parametrize(
    "flags, fault",
    [
        ([], "replicas: give either"),
        (["--replicas=x"], "'x' is not HOST:PORT"),
        (["--replicas=a:1"], "JAXSERVE_CLUSTER_SECRET must be set"),
    ],
)
def test_a_conductor_says_what_it_lacks(flags, fault):
    done = subprocess.run(
        [sys.executable, "-m", "jaxserve", "conductor", *flags], capture_output=True, text=True
    )
    assert done.returncode == 2 and fault in done.stderr


@pytest.mark.matrix
def test_of_two_conductors_one_is_killed_again_and_again():
    """The requests of the other are untouched, and both know the same blocks afterwards."""
    command = [sys.executable, "-m", "experiments.benchmarks.conductor_faults", "--rounds=8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
