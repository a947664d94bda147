"""Measures the cost of a conductor: one replica, asked directly and through a conductor, in turns.

    python -m experiments.benchmarks.conductor --model=random:tiny --rounds=5

Prints, of each round, tokens per second of all callers together and the median time to the first
token, then the medians of all rounds and their ratios.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import os
import secrets
import statistics
import subprocess
import sys
import time

from jaxserve.api.sampling import SamplingParams
from jaxserve.group.channel import free_port
from jaxserve.server.client import Client
from jaxserve.text.output import Delta

START_SECONDS = 300.0
PROMPT = 32  # tokens


def started(stack: contextlib.ExitStack, environment: dict[str, str], *words: str) -> str:
    """Starts a server until the stack is closed; returns its gRPC address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxserve", *words, "--grpc_port=0", "--port=0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    stack.callback(process.communicate)
    stack.callback(process.terminate)
    assert process.stdout is not None
    return process.stdout.readline().strip()


def ask(client: Client, prompt: list[int], tokens: int) -> float:
    """Seconds to the first token of a request that is generated to its end."""
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    first = 0.0
    for output in client.generate(prompt, sampling, ids_only=True):
        if isinstance(output, Delta) and not first:
            first = time.perf_counter() - began
    return first


def measure(client: Client, callers: int, requests: int, tokens: int) -> tuple[float, float]:
    """Tokens per second, and median seconds to the first token."""
    prompts = [[number % 199, *range(1, PROMPT)] for number in range(requests)]
    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(callers) as threads:
        firsts = list(threads.map(lambda prompt: ask(client, prompt, tokens), prompts))
    return requests * tokens / (time.perf_counter() - began), statistics.median(firsts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="random:tiny")
    parser.add_argument("--routing", default="local_cache_aware")
    parser.add_argument("--callers", type=int, default=4)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    environment = {**os.environ, "JAXSERVE_CLUSTER_SECRET": secrets.token_hex(32)}
    port = free_port("127.0.0.1")
    model = f"--model={given.model}"
    with contextlib.ExitStack() as stack:
        small = ["--max_model_len=256", "--max_seqs=8", "--chunk_tokens=64", "--pages=200"]
        plain = ["--policy=fcfs", "--chunking=static", "--admission=queue", "--profile=none"]
        serve = [model, f"--replica_port={port}", *small, *plain]
        direct = started(stack, environment, "serve", *serve)
        routed = [f"--replicas=127.0.0.1:{port}", model, f"--routing={given.routing}"]
        through = started(stack, environment, "conductor", *routed)
        clients = {"direct": Client(direct), "conductor": Client(through)}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in clients}
        for client in clients.values():
            stack.enter_context(client)
            client.wait_ready(START_SECONDS)
            measure(client, given.callers, given.callers, given.tokens)
        for number in range(given.rounds):
            for name, client in clients.items():
                speed, first = measure(client, given.callers, given.requests, given.tokens)
                found[name].append((speed, first))
                print(
                    f"round {number}: {name:9} {speed:7.0f} tokens/s, TTFT {1000 * first:6.1f} ms"
                )
    medians = {name: [statistics.median(v) for v in zip(*rows)] for name, rows in found.items()}
    for name, (speed, first) in medians.items():
        print(f"median:  {name:9} {speed:7.0f} tokens/s, TTFT {1000 * first:6.1f} ms")
    ratio = medians["conductor"][0] / medians["direct"][0]
    more = 1000 * (medians["conductor"][1] - medians["direct"][1])
    print(f"conductor: {ratio:.2f} of the tokens/s, {more:+.1f} ms to the first token")


if __name__ == "__main__":
    main()
