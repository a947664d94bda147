"""Table 4: requests refused at overload, by the policy of admission."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Mechanism, Panel, Row, Rows, cell, fewest, ratio
from experiments.mooncake.clusters import REFUSED as REFUSED_ONES
from experiments.mooncake.clusters import TTFT
from experiments.mooncake.figure import MooncakeSettings
from experiments.mooncake.overload import (
    OVERLOADS,
    POLICIES,
    REQUESTS,
    SHORT,
    WORKLOAD,
    overloaded,
)
from experiments.papers import main

REFUSED = {"baseline": 4183, "early": 3771, "predicted": 3589}  # of 23,608


def sweep(settings: MooncakeSettings) -> Iterator[Row]:
    for name, case in OVERLOADS.items():
        for place, policy in enumerate(POLICIES):
            report = overloaded(name, policy, settings)
            count = max(len(report.records), 1)
            refused = sum(report.refused.values()) / count
            yield {
                "lengths": settings.source(WORKLOAD),
                "setting": name,
                "place": place,
                "policy": policy,
                "refused": refused,
                "in_vain": report.refused["refused_late"] / count,
                "in_time": report.effective(TTFT, case.tbt),
                "served": 1 - refused,
            }


def _more(policy: str) -> Claim:
    return Claim(
        f"{SHORT}: requests served, {policy} / baseline",
        (23_608 - REFUSED[policy]) / (23_608 - REFUSED["baseline"]),
        lambda rows: ratio(
            rows,
            "served",
            dict(setting=SHORT, policy=policy),
            dict(setting=SHORT, policy="baseline"),
        ),
        "Table 4",
        better="higher",
        remark=f"the first {REQUESTS} requests, at a load under which decoding is short",
    )


def _refused(policy: str) -> Claim:
    return Claim(
        f"{SHORT}: requests refused, {policy} / baseline",
        REFUSED[policy] / REFUSED["baseline"],
        lambda rows: _refusals(rows, policy),
        "Table 4",
        better="lower",
        remark="a sequence predicted to decode for 20 s; with 14 s, and at 2.5x, predicted refuses "
        "up to 6 % more than early"
        if policy == "predicted"
        else "",
    )


def _refusals(rows: Rows, policy: str) -> float:
    """A policy's refusals over the baseline's; 1 where the baseline refuses none."""
    base = cell(rows, "refused", setting=SHORT, policy="baseline")
    return cell(rows, "refused", setting=SHORT, policy=policy) / base if base else 1.0


FIGURE = Figure(
    "table4",
    "Refused at overload, tool and agent",
    "simulated",
    sweep,
    mechanisms=(Mechanism(REFUSED_ONES, fewest("refused", setting=SHORT)),),
    claims=(
        _refused("early"),
        _refused("predicted"),
        _more("early"),
        _more("predicted"),
    ),
    panels=tuple(
        Panel(name, "place", "refused", "policy", (("setting", name),)) for name in OVERLOADS
    ),
)

if __name__ == "__main__":
    main(FIGURE, "mooncake")
