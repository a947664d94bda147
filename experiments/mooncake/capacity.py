"""Figures 1, 13 and 14: requests within both objectives, Mooncake beside vLLM, by the objective for
the time between tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from experiments.figures import Claim, Figure, Mechanism, Panel, Row, Rows, cell, fewest
from experiments.mooncake.clusters import (
    DECODED_REQUESTS,
    HANDED_ON,
    SYSTEMS,
    TTFT,
    at_work,
    fetching,
    simulated,
)
from experiments.mooncake.figure import MooncakeSettings

OBJECTIVES = (100, 200, 300)  # milliseconds between tokens (7.1)
REMARK = "the first minutes of the trace, so that caches are colder than in the paper's hour"


def figure(name: str, workload: str, gains: Sequence[float], source: str) -> Figure:
    """The figure of a workload. gains: of the share of requests within the objectives, Mooncake's
    over vLLM's, by OBJECTIVES."""
    return Figure(
        name,
        f"Requests within the objectives, {workload}, 16 nodes",
        "simulated",
        _sweep(workload),
        mechanisms=(
            fetching(system="mooncake"),
            Mechanism(HANDED_ON, fewest("handed_on", system="mooncake")),
        ),
        seeded=True,
        claims=tuple(_claims(gains, source)),
        panels=(
            Panel("share in time", "tbt_ms", "in_time", "system"),
            Panel("mean TTFT", "tbt_ms", "ttft_s", "system"),
        ),
    )


def _sweep(workload: str) -> Callable[[MooncakeSettings], Iterator[Row]]:
    def sweep(settings: MooncakeSettings) -> Iterator[Row]:
        for system, spec in SYSTEMS.items():
            report = simulated(spec, workload, settings, most=DECODED_REQUESTS)
            for objective in OBJECTIVES:
                yield {
                    "lengths": settings.source(workload),
                    "system": system,
                    "tbt_ms": objective,
                    "in_time": report.effective(TTFT, objective / 1000),
                    "ttft_s": float(report.ttft().mean()),
                    "hit": report.hit_rate(),
                    **at_work(report),
                }

    return sweep


def _claims(gains: Sequence[float], source: str) -> Iterator[Claim]:
    for objective, gain in zip(OBJECTIVES, gains):
        yield Claim(
            f"requests in time, TBT within {objective} ms, mooncake / vllm",
            1 + gain,
            lambda rows, objective=objective: _gain(rows, objective, "vllm"),
            source,
            better="higher",
            remark=REMARK if objective == OBJECTIVES[0] else "",
        )
    for baseline in list(SYSTEMS)[2:]:
        yield Claim(
            f"requests in time, TBT within 100 ms, mooncake / {baseline}",
            1.0,
            lambda rows, baseline=baseline: _gain(rows, OBJECTIVES[0], baseline),
            f"{source}: Mooncake is ahead",
            better="higher",
            limit=True,
        )


def _gain(rows: Rows, objective: int, baseline: str) -> float:
    """Mooncake's share of requests in time over the baseline's; at least one request is counted
    there, so that there is a ratio."""
    share = cell(rows, "in_time", system=baseline, tbt_ms=objective)
    return cell(rows, "in_time", system="mooncake", tbt_ms=objective) / max(share, 1e-3)
