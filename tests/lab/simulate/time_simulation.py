"""Times the simulator. Run: python -m tests.lab.simulate.time_simulation

Prints how many requests of the 5 % mix it simulates per minute on one core, and microseconds of
`Scheduler.start` (p50 and p99) with a thousand prompts waiting beside 256 that decode, for contexts
of a thousand and of a million tokens: where these have all slots, so that one comes in whenever one
has ended, and where there are as many slots again, so that all that the step has room for come in.
"""

from __future__ import annotations

import dataclasses
import itertools
import time

import numpy as np

from jaxserve.api.request import Request
from jaxserve.cache import CacheManager
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.costs.profiles import costs
from jaxserve.lab.simulate.arrival import Arrival, to_request
from jaxserve.lab.simulate.run import System, execute
from jaxserve.lab.simulate.workload import parse
from jaxserve.scheduling import Scheduler
from jaxserve.scheduling.batch_reader import StepResults
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig

SHAPE = MODELS["llama3-8b"]
MAX_LEN = 2**31 - 1
WAITING = 1000
RUNNING = 256


def requests_per_minute(mesh: MeshConfig, qps: float, count: int = 300) -> float:
    """Requests of poisson:mix=medha-5 per minute, on A100s with the default settings of `jaxserve
    simulate`."""
    config = SchedulerConfig(
        policy="slack",
        chunking="adaptive",
        chunk_tokens=8192,
        max_seqs=256,
        max_queue=10**6,
        step_time=0.1,
    )
    replica = System(SHAPE, "a100", mesh).replica(config, CacheConfig(block_size=256))
    arrivals = parse("poisson:mix=medha-5", qps=qps, requests=count)
    began = time.perf_counter()
    execute(replica, arrivals)
    return count / (time.perf_counter() - began) * 60


def crowded(context: int, slots: int) -> Scheduler:
    """A scheduler with 256 sequences of `context` tokens that decode; the objective leaves room for
    prefill beside them. They end one after the other where they have all slots, and else not at
    all."""
    config = SchedulerConfig(
        policy="slack",
        chunk_tokens=65536,
        max_seqs=slots,
        max_queue=10**6,
        tpot=max(0.1, context * 5e-6),
    )
    cache = CacheManager(
        CacheConfig(256, 2 * RUNNING * (context // 256 + 40), prefix_caching=False),
        1,
        config.max_seqs,
    )
    scheduler = Scheduler(config, cache, MeshConfig(tp=8), MAX_LEN, costs=costs("a100", SHAPE, 8))
    for number in range(RUNNING):
        scheduler.add(asked(number, context, 10 + number if slots == RUNNING else 9000))
    while scheduler.load().queued_prefill_tokens:
        batch = scheduler.start(0.0)
        scheduler.finish(batch, StepResults(np.zeros(len(batch.seq), np.int32)), 0.0)
    scheduler.config = scheduler.packer.config = dataclasses.replace(
        config, chunking="adaptive", chunk_tokens=8192
    )
    return scheduler


def asked(number: int, context: int, output: int) -> Request:
    return to_request(Arrival(number * 1e-3, context, output), number, MAX_LEN)


def starts(scheduler: Scheduler, context: int, output: int, steps: int = 200) -> np.ndarray:
    """Microseconds of `start`, one batch ahead of the tokens read. Waiting prompts put out `output`
    tokens; others come."""
    flight = [scheduler.start(1.0)]
    taken = []
    numbers = itertools.count(RUNNING)
    for step in range(steps):
        now = 1.0 + step * 0.05
        while scheduler.slots.waiting < WAITING:
            scheduler.add(asked(next(numbers), context, output))
        began = time.perf_counter()
        flight.append(scheduler.start(now))
        taken.append(time.perf_counter() - began)
        batch = flight.pop(0)
        scheduler.finish(batch, StepResults(np.zeros(len(batch.seq), np.int32)), now)
    return np.array(taken) * 1e6


def main() -> None:
    print("requests of the 5 % mix per minute of one core")
    for mesh, qps in (
        (MeshConfig(tp=8), 0.25),
        (MeshConfig(spp=2, tp=8), 0.5),
        (MeshConfig(spp=2, tp=8), 1.0),
        (MeshConfig(spp=2, kvp=2, tp=4), 0.5),
    ):
        print(f"  {mesh!s:20} {qps:5.2f}/s {requests_per_minute(mesh, qps):8,.0f}")
    print("\nmicroseconds of start, 1000 wait and 256 decode")
    for context, (slots, output) in itertools.product(
        (1000, 1_000_000), ((RUNNING, RUNNING), (2 * RUNNING, 1))
    ):
        scheduler = crowded(context, slots)
        p50, p99 = np.percentile(starts(scheduler, context, output), (50, 99))
        print(f"  contexts of {context:>9,}, {slots} slots   p50 {p50:6.0f}   p99 {p99:6.0f}")


if __name__ == "__main__":
    main()
