"""Figure 16: hit rate of a cache by its size, for each workload and for all together."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Panel, Row, cell
from experiments.mooncake.cache_replay import ALL, NODE_TOKENS, hit_ratio, prompts_of, unbounded
from experiments.mooncake.figure import WORKLOADS, MooncakeSettings
from experiments.papers import main

MILLION = 1_000_000
SIZES = (1, 3, 5, 10, 20, 30, 50, 100)  # millions of tokens
# hit rate of what one node holds, as a share of the highest possible one
AT_NODE = {"conversation": 0.41, "toolagent": 0.75, "synthetic": 0.46, ALL: 0.48}


def sweep(settings: MooncakeSettings) -> Iterator[Row]:
    for name in (*WORKLOADS, ALL):
        prompts = prompts_of(name, settings)
        highest = hit_ratio(prompts, unbounded(prompts))
        for size in SIZES:
            hit = hit_ratio(prompts, size * MILLION)
            yield {
                "lengths": "; ".join(map(settings.source, WORKLOADS if name == ALL else [name])),
                "workload": name,
                "mtokens": size,
                "hit": hit,
                "of_highest": hit / highest if highest else 1.0,
            }


def _claims() -> Iterator[Claim]:
    for name, share in AT_NODE.items():
        yield Claim(
            f"{name}: 3M tokens, hits as a share of the highest rate",
            share,
            lambda rows, name=name: cell(
                rows, "of_highest", workload=name, mtokens=NODE_TOKENS // MILLION
            ),
            "Fig. 16",
            "%",
            remark="where its trace is generated, this share was fitted"
            if name == "toolagent"
            else "",
        )
    for name in AT_NODE:
        yield Claim(
            f"{name}: 50M tokens, hits as a share of the highest rate",
            1.0,
            lambda rows, name=name: cell(rows, "of_highest", workload=name, mtokens=50),
            "7.3.1: 'nearly reaches'",
            "%",
        )


FIGURE = Figure(
    "fig16",
    "Hit rate by cache size, LRU",
    "simulated",
    sweep,
    claims=tuple(_claims()),
    panels=(
        Panel("hit rate", "mtokens", "hit", "workload", log="x"),
        Panel("share of the highest", "mtokens", "of_highest", "workload", log="x"),
    ),
    runs="real cache",
)

if __name__ == "__main__":
    main(FIGURE, "mooncake")
