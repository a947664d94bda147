"""One wide mesh, several narrow ones, and the better of both at each rate, over the same devices.

    python -m experiments.benchmarks.mesh_switching

Simulated: `devices` devices as one replica whose ranks share every layer, or as that many replicas
of one device each, between which requests go in turns; each mesh holds its own shard of the
weights. The better of both bounds what a switch between them could give at a steady rate: a switch
that takes no time and loses no KV. Flying Serving (arXiv 2602.22593) reports up to 4.79x over a
fixed mesh at high load and 3.47x at low; its traces are not known here, so none of its figures is
made again. The verdict: every request ended, and neither mesh is better at every rate."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np

from experiments.script import command_line, exit_code, keep
from jaxserve.api.request import Slo
from jaxserve.cli.display import table
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.recorder import RequestRecord
from jaxserve.lab.simulate.run import System, drive, requests, shape_of
from jaxserve.lab.simulate.workload import parse
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig

OPTIONS = {
    "mesh_switching": [
        Option("model", str, "llama3-8b", "shape of the model"),
        Option("device", str, "h100", "kind of device"),
        Option("devices", int, 8, "of one node", 2),
        Option("mix", str, "mooncake-conversation", "mix of lengths"),
        Option("rates", str, "0.5,2,4,6,8,10", "requests per second, as N,N"),
        Option("requests", int, 200, "requests of a run", 1),
        Option("seed", int, 1, "of arrivals and lengths", 0),
        Option("json", str, None, "file for all figures"),
    ]
}


def served(values: dict[str, Any], ranks: int, arrivals: list[Arrival]) -> list[RequestRecord]:
    """Serves arrivals by as many replicas of `ranks` ranks as there are devices for, in turns."""
    system = System(shape_of(values["model"]), values["device"], MeshConfig(tp=ranks))
    scheduler = SchedulerConfig(policy="slack", chunking="adaptive", chunk_tokens=4096, max_seqs=64)
    count = values["devices"] // ranks
    found: list[RequestRecord] = []
    for number in range(count):
        replica = system.replica(scheduler, CacheConfig(prefix_caching=False))
        mine = arrivals[number::count]
        coming = requests(mine, replica.info.max_model_len, Slo())
        found += drive(replica, coming).records
    return found


def run(values: dict[str, Any]) -> int:
    widths = {"wide": values["devices"], "narrow": 1}
    rows = []
    ended = True
    for rate in (float(rate) for rate in values["rates"].split(",")):
        arrivals = parse(
            f"poisson:mix={values['mix']}",
            qps=rate,
            requests=values["requests"],
            seed=values["seed"],
        )
        arrivals = [dataclasses.replace(arrival, blocks=None) for arrival in arrivals]
        median = {}
        for name, ranks in widths.items():
            records = served(values, ranks, arrivals)
            ended = ended and sum(record.reason == "length" for record in records) == len(arrivals)
            times = np.array([record.end - record.arrival for record in records])
            median[name] = float(np.median(times)), float(np.percentile(times, 90))
        better = min(median, key=lambda name: median[name][0])
        rows.append((rate, *median["wide"], *median["narrow"], better))
    head = ("rate (1/s)", "wide, median (s)", "P90", "narrow, median (s)", "P90", "better")
    print(table(head, [(f"{row[0]:g}", *(f"{x:.2f}" for x in row[1:5]), row[5]) for row in rows]))
    keep(values, rows=rows)
    faults = [] if ended else ["a request did not end"]
    if len({row[5] for row in rows}) < 2:
        faults.append(f"{rows[0][5]} is better at every rate: nothing is gained by a switch")
    return exit_code(faults)


if __name__ == "__main__":
    sys.exit(
        command_line(
            "python -m experiments.benchmarks.mesh_switching",
            "one wide mesh and several narrow ones over the same devices",
            Command(OPTIONS, run),
            sys.argv[1:],
        )
    )
