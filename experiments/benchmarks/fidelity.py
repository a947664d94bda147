"""The simulator beside the live engine: the same arrivals, settings and costs, over several seeds,
and how far the figures are apart.

    python -m experiments.benchmarks.fidelity --json=fidelity.json

The live engine runs first and measures its costs if it has none yet; the virtual one then predicts
with the same ones, times what all live steps together took over what they say. Its steps take what
is predicted, or are drawn around that with the spread that the live engine's steps had around
theirs (`--noise=` another one). Aims: means within 5 %, P99 within 15 %, over the requests of all
seeds.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.script import command_line, keep
from jaxserve.cache import CacheManager
from jaxserve.cli.display import table
from jaxserve.costs.coefficients import Costs
from jaxserve.lab.research.drive import LiveRun
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.noise import Noise
from jaxserve.lab.simulate.recorder import Outcome
from jaxserve.lab.simulate.replica import VirtualReplica
from jaxserve.lab.simulate.run import execute
from jaxserve.lab.simulate.workload import parse as workload
from jaxserve.observe.machine import described, machine
from jaxserve.scheduling import Scheduler
from jaxserve.scheduling.events import StepRead
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
    "fidelity": [
        Option("model", str, "smollm2-135m", "model: a fetched name, a folder or a .gguf file"),
        Option(
            "workload",
            str,
            "poisson:prompt=lognormal:300:1:16:3000,output=lognormal:24:0.5:4:64",
            "arrivals, as for jaxserve simulate",
        ),
        Option("qps", float, 0.5, "requests per second", 0.001),
        Option("requests", int, 100, "how many", 1),
        Option("seed", int, 0, "the first, of arrivals, lengths and noise", 0),
        Option("seeds", int, 3, "how many", 1),
        Option("noise", float, None, "sigma of step times; default: that of the live steps", 0, 1),
        Option("policy", str, "slack", "order of prefill", choices=("fcfs", "edf", "llf", "slack")),
        Option(
            "chunking", str, "adaptive", "prefill tokens of a step", choices=("static", "adaptive")
        ),
        Option("tpot", float, 0.3, "objective: seconds per output token", 0.001),
        Option("json", str, None, "file for all figures"),
    ]
}
AIMS = {"mean": 0.05, "p99": 0.15}  # by which a figure may be off, either way
STATISTICS = {"mean": np.mean, "p50": np.median, "p99": lambda x: np.percentile(x, 99)}
PAGES = 1024
LONGEST = 4096


@dataclasses.dataclass(frozen=True)
class RequestLatency:
    """Seconds of one request."""

    ttft: float
    tpot: float
    total: float


Latencies = Sequence[RequestLatency]


@dataclasses.dataclass(frozen=True)
class Live:
    """Results of the live engine: latencies of each seed, the costs that it predicted with, and of
    each step the seconds that these say without what was learnt from steps, and those it took."""

    seeds: list[list[RequestLatency]]
    costs: Costs
    steps: list[tuple[float, float]]

    @property
    def scale(self) -> float:
        """Seconds that all steps together took over those predicted."""
        predicted, taken = np.sum(self.steps, 0)
        return float(taken / predicted)

    @property
    def sigma(self) -> float:
        """Spread of the steps' times around their prediction. The rare step that took over ten
        times as long is the machine's, not the model's."""
        predicted, taken = np.array(self.steps).T
        ratios = taken / predicted
        return float(min(np.log(ratios[(ratios > 0.1) & (ratios < 10)]).std(), 1.0))


def latencies(outcome: Outcome) -> list[RequestLatency]:
    return [RequestLatency(r.ttft, r.tpot, r.end - r.arrival) for r in outcome.records]


def live(config: EngineConfig, loads: Sequence[Sequence[Arrival]]) -> Live:
    """Runs the arrivals of each seed on one live engine."""
    from jaxserve.engine.build import build

    steps: list[tuple[float, float]] = []

    def note(step: StepRead) -> None:
        if step.comparable and step.batch.seconds > 0:
            steps.append((step.batch.seconds / predictor.scale, step.seconds))

    engine = build(config, progress=sys.stderr.isatty())
    predictor = engine.scheduler.predictor
    engine.start()
    try:
        while engine.worker.uncompiled:  # compiling would slow the first seeds' steps
            time.sleep(0.5)
        for seed in range(2):  # what runs first runs slower: it does not count
            warm = [Arrival(0.0, 200, 4), Arrival(0.0, 600, 4)]
            LiveRun(engine, f"warm{seed}-").at_their_times(warm)
        engine.bus.subscribe(StepRead, note)
        found = [
            latencies(LiveRun(engine, f"r{number}-", number).at_their_times(arrivals))
            for number, arrivals in enumerate(loads)
        ]
        return Live(found, predictor.costs, steps)
    finally:
        engine.close()


def virtual(
    config: EngineConfig, arrivals: Sequence[Arrival], costs: Costs, scale: float, noise: Noise
) -> list[RequestLatency]:
    """Runs the same arrivals on a virtual replica with these costs."""
    cache = CacheManager(config.cache, config.mesh.kvp, config.scheduler.max_seqs)
    scheduler = Scheduler(config.scheduler, cache, config.mesh, LONGEST, costs=costs)
    scheduler.predictor.scale = scale
    replica = VirtualReplica(scheduler, config.cache, config.mesh, config.lookahead, noise=noise)
    return latencies(execute(replica, arrivals))


def compared(seen: Latencies, simulated: Latencies) -> dict[str, dict[str, float]]:
    """Statistics of both, and how far the simulated ones are off, by the name of the latency."""
    out = {}
    for name in ("ttft", "tpot", "total"):
        a, b = (np.array([getattr(latency, name) for latency in of]) for of in (seen, simulated))
        figures: dict[str, float] = {}
        for which, statistic in STATISTICS.items():
            ours, theirs = float(statistic(b)), float(statistic(a))
            figures |= {
                f"live_{which}": theirs,
                f"simulated_{which}": ours,
                f"{which}_off": ours / theirs - 1,
            }
        out[name] = figures
    return out


def shown(result: dict[str, dict[str, float]]) -> str:
    rows = []
    for name, figures in result.items():
        cells = [name]
        for which in STATISTICS:
            off = figures[f"{which}_off"]
            aim = AIMS.get(which)
            mark = "" if aim is None or name == "total" else [" no", " ok"][abs(off) <= aim]
            cells += [
                f"{figures[f'live_{which}'] * 1e3:.0f}",
                f"{figures[f'simulated_{which}'] * 1e3:.0f}",
                f"{off:+.1%}{mark}",
            ]
        rows.append(cells)
    head = [text for which in STATISTICS for text in (f"{which} live", "simulated", "off")]
    return table(["milliseconds", *head], rows)


def run(values: dict[str, Any]) -> int:
    scheduler = SchedulerConfig(
        policy=values["policy"], chunking=values["chunking"], max_seqs=8, tpot=values["tpot"]
    )
    config = EngineConfig(
        ModelSource(values["model"], max_model_len=LONGEST),
        MeshConfig(),
        CacheConfig(pages=PAGES, prefix_caching=False),
        scheduler,
    )
    seeds = range(values["seed"], values["seed"] + values["seeds"])
    loads = [
        workload(values["workload"], qps=values["qps"], requests=values["requests"], seed=seed)
        for seed in seeds
    ]
    seen = live(config, loads)
    sigma = seen.sigma if values["noise"] is None else values["noise"]
    every = [latency for found in seen.seeds for latency in found]
    print(described(machine()))
    print(
        f"{values['model']}: {len(seeds)} seeds of {values['requests']} requests at "
        f"{values['qps']}/s, {values['policy']}, {values['chunking']} chunks; scale "
        f"{seen.scale:.2f}; spread of {len(seen.steps)} steps {seen.sigma:.2f}, drawn {sigma:.2f}"
    )
    results = {}
    for name, spread in (("without noise", 0.0), ("with noise", sigma)):
        made = [
            virtual(config, arrivals, seen.costs, seen.scale, Noise(spread, seed))
            for seed, arrivals in zip(seeds, loads)
        ]
        each = [compared(one, other) for one, other in zip(seen.seeds, made)]
        pooled = compared(every, [latency for found in made for latency in found])
        results[name] = {"pooled": pooled, "seeds": each}
        print(f"\nsimulated {name}, all seeds\n\n{shown(pooled)}")
        for seed, one in zip(seeds, each):
            print(f"\nseed {seed}\n\n{shown(one)}")
    keep(values, scale=seen.scale, sigma=seen.sigma, results=results)
    return 0


COMMAND = Command(OPTIONS, run, __doc__.partition("\n\n")[2])

if __name__ == "__main__":
    sys.exit(
        command_line("fidelity", "the simulator beside the live engine", COMMAND, sys.argv[1:])
    )
