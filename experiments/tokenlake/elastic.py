"""Elastic plans over a pool beside the order of the policy with adaptive chunks, which uses all
lanes in each step: simulated.

    python -m experiments.tokenlake.elastic [REQUESTS]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from experiments.tokenlake.figure import TokenLakeSettings
from experiments.tokenlake.systems import pool, simulated
from experiments.virtual_cluster.cluster import ClusterSpec

RATES = {"loogle": (1.5, 2.5, 3.5), "sharegpt-o3": (15.0, 25.0, 35.0)}


def systems() -> Iterator[tuple[str, ClusterSpec]]:
    """Yields pools whose scheduler is the only difference."""
    hashed = pool("hashed")
    yield "policy", hashed
    yield "elastic", replace(hashed, scheduler=replace(hashed.scheduler, planner="elastic"))


def main() -> None:
    """Prints shares in time and latencies by workload, rate and scheduler."""
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else None
    settings = TokenLakeSettings(requests)
    for workload, rates in RATES.items():
        for qps in rates:
            for name, spec in systems():
                begin = time.perf_counter()
                result = simulated(spec, workload, qps, settings)
                print(
                    f"{workload:12} {qps:5.1f}/s {name:8} in time {result.in_time:4.0%}  input "
                    f"{1e3 * result.input_s:6.2f} ms  output {1e3 * result.output_s:5.1f} ms  gap "
                    f"{1e3 * result.gap_s:4.0f} ms  hits {result.hit:4.0%}  "
                    f"({time.perf_counter() - begin:.0f} s)",
                    flush=True,
                )


if __name__ == "__main__":
    main()
