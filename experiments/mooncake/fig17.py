"""Figure 17: hit rate and prefill time of a cache that all nodes share, beside caches of their own.

Ten nodes prefill and outputs have one token (7.3.2).
"""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Panel, Row, ratio
from experiments.mooncake.clusters import at_work, fetching, gpu_seconds, prefill_only, simulated
from experiments.mooncake.figure import WORKLOADS, MooncakeSettings
from experiments.papers import main

PREFILL = 10  # nodes
BY_LOAD = "local, routed by load"
ROUTING = {"global": "cache_aware", "local": "local_cache_aware", BY_LOAD: "load_balanced"}
REMARKS = {
    "local": "our routing to local caches finds nearly all that a global cache would, at this load",
    BY_LOAD: "local caches whose contents routing does not know",
}
# global over local: hit rate, prefill time of the GPUs
PAPER = {"conversation": (2.22, 0.76), "toolagent": (1.38, 0.74), "synthetic": (2.36, 0.52)}


def sweep(settings: MooncakeSettings) -> Iterator[Row]:
    for place, workload in enumerate(WORKLOADS):
        for cache, routing in ROUTING.items():
            report = simulated(prefill_only(PREFILL, routing=routing), workload, settings)
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
            for local in list(ROUTING)[1:]:
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
