"""Figure 15: mean time for which GPUs prefill a request, by system and workload.

Only prefill is simulated, of the first requests of each trace: what decodes add to vLLM's steps is
not in it. Mooncake has eight nodes that prefill, vLLM sixteen.
"""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Mechanism, Panel, Row, fewest, ratio
from experiments.mooncake.clusters import (
    DECODE_CHUNK,
    NODES,
    UNCACHED,
    chunks_of,
    gpu_seconds,
    prefill_only,
    simulated,
)
from experiments.mooncake.figure import WORKLOADS, MooncakeSettings
from experiments.papers import main

VLLM = prefill_only(NODES, routing="load_balanced", cache_tokens=None, cache=UNCACHED)
CACHING = prefill_only(NODES, routing="load_balanced", cache_tokens=None)
CHUNKED = prefill_only(
    NODES,
    routing="load_balanced",
    cache_tokens=None,
    cache=UNCACHED,
    scheduler=chunks_of(DECODE_CHUNK),
)
SYSTEMS = {
    "mooncake": prefill_only(NODES // 2),
    "vllm": VLLM,
    "vllm, prefix caching": CACHING,
    "vllm, chunked prefill": CHUNKED,
}
REQUESTS = 3000
# as multiples of Mooncake's time
PAPER = {
    "conversation": (1.56, 1.43, 1.90),
    "toolagent": (2.12, 1.40, 2.68),
    "synthetic": (2.76, 2.59, 3.33),
}


def sweep(settings: MooncakeSettings) -> Iterator[Row]:
    for place, workload in enumerate(WORKLOADS):
        for system, spec in SYSTEMS.items():
            report = simulated(spec, workload, settings, most=REQUESTS)
            yield {
                "lengths": settings.source(workload),
                "place": place,
                "workload": workload,
                "system": system,
                "gpu_s": gpu_seconds(report),
                "hit": report.hit_rate(),
            }


def _claims() -> Iterator[Claim]:
    for workload, multiples in PAPER.items():
        for system, multiple in zip(list(SYSTEMS)[1:], multiples):
            yield Claim(
                f"{workload}: prefill time, {system} / mooncake",
                multiple,
                lambda rows, workload=workload, system=system: ratio(
                    rows,
                    "gpu_s",
                    dict(workload=workload, system=system),
                    dict(workload=workload, system="mooncake"),
                ),
                "Fig. 15",
                better="higher",
                remark=f"chunks of {DECODE_CHUNK} tokens; the paper does not say how long its are"
                if system.endswith("prefill")
                else "",
            )


FIGURE = Figure(
    "fig15",
    "Prefill time of a request",
    "simulated",
    sweep,
    mechanisms=(Mechanism("cached tokens", fewest("hit", system="mooncake")),),
    seeded=True,
    claims=tuple(_claims()),
    panels=(
        Panel("seconds", "place", "gpu_s", "system"),
        Panel("hit rate", "place", "hit", "system"),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "mooncake")
