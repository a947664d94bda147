"""Figure 17: hit rate and prefill time of a cache that all nodes share, beside caches of their own.

Ten nodes prefill and outputs have one token (7.3.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments.figures import Claim, Figure, Panel, Row, ratio
from experiments.mooncake.clusters import at_work, fetching, gpu_seconds, prefill_only, simulated
from experiments.mooncake.figure import WORKLOADS, MooncakeSettings
from experiments.papers import main

PREFILL = 10  # nodes
BY_LOAD = "local, routed by load"
SEEN = (5, 2)  # nodes whose caches routing looks at, of all, drawn anew for each request
SYSTEMS: dict[str, dict[str, Any]] = {
    "global": dict(routing="cache_aware"),
    "local": dict(routing="local_cache_aware"),
    **{f"local, {n} seen": dict(routing="local_cache_aware", seen=n) for n in SEEN},
    BY_LOAD: dict(routing="load_balanced"),
}
REMARKS = {
    "local": "our routing to local caches finds nearly all that a global cache would, at this load",
    **{
        f"local, {n} seen": "routing looks at the caches and queues of a part of the nodes, others "
        "for each request: the paper's ratios lie between those of 5 and of 2 of the ten"
        for n in SEEN
    },
    BY_LOAD: "local caches whose contents routing does not know",
}
# global over local: hit rate, prefill time of the GPUs
PAPER = {"conversation": (2.22, 0.76), "toolagent": (1.38, 0.74), "synthetic": (2.36, 0.52)}


def sweep(settings: MooncakeSettings) -> Iterator[Row]:
    for place, workload in enumerate(WORKLOADS):
        for cache, changes in SYSTEMS.items():
            report = simulated(prefill_only(PREFILL, **changes), workload, settings)
            yield {
                "lengths": settings.source(workload),
                "place": place,
                "workload": workload,
                "cache": cache,
                "hit": report.hit_rate(),
                "gpu_s": gpu_seconds(report),
                "ttft_s": float(report.ttft().mean()),
                **at_work(report),
            }


def _claims() -> Iterator[Claim]:
    for workload, (hit, seconds) in PAPER.items():
        for what, column, value, better in (
            ("hit rate", "hit", hit, "higher"),
            ("prefill time", "gpu_s", seconds, "lower"),
        ):
            for local in list(SYSTEMS)[1:]:
                yield Claim(
                    f"{workload}: {what}, global / {local}",
                    value,
                    lambda rows, workload=workload, column=column, local=local: ratio(
                        rows,
                        column,
                        dict(workload=workload, cache="global"),
                        dict(workload=workload, cache=local),
                    ),
                    "Fig. 17",
                    better=better,
                    remark=REMARKS[local],
                )


FIGURE = Figure(
    "fig17",
    "Global and local caches, 10 nodes",
    "simulated",
    sweep,
    mechanisms=(fetching(cache="global"),),
    seeded=True,
    claims=tuple(_claims()),
    panels=(
        Panel("hit rate", "place", "hit", "cache"),
        Panel("prefill seconds of a request", "place", "gpu_s", "cache"),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "mooncake")
