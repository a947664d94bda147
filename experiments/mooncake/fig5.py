"""Figure 5: mean time to the first token by the way in which requests are routed to the nodes that
prefill."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Mechanism, Panel, Row, Rows, cell, fewest, ratio
from experiments.mooncake.clusters import FETCHES, gpu_seconds, prefill_only, simulated
from experiments.mooncake.figure import MooncakeSettings
from experiments.papers import main

PREFILL = (8, 7)  # nodes
# seconds, read from the figure in the FAST '25 version of the paper
PAPER = {
    "cache_aware": 3.07,
    "local_cache_aware": 3.58,
    "load_balanced": 5.27,
    "random": 19.65,
}


def sweep(settings: MooncakeSettings) -> Iterator[Row]:
    for nodes in PREFILL:
        for routing in PAPER:
            report = simulated(prefill_only(nodes, routing=routing), "conversation", settings)
            yield {
                "lengths": settings.source("conversation"),
                "nodes": nodes,
                "routing": routing,
                "ttft_s": float(report.ttft().mean()),
                "hit": report.hit_rate(),
                "gpu_s": gpu_seconds(report),
                "fetched_tb": report.bytes_fetched / 1e12,
            }


def _ttft(rows: Rows, routing: str, nodes: int) -> float:
    return cell(rows, "ttft_s", routing=routing, nodes=nodes)


def _claims() -> Iterator[Claim]:
    for nodes in PREFILL:
        for routing, seconds in PAPER.items():
            yield Claim(
                f"{nodes} nodes prefill: mean TTFT, {routing}",
                seconds,
                lambda rows, routing=routing, nodes=nodes: _ttft(rows, routing, nodes),
                "Fig. 5",
                "s",
                "lower",
                remark="the paper has 16 nodes and does not say how many prefill",
            )
        for routing in list(PAPER)[1:]:
            yield Claim(
                f"{nodes} nodes prefill: mean TTFT, {routing} / cache_aware",
                PAPER[routing] / PAPER["cache_aware"],
                lambda rows, routing=routing, nodes=nodes: ratio(
                    rows,
                    "ttft_s",
                    dict(routing=routing, nodes=nodes),
                    dict(routing="cache_aware", nodes=nodes),
                ),
                "Fig. 5",
                better="higher",
            )


FIGURE = Figure(
    "fig5",
    "TTFT by routing, conversation, Llama-3 70B",
    "simulated",
    sweep,
    mechanisms=(Mechanism(FETCHES, fewest("fetched_tb", routing="cache_aware")),),
    claims=tuple(_claims()),
    panels=(
        Panel("mean TTFT", "nodes", "ttft_s", "routing", log="y"),
        Panel("hit rate", "nodes", "hit", "routing"),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "mooncake")
