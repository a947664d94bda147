"""Measures how well a conductor predicts prefills: by the replica's own predictor, as members have
it, and by learnt seconds per computed token.

    python -m experiments.benchmarks.prefill_prediction
    python -m experiments.benchmarks.prefill_prediction --live=smollm2-135m --scale=0.03

Prompts of four kinds come one after the other, in a drawn order, to one replica: simulated Llama 3
70B on 8 A100s, or with --live a real one here. Both predictors see the same requests, learn from
each after it was predicted, and get a first tenth that does not count. Prints, for each kind,
seconds and the mean of |predicted - taken| / taken.
"""

from __future__ import annotations

import argparse
import math
import random
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.api.events import Event, Finished
from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.cluster.prefill_costs import MIN_OBSERVED, SMOOTHING, PrefillCosts
from jaxserve.lab.simulate.replica import VirtualReplica
from jaxserve.lab.simulate.run import System
from jaxserve.replica.protocol import Replica
from jaxserve.settings.schema import (
    CacheConfig,
    EngineConfig,
    MeshConfig,
    ModelSource,
    SchedulerConfig,
)

FIRST_RATE = 1e-4  # seconds per token, before anything was seen
KINDS = ((500, 0), (8_000, 4_000), (100_000, 0), (100_000, 90_000))  # tokens: prompt, its prefix
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
WAIT_SECONDS = 600.0


class Observed(NamedTuple):
    """A prompt that was computed. by_predictor, by_rate: seconds, as predicted before."""

    kind: int
    seconds: float
    by_predictor: float
    by_rate: float


def serve(replica: Replica, request: Request) -> Finished:
    """Has a replica compute a prompt."""
    ends: list[Finished] = []
    done = threading.Event()

    def sink(events: Sequence[Event]) -> None:
        ends.extend(event for event in events if isinstance(event, Finished))
        if ends:
            done.set()

    replica.submit(request, sink)
    if isinstance(replica, VirtualReplica):
        replica.advance(math.inf)
    assert done.wait(WAIT_SECONDS), "the replica does not answer"
    return ends[0]


def observe(replica: Replica, kinds: Sequence[tuple[int, int]], requests: int) -> list[Observed]:
    """Has a replica compute prompts of these kinds, after their prefixes."""
    draw = random.Random(0)
    tokens = np.random.default_rng(0)
    vocab = min(replica.info.vocab, 1000)
    some: Callable[[int], np.ndarray] = lambda count: tokens.integers(10, vocab, count, np.int32)
    prefixes = [some(prefix) for _, prefix in kinds]
    costs = PrefillCosts(replica.info)
    rate = FIRST_RATE
    observed = []
    for number in range(requests):
        kind = draw.randrange(len(kinds)) if number >= len(kinds) else number
        prompt = np.concatenate([prefixes[kind], some(kinds[kind][0] - len(prefixes[kind]))])
        request = Request(f"r{number}", prompt, ONE_TOKEN, arrival=replica.now())
        end = serve(replica, request)
        cached, total = end.usage.cached, end.usage.prompt
        seconds = end.timing.first_token - end.timing.queued
        observed.append(
            Observed(kind, seconds, costs.seconds(cached, total), rate * (total - cached))
        )
        costs.learn(cached, total, seconds)
        if total - cached >= MIN_OBSERVED:
            rate += SMOOTHING * (seconds / (total - cached) - rate)
    return observed


def simulated() -> Replica:
    """A virtual replica of Llama 3 70B on eight A100s."""
    system = System(MODELS["llama3-70b"], "a100", MeshConfig(tp=8))
    replica = system.replica(SchedulerConfig(chunk_tokens=2048), CacheConfig(block_size=256))
    replica.start()
    return replica


def live(model: str, longest: int) -> Replica:
    """A replica in this process, with a measured profile."""
    from jaxserve.engine.build import build

    config = EngineConfig(
        source=ModelSource(model=model, dtype="float32", max_model_len=longest),
        scheduler=SchedulerConfig(chunk_tokens=512, max_seqs=2, policy="slack"),
    )
    replica = build(config)
    replica.start()
    return replica


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--live", default="", help="model of a real replica; default: simulated")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths")
    given = parser.parse_args()
    kinds = [(round(given.scale * prompt), round(given.scale * prefix)) for prompt, prefix in KINDS]
    longest = max(prompt for prompt, _ in kinds) + 16
    replica = live(given.live, longest) if given.live else simulated()
    try:
        observed = observe(replica, kinds, given.requests)[given.requests // 10 :]
    finally:
        replica.close()
    print("| prompt, its prefix | prompts | seconds | predictor: error | per token: error |")
    print("|---|---|---|---|---|")
    for kind, (prompt, prefix) in enumerate(kinds):
        rows = [one for one in observed if one.kind == kind]
        if not rows:
            continue
        by_predictor = np.mean([abs(one.by_predictor / one.seconds - 1) for one in rows])
        by_rate = np.mean([abs(one.by_rate / one.seconds - 1) for one in rows])
        seconds = np.median([one.seconds for one in rows])
        print(
            f"| {prompt:,}, {prefix:,} | {len(rows)} | {seconds:.3g} | {by_predictor:.1%} |"
            f" {by_rate:.0%} |"
        )


if __name__ == "__main__":
    main()
