"""Host time of a decode step. Run: python -m tests.scheduling.time_steps

Prints microseconds of `start` and `finish` for running sequences of several context lengths, one
batch ahead of the tokens read.
"""

from __future__ import annotations

import time

import numpy as np

from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.cache import CacheManager
from jaxserve.scheduling import Scheduler
from jaxserve.scheduling.batch_reader import StepResults
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig


def decoding(sequences: int, context: int, mesh: MeshConfig) -> Scheduler:
    """A scheduler whose sequences, of up to 64 tokens less than `context`, are all prefilled."""
    pages = sequences * (-(-context // 16) + 60) // mesh.kvp + sequences
    cache = CacheManager(CacheConfig(block_size=16, pages=pages), mesh.kvp, sequences)
    scheduler = Scheduler(
        SchedulerConfig(max_seqs=sequences, chunk_tokens=65536), cache, mesh, context + 1000
    )
    dice = np.random.default_rng(0)
    for number in range(sequences):
        prompt = dice.integers(0, 1000, context - int(dice.integers(0, 64)))
        scheduler.add(
            Request.make(
                str(number),
                prompt,
                SamplingParams.make(max_tokens=900),
                vocab=1000,
                max_len=context + 1000,
            )
        )
    while scheduler.load().queued_prefill_tokens:
        batch = scheduler.start(0.0)
        scheduler.finish(batch, StepResults(np.full(len(batch.seq), 7)), 0.0)
    return scheduler


def measure(scheduler: Scheduler, ahead: int, steps: int = 300) -> tuple[list[float], list[float]]:
    flight = [scheduler.start(0.0) for _ in range(ahead)]
    tokens = np.full(scheduler.config.max_seqs, 7)
    starts = []
    finishes = []
    for _ in range(steps):
        began = time.perf_counter()
        flight.append(scheduler.start(0.0))
        issued = time.perf_counter()
        batch = flight.pop(0)
        scheduler.finish(batch, StepResults(tokens[: len(batch.seq)]), 0.0)
        starts.append(issued - began)
        finishes.append(time.perf_counter() - issued)
    return starts, finishes


def main() -> None:
    print(
        f"{'sequences':>9} {'context':>8} {'mesh':>20} {'start p50':>10} {'p99':>6} "
        f"{'finish p50':>11} {'p99':>6}   us"
    )
    plain = MeshConfig()
    lanes = MeshConfig(kvp=4)
    stages = MeshConfig(spp=4)
    for sequences, context, mesh in (
        (256, 200, plain),
        (256, 4000, plain),
        (256, 4000, lanes),
        (256, 200, stages),
        (4, 1_000_000, plain),
    ):
        starts, finishes = measure(decoding(sequences, context, mesh), mesh.spp)
        (a, b), (c, d) = (np.percentile(times, (50, 99)) * 1e6 for times in (starts, finishes))
        print(f"{sequences:>9} {context:>8} {mesh!s:>20} {a:>10.0f} {b:>6.0f} {c:>11.0f} {d:>6.0f}")


if __name__ == "__main__":
    main()
