"""Table 3: the three workloads, their mean lengths and what an unbounded cache would hit."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Panel, Row, cell
from experiments.mooncake.cache_replay import hit_ratio, prompts_of, unbounded
from experiments.mooncake.figure import WORKLOADS, MooncakeSettings
from experiments.papers import main
from jaxserve.lab.simulate.arrival import workload_summary

REMARKS = {
    "conversation": "of all hash ids; of those of the second half, 39.8 %",
    "toolagent": "generated where the trace is not there",
    "synthetic": "of all hash ids",
}


def sweep(settings: MooncakeSettings) -> Iterator[Row]:
    for name in WORKLOADS:
        summary = workload_summary(settings.arrivals(name))
        prompts = prompts_of(name, settings)
        yield {
            "lengths": settings.source(name),
            "workload": name,
            "requests": summary["count"],
            "prompt_tokens": summary["prompt"]["mean"],
            "output_tokens": summary["output"]["mean"],
            "hit": hit_ratio(prompts, unbounded(prompts)),
        }


def _claims() -> Iterator[Claim]:
    for name, published in WORKLOADS.items():
        for what, column, value in (
            ("thousands of requests", "requests", published.requests / 1000),
            ("thousands of prompt tokens", "prompt_tokens", published.prompt / 1000),
            ("thousands of output tokens", "output_tokens", published.output / 1000),
        ):
            yield Claim(
                f"{name}: {what}",
                value,
                lambda rows, column=column, name=name: cell(rows, column, workload=name) / 1000,
                "Table 3",
                "k",
            )
        yield Claim(
            f"{name}: blocks that an unbounded cache hits",
            published.hit,
            lambda rows, name=name: cell(rows, "hit", workload=name),
            "Table 3",
            "%",
            remark=REMARKS[name],
        )


FIGURE = Figure(
    "table3",
    "Workloads",
    "computed",
    sweep,
    claims=tuple(_claims()),
    panels=(Panel("Table 3", "prompt_tokens", "hit", "workload"),),
    runs="real cache, unbounded",
)

if __name__ == "__main__":
    main(FIGURE, "mooncake")
