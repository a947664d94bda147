"""Figure 9: end to end, four instances: latencies and requests in time by rate, for the three
workloads.

The paper's baselines are the router and the pools of prefill and decode, all with chunks of one
size, which it does not give. Routers with adaptive chunks are stronger, and stand beside.
"""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Panel, Row
from experiments.papers import main
from experiments.tokenlake import goodput
from experiments.tokenlake.figure import TokenLakeSettings
from experiments.tokenlake.systems import (
    ADAPTIVE,
    BY_LOAD,
    DEFAULT_CHUNKS,
    HASHED,
    LEAST_TTFT,
    P1D3,
    P3D1,
    ROUTER,
    SMALL_CHUNKS,
    STRIPED,
    SYSTEMS,
    TWO_HASHES,
)

SETS = {"loogle": "LooGLE", "scbench": "SCBench", "sharegpt-o3": "ShareGPT"}
# P90 goodput of TokenLake over each system (7.1)
PAPER = {
    ("loogle", P1D3): 2.08,
    ("loogle", P3D1): 2.04,
    ("scbench", ROUTER): 2.55,
    ("sharegpt-o3", P1D3): 3.71,
    ("sharegpt-o3", P3D1): 1.56,
}
REMARKS = {
    ("loogle", P1D3): "one instance prefills all of it: an instance's share of the work is what "
    "decides, not its cache",
    ("scbench", ROUTER): "the router's goodput is that of its chunks: see the adaptive one",
    ("sharegpt-o3", P1D3): "here decodes weigh more than prompts, whose system prompt is cached",
    ("sharegpt-o3", P3D1): "one instance decodes for all: see 1P3D",
}
WEAK = (ROUTER, P1D3, P3D1)
STRONG = (DEFAULT_CHUNKS, SMALL_CHUNKS, ADAPTIVE, LEAST_TTFT, TWO_HASHES, BY_LOAD)


def sweep(settings: TokenLakeSettings) -> Iterator[Row]:
    copies = 0
    for workload in SETS:
        for name, spec in SYSTEMS.items():
            for row in goodput.rows(name, spec, workload, settings):
                copies += int(row["copies"])
                yield row
    assert copies or settings.requests is not None, "nothing was copied"


def _claims() -> Iterator[Claim]:
    for (workload, other), times in PAPER.items():
        for system in (HASHED, STRIPED):
            yield _gain(workload, system, other, times, REMARKS.get((workload, other), ""))
    for workload in SETS:
        for other in WEAK:
            if (workload, other) not in PAPER:
                yield _gain(workload, HASHED, other, 1.0, "no number in the text", limit=True)
        for other in STRONG:
            remark = "not in the paper"
            yield _gain(workload, HASHED, other, 1.0, remark, limit=True)
            yield _gain(workload, STRIPED, other, 1.0, remark, limit=True)


def _gain(
    workload: str, system: str, other: str, times: float, remark: str, limit: bool = False
) -> Claim:
    return Claim(
        f"P90 goodput, {SETS[workload]}, {system} / {other}",
        times,
        lambda rows: goodput.gain(rows, workload, system, other),
        "7.1",
        better="higher",
        limit=limit,
        remark=remark,
    )


FIGURE = Figure(
    "fig9",
    "End to end, Llama-2-7B, 8 A100",
    "simulated",
    sweep,
    claims=tuple(_claims()),
    panels=tuple(
        Panel(f"{title}: {what}", "qps", column, "system", (("workload", workload),), log)
        for workload, title in SETS.items()
        for what, column, log in (
            ("ms to the first token, per token", "input_ms", "xy"),
            ("ms per output token", "output_ms", "x"),
            ("in time", "in_time", "x"),
        )
    ),
)

if __name__ == "__main__":
    main(FIGURE, "tokenlake")
