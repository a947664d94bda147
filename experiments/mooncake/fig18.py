"""Figure 18: on how many nodes the hottest blocks are cached after an hour of replay."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Panel, Row, Rows, cell
from experiments.mooncake.clusters import at_work, fetching, prefill_only, simulated
from experiments.mooncake.fig17 import PREFILL
from experiments.mooncake.figure import WORKLOADS, MooncakeSettings
from experiments.papers import main

RANKS = (10, 100, 1000, 10_000)


def sweep(settings: MooncakeSettings) -> Iterator[Row]:
    for workload in WORKLOADS:
        report = simulated(prefill_only(PREFILL), workload, settings)
        holders = report.holders
        for rank in RANKS:
            yield {
                "lengths": settings.source(workload),
                "workload": workload,
                "rank": rank,
                "replicas": int(holders[rank - 1]) if len(holders) >= rank else 0,
                **at_work(report),
            }


def _share(rows: Rows, workload: str, rank: int) -> float:
    """Share of the nodes that hold the block of this rank."""
    return cell(rows, "replicas", workload=workload, rank=rank) / PREFILL


FIGURE = Figure(
    "fig18",
    "Nodes that hold the hottest blocks, 10 nodes",
    "simulated",
    sweep,
    mechanisms=(fetching(),),
    seeded=True,
    claims=(
        *(
            Claim(
                f"{workload}: share of the nodes that hold the 100th block",
                1.0,
                lambda rows, workload=workload: _share(rows, workload, 100),
                "7.3.3: 'almost every instance'",
                "%",
                "higher",
                remark="ranked by replicas at the end of the run; the paper ranks by the sum of "
                "samples every 30 s",
            )
            for workload in ("conversation", "toolagent")
        ),
        Claim(
            "synthetic: share of the nodes that hold the 100th block",
            0.5,
            lambda rows: _share(rows, "synthetic", 100),
            "7.3.3: 'fewer replicas', say below half",
            "%",
            "lower",
            limit=True,
        ),
    ),
    panels=(Panel("replicas by rank", "rank", "replicas", "workload", log="x"),),
)

if __name__ == "__main__":
    main(FIGURE, "mooncake")
