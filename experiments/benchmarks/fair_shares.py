"""Measures a tenant's time to first token alone, beside another one that floods with fair shares,
and beside it as if both were one tenant.

    python -m experiments.benchmarks.fair_shares --json=fair_shares.json

Simulated: Llama-3 8B on one device, both tenants with a mix calibrated to a public trace. Live
(`--live`): the tiny random model on this machine. One tenant asks for `--load` of the capacity, the
other for `--flood` times the capacity, from the same second on. The verdict: with fair shares the
P99 of the one that does not flood is at most 10 % above what it is alone, and no more of its
requests are refused than one in a hundred; without them it is not so, else there was no flood.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.script import command_line, exit_code, keep
from jaxserve.cli.display import table
from jaxserve.lab.research.drive import LiveRun
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.recorder import Outcome, RequestRecord
from jaxserve.lab.simulate.run import System, execute, shape_of
from jaxserve.lab.simulate.workload import parse
from jaxserve.observe.machine import described, machine
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import (
    CacheConfig,
    EngineConfig,
    MeshConfig,
    ModelSource,
    SchedulerConfig,
)

OPTIONS = {
    "fair shares": [
        Option("mix", str, "azure-conv", "mix of the simulated tenants, as for jaxserve simulate"),
        Option("device", str, "a100", "simulated device"),
        Option("load", float, 0.3, "share of the capacity that one tenant asks for", 0.01, 1),
        Option("flood", float, 10.0, "times the capacity that the other one asks for", 1),
        Option("seconds", float, 300.0, "of each run", 1),
        Option("seeds", int, 3, "runs, with other arrivals", 1),
        Option("live", bool, False, "run the tiny model on this machine, and simulate nothing"),
        Option("json", str, None, "file for all figures"),
    ]
}
GUEST, FLOOD = "guest", "flood"  # the tenants
MOST_MOVED = 0.1  # of the P99 time to the first token
MOST_REFUSED = 0.01  # of the requests, beyond those that are refused alone
BURST = 600  # requests at once by which the capacity is found
LIVE_WORKLOAD = "prompt=lognormal:2000:0.4:16:3900,output=lognormal:12:0.5:4:32"
WAYS = ("alone", "fair shares", "one tenant")
SETTINGS = SchedulerConfig(policy="slack", chunking="adaptive", admission="predict", max_seqs=256)
# runs arrivals for so many seconds
Run = Callable[[Sequence[Arrival], float], Outcome]


def arrivals_of(tenant: str, workload: str, qps: float, seconds: float, seed: int) -> list[Arrival]:
    """Makes a tenant's arrivals."""
    count = max(1, round(qps * seconds))
    made = parse(f"poisson:{workload}", qps=qps, requests=count, seed=seed)
    return [dataclasses.replace(arrival, kind=tenant, tenant=tenant) for arrival in made]


def three_ways(
    run: Run, workload: str, capacity: float, values: Mapping[str, Any], seed: int
) -> dict[str, list[RequestRecord]]:
    """Runs a seed in each of WAYS. capacity: requests per second."""
    seconds = values["seconds"]
    guest = arrivals_of(GUEST, workload, values["load"] * capacity, seconds, 2 * seed)
    flood = arrivals_of(FLOOD, workload, values["flood"] * capacity, seconds, 2 * seed + 1)
    both = sorted(guest + flood, key=lambda arrival: arrival.time)
    one_tenant = [dataclasses.replace(arrival, tenant="") for arrival in both]
    loads = dict(zip(WAYS, (guest, both, one_tenant)))
    return {way: run(arrivals, seconds).records for way, arrivals in loads.items()}


def figures(records: Sequence[RequestRecord], seconds: float) -> dict[str, float]:
    """Sums up the records of a way, over `seconds` of all seeds."""
    guest = [record for record in records if record.kind == GUEST]
    begun = np.array([record.ttft for record in guest if record.output])
    flood = [record for record in records if record.kind == FLOOD]
    return {
        "requests": len(guest),
        "refused": sum(record.reason == "refused" for record in guest) / len(guest),
        "p50": float(np.percentile(begun, 50)) if begun.size else float("inf"),
        "p99": float(np.percentile(begun, 99)) if begun.size else float("inf"),
        "flood_tokens_per_s": sum(r.prompt + r.output for r in flood if r.output) / seconds,
    }


