"""Figure 18: on how many nodes the hottest blocks are cached after an hour of replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from experiments.figures import Claim, Figure, Panel, Row, Rows, cell, ratio
from experiments.mooncake.clusters import at_work, fetching, prefill_only, simulated
from experiments.mooncake.fig17 import PREFILL
from experiments.mooncake.figure import WORKLOADS, MooncakeSettings
from experiments.papers import main

RANKS = (10, 100, 1000, 10_000)
EVERY = 30.0  # seconds between counts of copies (Fig. 18)
SETTLED = 0.5  # share of a trace's time after which caches are taken for settled
HOT = (10, 100)  # ranks of which the paper says that they are almost everywhere
BOUND = (
    "a block is on no more nodes than there were requests for it (column `asked`): of the first "
    "2000 of conversation 5 to 7 at rank 10 and 4 or 5 at rank 100, of toolagent 4 at rank 100; "
    "of all in the hour 21 at rank 100"
)


def sweep(settings: MooncakeSettings) -> Iterator[Row]:
    for workload in WORKLOADS:
        end = settings.arrivals(workload)[-1].time
        spec = prefill_only(PREFILL, count_every=EVERY, settles=SETTLED * end)
        report = simulated(spec, workload, settings)
        asked = _times_asked(settings, workload)
        for rank in RANKS:
            yield {
                "lengths": settings.source(workload),
                "workload": workload,
                "rank": rank,
                "replicas": report.copies.at_rank(rank),
                "asked": asked[rank - 1] if len(asked) >= rank else 0,
                **at_work(report),
            }


def _times_asked(settings: MooncakeSettings, workload: str) -> list[int]:
    """Requests whose prompts have each block, most first."""
    counted: Counter[int] = Counter()
    for arrival in settings.arrivals(workload):
        if arrival.blocks is not None:
            counted.update(arrival.blocks)
    return sorted(counted.values(), reverse=True)


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
                f"{workload}: share of the nodes that hold the block of rank {rank}",
                1.0,
                lambda rows, workload=workload, rank=rank: _share(rows, workload, rank),
                "7.3.3: 'almost every instance'",
                "%",
                "higher",
                remark=BOUND,
            )
            for workload in ("conversation", "toolagent")
            for rank in HOT
        ),
        *(
            Claim(
                f"rank {rank}: copies, synthetic / conversation",
                1.0,
                lambda rows, rank=rank: ratio(
                    rows,
                    "replicas",
                    dict(workload="synthetic", rank=rank),
                    dict(workload="conversation", rank=rank),
                ),
                "7.3.3: 'fewer replicas'",
                better="lower",
                limit=True,
                remark="in the first 2000 requests, synthetic asks for these blocks twice as often",
            )
            for rank in HOT
        ),
    ),
    panels=(Panel("replicas by rank", "rank", "replicas", "workload", log="x"),),
)

if __name__ == "__main__":
    main(FIGURE, "mooncake")
