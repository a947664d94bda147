"""The simulator beside the live engine: the same arrivals, settings and costs, and how far the
figures are apart.

    python -m experiments.benchmarks.fidelity --json=fidelity.json

The live engine runs first and measures its costs if it has none yet; the virtual one then predicts
with the same ones.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.script import command_line
from jaxserve.cache import CacheManager
from jaxserve.cli.display import table
from jaxserve.costs.coefficients import Costs
from jaxserve.lab.research.drive import LiveRun
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.recorder import Outcome
from jaxserve.lab.simulate.replica import VirtualReplica
from jaxserve.lab.simulate.run import execute
from jaxserve.lab.simulate.workload import parse as workload
from jaxserve.observe.machine import described, machine
from jaxserve.scheduling import Scheduler
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
        Option("seed", int, 0, "of arrivals and lengths", 0),
        Option("policy", str, "slack", "order of prefill", choices=("fcfs", "edf", "llf", "slack")),
        Option(
            "chunking", str, "adaptive", "prefill tokens of a step", choices=("static", "adaptive")
        ),
        Option("tpot", float, 0.3, "objective: seconds per output token", 0.001),
        Option("json", str, None, "file for all figures"),
    ]
}
PAGES = 1024
LONGEST = 4096


@dataclasses.dataclass(frozen=True)
class RequestLatency:
    """Seconds of one request."""

    ttft: float
    tpot: float
    total: float


def latencies(outcome: Outcome) -> list[RequestLatency]:
    return [RequestLatency(r.ttft, r.tpot, r.end - r.arrival) for r in outcome.records]


def live(
    config: EngineConfig, arrivals: Sequence[Arrival]
) -> tuple[list[RequestLatency], Costs, float]:
    """Runs the arrivals on a live engine; returns the outcome, the costs it predicted with, and the
    scale it learnt."""
    from jaxserve.engine.build import build

    engine = build(config, progress=sys.stderr.isatty())
    engine.start()
    try:
        for seed in range(2):  # what runs first runs slower: it does not count
            warm = [Arrival(0.0, 200, 4), Arrival(0.0, 600, 4)]
            LiveRun(engine, f"warm{seed}-").at_their_times(warm)
        found = LiveRun(engine, "r").at_their_times(arrivals)
        return latencies(found), engine.scheduler.predictor.costs, engine.scheduler.predictor.scale
    finally:
        engine.close()


def virtual(
    config: EngineConfig, arrivals: Sequence[Arrival], costs: Costs, scale: float
) -> list[RequestLatency]:
    """Runs the same arrivals on a virtual replica with these costs."""
    cache = CacheManager(config.cache, config.mesh.kvp, config.scheduler.max_seqs)
    scheduler = Scheduler(config.scheduler, cache, config.mesh, LONGEST, costs=costs)
    scheduler.predictor.scale = scale
    replica = VirtualReplica(scheduler, config.cache, config.mesh, config.lookahead)
    return latencies(execute(replica, arrivals))


def compared(
    seen: Sequence[RequestLatency], simulated: Sequence[RequestLatency]
) -> dict[str, dict[str, float]]:
    """Mean, p50 and p90 of both, and how far the mean is off."""
    out = {}
    for name in ("ttft", "tpot", "total"):
        a, b = (np.array([getattr(latency, name) for latency in of]) for of in (seen, simulated))
        figures = {
            f"{of}_{which}": float(f(x))
            for of, x in (("live", a), ("simulated", b))
            for which, f in (
                ("mean", np.mean),
                ("p50", np.median),
                ("p90", lambda v: np.percentile(v, 90)),
            )
        }
        out[name] = {**figures, "mean_off": float(b.mean() / a.mean() - 1)}
    return out


def shown(result: dict[str, dict[str, float]]) -> str:
    rows = [
        [
            name,
            *(
                f"{figures[f'{of}_{which}'] * 1e3:.0f}"
                for which in ("mean", "p50", "p90")
                for of in ("live", "simulated")
            ),
            f"{figures['mean_off']:+.1%}",
        ]
        for name, figures in result.items()
    ]
    return table(
        [
            "milliseconds",
            "mean live",
            "simulated",
            "p50 live",
            "simulated",
            "p90 live",
            "simulated",
            "mean off",
        ],
        rows,
    )


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
    arrivals = workload(
        values["workload"], qps=values["qps"], requests=values["requests"], seed=values["seed"]
    )
    seen, costs, scale = live(config, arrivals)
    results = {
        "as profiled": compared(seen, virtual(config, arrivals, costs, 1.0)),
        "as corrected online": compared(seen, virtual(config, arrivals, costs, scale)),
    }
    print(described(machine()))
    print(
        f"{values['model']}: {len(arrivals)} requests at {values['qps']}/s, {values['policy']}, "
        f"{values['chunking']} chunks"
    )
    for name, result in results.items():
        print(
            "\n"
            f"simulated {name} (scale {scale if name != 'as profiled' else 1.0:.2f})\n"
            "\n"
            f"{shown(result)}"
        )
    if values["json"]:
        report = {"machine": machine(), "settings": values, "scale": scale, "results": results}
        Path(values["json"]).write_text(json.dumps(report, indent=1) + "\n")
    return 0


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])

if __name__ == "__main__":
    sys.exit(
        command_line("fidelity", "the simulator beside the live engine", COMMAND, sys.argv[1:])
    )
