"""Figure 23: 16 nodes, by how many of them prefill and how many decode, synthetic workload."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Mechanism, Panel, Row, Rows, cell, fewest, ratio
from experiments.mooncake.clusters import (
    DECODED_REQUESTS,
    NODES,
    disaggregated,
    simulated,
)
from experiments.mooncake.figure import MooncakeSettings
from experiments.papers import main

PREFILL = (5, 6, 8, 10, 11)  # nodes
TTFT = 10.0  # seconds, the objectives of 7.5
TBT = 0.1
SPEEDS = (1.0, 2.0)


def sweep(settings: MooncakeSettings) -> Iterator[Row]:
    for speed in SPEEDS:
        for prefill in PREFILL:
            spec = disaggregated(prefill, NODES - prefill, ttft=TTFT, tbt=TBT)
            report = simulated(spec, "synthetic", settings, speed, DECODED_REQUESTS)
            yield {
                "lengths": settings.source("synthetic"),
                "speed": speed,
                "prefill": prefill,
                "ttft_s": float(report.ttft().mean()),
                "tbt_s": float(report.tbt().mean()),
                "in_time": report.effective(TTFT, TBT),
            }


def _best(rows: Rows) -> float:
    """Nodes that prefill over nodes that decode, where most requests are in time at the highest
    load; of several, the first."""
    loaded = [row for row in rows if row["speed"] == SPEEDS[-1]]
    best = max(loaded, key=lambda row: float(row["in_time"]))
    return float(best["prefill"]) / (NODES - float(best["prefill"]))


FIGURE = Figure(
    "fig23",
    "Ratio of prefill to decode nodes, synthetic",
    "simulated",
    sweep,
    mechanisms=(Mechanism("seconds between tokens of nodes that decode", fewest("tbt_s")),),
    claims=(
        Claim(
            f"best P/D ratio, requests replayed at {SPEEDS[-1]:g}x",
            1.0,
            _best,
            "7.5",
            remark="the paper does not say at which rate",
        ),
        Claim(
            "mean TTFT, 5P11D / 11P5D",
            1.0,
            lambda rows: ratio(
                rows, "ttft_s", dict(prefill=5, speed=1.0), dict(prefill=11, speed=1.0)
            ),
            "Fig. 23b: falls with P",
            better="higher",
            limit=True,
        ),
        Claim(
            "mean TBT, 11P5D / 5P11D",
            1.0,
            lambda rows: ratio(
                rows, "tbt_s", dict(prefill=11, speed=1.0), dict(prefill=5, speed=1.0)
            ),
            "Fig. 23b: rises with P",
            better="higher",
            limit=True,
        ),
        Claim(
            "requests in time, 8P8D",
            0.9,
            lambda rows: cell(rows, "in_time", prefill=8, speed=1.0),
            "Fig. 23a: near the highest, say 90 %",
            "%",
            "higher",
            limit=True,
        ),
    ),
    panels=(
        Panel("share in time", "prefill", "in_time", "speed"),
        Panel("mean TTFT", "prefill", "ttft_s", "speed", log="y"),
        Panel("mean TBT", "prefill", "tbt_s", "speed"),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "mooncake")