def harmed(ways: Mapping[str, Mapping[str, float]], way: str) -> str:
    """Says what a way does to the guest beyond what is allowed; "" where nothing."""
    alone = ways["alone"]
    moved = ways[way]["p99"] / alone["p99"] - 1
    refused = ways[way]["refused"] - alone["refused"]
    said = []
    if moved > MOST_MOVED:
        said.append(f"P99 moves by {moved:+.1%}, {MOST_MOVED:.0%} is allowed")
    if refused > MOST_REFUSED:
        said.append(f"{refused:.1%} more are refused, {MOST_REFUSED:.0%} is allowed")
    return "; ".join(said)


def verdict(ways: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Returns the faults of figures by way."""
    faults = []
    if harm := harmed(ways, "fair shares"):
        faults.append(f"fair shares: {harm}")
    if not harmed(ways, "one tenant"):
        faults.append("the flood harms nobody without fair shares: it is none")
    return faults


def shown(ways: Mapping[str, Mapping[str, float]]) -> str:
    """Shows figures by way as a table."""
    rows = [
        [
            way,
            f"{found['p50'] * 1e3:.0f}",
            f"{found['p99'] * 1e3:.0f}",
            f"{found['p99'] / ways['alone']['p99'] - 1:+.1%}",
            f"{found['refused']:.1%}",
            f"{found['flood_tokens_per_s']:.0f}",
        ]
        for way, found in ways.items()
    ]
    head = ["guest", "TTFT p50 ms", "p99 ms", "moved", "refused", "flood tokens/s"]
    return table(head, rows)


def simulated(values: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Simulates all seeds; returns figures by way."""
    system = System(shape_of("llama3-8b"), values["device"], MeshConfig())
    cache = CacheConfig(prefix_caching=False)
    workload = f"mix={values['mix']}"
    burst = parse(f"poisson:{workload}", qps=100.0, requests=BURST, seed=9)
    waits = dataclasses.replace(SETTINGS, admission="queue")
    capacity = BURST / max(r.end for r in execute(system.replica(waits, cache), burst).records)

    def run(arrivals: Sequence[Arrival], seconds: float) -> Outcome:
        return execute(system.replica(SETTINGS, cache), arrivals, until=seconds)

    print(f"llama3-8b on {values['device']}, {values['mix']}: {capacity:.2f} requests/s at most")
    return pooled(run, workload, capacity, values)


def pooled(
    run: Run, workload: str, capacity: float, values: Mapping[str, Any]
) -> dict[str, dict[str, float]]:
    """Runs all seeds; returns figures by way, over the requests of all of them."""
    every: dict[str, list[RequestRecord]] = {way: [] for way in WAYS}
    for seed in range(values["seeds"]):
        for way, records in three_ways(run, workload, capacity, values, seed).items():
            every[way] += records
    seconds = values["seconds"] * values["seeds"]
    return {way: figures(records, seconds) for way, records in every.items()}


def live(values: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Runs all seeds on the tiny model, whose thread shares the interpreter with the clients' as in
    a server; returns figures by way."""
    from jaxserve.engine.build import build
    from jaxserve.server.supervisor import shared_interpreter

    config = EngineConfig(
        ModelSource("random:tiny", max_model_len=4096),
        MeshConfig(),
        CacheConfig(pages=4096, prefix_caching=False),
        dataclasses.replace(SETTINGS, max_seqs=16),
    )
    engine = build(config, progress=sys.stderr.isatty())
    engine.start()
    with contextlib.closing(engine), shared_interpreter():
        while engine.worker.uncompiled:  # compiling would slow the first steps
            time.sleep(0.5)
        gc.collect()
        gc.freeze()  # as servers do: or collections stop all steps for a quarter of a second
        burst = arrivals_of("", LIVE_WORKLOAD, 100.0, 3.0, 9)
        began = time.perf_counter()
        LiveRun(engine, "burst-").at_once(burst, 16)
        capacity = len(burst) / (time.perf_counter() - began)
        runs = iter(range(10**6))

        def run(arrivals: Sequence[Arrival], seconds: float) -> Outcome:
            number = next(runs)
            return LiveRun(engine, f"r{number}-", number).at_their_times(arrivals)

        print(described(machine()))
        print(f"random:tiny, live: {capacity:.1f} requests/s at most")
        return pooled(run, LIVE_WORKLOAD, capacity, values)


def main(values: dict[str, Any]) -> int:
    ways = live(values) if values["live"] else simulated(values)
    print(shown(ways))
    keep(values, ways=ways)
    return exit_code(verdict(ways))


COMMAND = Command(OPTIONS, main, __doc__.partition("\n\n")[2])

if __name__ == "__main__":
    sys.exit(
        command_line("fair_shares", "a flooding tenant beside another one", COMMAND, sys.argv[1:])
    )
