"""Figure 21: time to the first token by the bandwidth of the nodes' network, synthetic workload."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from experiments.figures import Claim, Figure, Mechanism, Panel, Row, Rows, cell, fewest, ratio
from experiments.mooncake.clusters import FETCHES, SPEC, UNCACHED, prefill_only, simulated
from experiments.mooncake.fig17 import PREFILL
from experiments.mooncake.figure import MooncakeSettings
from experiments.mooncake.node import GBPS, KV_BYTES
from experiments.papers import main

BANDWIDTHS = (24, 50, 100, 200, 400)  # Gbps
RECOMPUTED = "computed again"
FETCHED = "global cache"
SYSTEMS = {FETCHED: SPEC.cache, RECOMPUTED: UNCACHED}


def sweep(settings: MooncakeSettings) -> Iterator[Row]:
    for gbps in BANDWIDTHS:
        for system in SYSTEMS:
            report = simulated(
                prefill_only(PREFILL, bytes_per_s=gbps * GBPS, cache=SYSTEMS[system]),
                "synthetic",
                settings,
            )
            fetched = [record.fetched for record in report.records if record.fetched]
            mean = float(np.mean(fetched)) if fetched else 0.0
            yield {
                "lengths": settings.source("synthetic"),
                "gbps": gbps,
                "system": system,
                "ttft_s": float(report.ttft().mean()),
                "fetched_tb": report.bytes_fetched / 1e12,
                "ideal_fetch_s": mean * KV_BYTES / (gbps * GBPS),
            }


def _ttft(rows: Rows, gbps: int, system: str = FETCHED) -> float:
    return cell(rows, "ttft_s", gbps=gbps, system=system)


FIGURE = Figure(
    "fig21",
    "TTFT by bandwidth, synthetic",
    "simulated",
    sweep,
    mechanisms=(Mechanism(FETCHES, fewest("fetched_tb", system=FETCHED)),),
    seeded=True,
    claims=(
        *(
            Claim(
                f"mean TTFT at {gbps} Gbps",
                2.0,
                lambda rows, gbps=gbps: _ttft(rows, gbps),
                "7.4.2",
                "s",
                "lower",
                limit=True,
            )
            for gbps in (200, 400)
        ),
        Claim(
            "mean TTFT, 24 / 400 Gbps",
            2.0,
            lambda rows: ratio(
                rows, "ttft_s", dict(gbps=24, system=FETCHED), dict(gbps=400, system=FETCHED)
            ),
            "7.4.2: 'a sharp increase', say 2x",
            better="higher",
            limit=True,
            remark="our routing knows the bandwidth and computes what would take longer to "
            "fetch, so that a slow network costs less",
        ),
        Claim(
            "mean TTFT at 100 Gbps, global cache / computed again",
            1.0,
            lambda rows: _ttft(rows, 100) / _ttft(rows, 100, RECOMPUTED),
            "7.4.2: 'significantly less'",
            better="lower",
            limit=True,
        ),
    ),
    panels=(
        Panel("mean TTFT", "gbps", "ttft_s", "system", log="xy"),
        Panel("fetched", "gbps", "fetched_tb", "system", log="x"),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "mooncake")
