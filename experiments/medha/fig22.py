"""Figure 22: policies of prefill: FCFS, EDF, LRS (by relative slack, no sharing of steps) and Medha
(LRS and sharing)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from experiments.figures import (
    Claim,
    Figure,
    Mechanism,
    Panel,
    Row,
    Rows,
    fewest,
    ratio,
    typical,
)
from experiments.medha.figure import MedhaSettings
from experiments.medha.systems import (
    OBJECTIVES_MS,
    OURS_MS,
    PERCENTS,
    SMALL,
    Run,
    distribution,
    paced,
    run,
    under,
)
from experiments.papers import main

SYSTEMS = {
    0.25: ("fcfs", "edf", "lrs", "medha"),
    0.75: ("fcfs", "lrs", "medha"),
    1.75: ("fcfs", "edf", "lrs", "medha", "medha, Eq. 7"),
}
WAITS = (
    "without sharing, a short prompt waits until its slack is below that of the long one in "
    "progress; the paper does not give its objectives, on which this depends"
)


def runs() -> Iterator[Run]:
    for ms in OBJECTIVES_MS:
        for qps, names in SYSTEMS.items():
            yield from ((name, paced(qps, ms=ms), SMALL) for name in names)


def sweep(settings: MedhaSettings) -> Iterator[Row]:
    """normalized: TTFT as a share of the request's objective, which is max(2 s, three times its
    prefill alone)."""
    for name, case, system in runs():
        result = run(name, case, settings, system)
        given = np.array([record.due - record.arrival for record in result.records])
        for percent, ttft, share, long in zip(
            PERCENTS,
            distribution(result.ttft()),
            distribution(result.ttft() / given),
            distribution(result.ttft("long")),
        ):
            yield {
                "lengths": settings.lengths,
                "run_s": case.span(settings),
                "system": name,
                "objective_ms": round(result.tpot_objective * 1e3),
                "qps": case.qps,
                "percent": percent,
                "ttft_s": float(ttft),
                "long_ttft_s": float(long),
                "normalized": float(share),
                "in_time": result.in_time(),
                "long_done": result.finished("long"),
                "shared_steps": result.counts.shared,
            }


def _row(system: str, qps: float, percent: int = 50, ms: int = OURS_MS) -> Row:
    return dict(system=system, qps=qps, percent=percent, objective_ms=ms)


def _of(qps: float, ms: int) -> Callable[[Rows], str]:
    """Says what the policies make of a load."""

    def told(rows: Rows) -> str:
        found = []
        for name in SYSTEMS[qps]:
            median, share, late = (
                typical(rows, column, **_row(name, qps, ms=ms))
                for column in ("ttft_s", "in_time", "long_ttft_s")
            )
            found.append(f"{name} {median:.3g} s, {share:.2f}, {late:.3g} s")
        return f"median TTFT, share in time, median of long ones: {'; '.join(found)}"

    return told


def _claims(ms: int) -> tuple[Claim, ...]:
    """The figure's numbers with an objective per token."""

    def over(column: str, above: str, below: str, qps: float) -> Callable[[Rows], float]:
        return lambda rows: ratio(rows, column, _row(above, qps, ms=ms), _row(below, qps, ms=ms))

    return (
        Claim(
            f"median TTFT, LRS / Medha, 1.75 q/s{under(ms)}",
            1.8,
            over("ttft_s", "lrs", "medha", 1.75),
            "5.4: up to 1.8x",
            better="higher",
            remark=WAITS,
            cause=_of(1.75, ms),
        ),
        Claim(
            f"median normalized TTFT, LRS / Medha, 0.75 q/s{under(ms)}",
            1.6,
            over("normalized", "lrs", "medha", 0.75),
            "figure 22: 1.6 to 1.8x",
            better="higher",
            remark=WAITS,
            cause=_of(0.75, ms),
        ),
        Claim(
            f"median TTFT, EDF / FCFS, 1.75 q/s{under(ms)}",
            1,
            over("ttft_s", "edf", "fcfs", 1.75),
            "5.4: EDF 'resembling FCFS'",
            remark="EDF defers long prompts until they are late, and is FCFS from then on",
            cause=_of(1.75, ms),
        ),
        Claim(
            f"median TTFT, EDF / Medha, 0.25 q/s{under(ms)}",
            1,
            over("ttft_s", "edf", "medha", 0.25),
            "5.4: 'similar median'",
            cause=_of(0.25, ms),
        ),
        Claim(
            f"completed long requests, Medha / Medha by Eq. 7, 1.75 q/s{under(ms)}",
            1,
            over("long_done", "medha", "medha, Eq. 7", 1.75),
            "Eq. 7; not in the paper",
            remark="our default puts late prompts behind those in time, which Eq. 7 does not",
            cause=_of(1.75, ms),
        ),
        Claim(
            f"median TTFT, FCFS / Medha, 1.75 q/s{under(ms)}",
            1,
            over("ttft_s", "fcfs", "medha", 1.75),
            "5.4: 'performs poorly'",
            better="higher",
            limit=True,
            cause=_of(1.75, ms),
        ),
    )


FIGURE = Figure(
    "fig22",
    "Policies, Llama-3 8B, 16 A100, 5 % long",
    "simulated",
    sweep,
    mechanisms=(Mechanism("steps that prompts share", fewest("shared_steps", system="medha")),),
    seeded=True,
    claims=tuple(claim for ms in OBJECTIVES_MS for claim in _claims(ms)),
    panels=tuple(
        Panel(
            f"{qps:g} q/s",
            "normalized",
            "percent",
            "system",
            (("qps", qps), ("objective_ms", OURS_MS)),
            "x",
        )
        for qps in SYSTEMS
    ),
)

if __name__ == "__main__":
    main(FIGURE, "medha")
