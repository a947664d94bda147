"""Figure 17: the first token with and without a KVP axis, Llama-3 70B on 64 H100, 5 % long requests
of up to 2M tokens. A prompt's second lane joins at 128K tokens."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Mechanism, Panel, Row, Rows, fewest, ratio, typical
from experiments.medha.figure import MedhaSettings
from experiments.medha.systems import (
    LARGE_2D,
    LARGE_3D,
    OBJECTIVES_MS,
    OURS_MS,
    LoadCase,
    Run,
    rows_of,
    under,
)
from experiments.papers import main

SYSTEMS = {"2D: SPP8 TP8": LARGE_2D, "3D: SPP4 KVP2 TP8": LARGE_3D}
FLAT, DEEP = SYSTEMS
LOADS = (0.25, 0.75, 1.75)
LANE_TOKENS = 2**17  # of a prompt on a lane: a lane alone would hold any
STRETCH = 2.0  # on the lengths of the long prompts, which end at 1M (Medha 5.3)


def labelled() -> Iterator[tuple[str, LoadCase]]:
    for ms in OBJECTIVES_MS:
        tpot = None if ms == OURS_MS else ms / 1e3
        for qps in LOADS:
            yield from ((label, case(label, qps, tpot)) for label in SYSTEMS)


def runs() -> Iterator[Run]:
    yield from (("medha", load, SYSTEMS[label]) for label, load in labelled())


def sweep(settings: MedhaSettings) -> Iterator[Row]:
    for label, load in labelled():
        yield from rows_of("medha", load, settings, SYSTEMS[label], label)


def case(label: str, qps: float, tpot: float | None = None) -> LoadCase:
    """A load on a system; with KVP where it has lanes."""
    lane_tokens = LANE_TOKENS if label == DEEP else None
    return LoadCase(qps, 5, STRETCH, None, tpot, lane_tokens)


def row(system: str, qps: float, percent: int = 50, ms: int = OURS_MS) -> Row:
    return dict(system=system, qps=qps, percent=percent, objective_ms=ms)


def asked(rows: Rows) -> str:
    """What long prompts ask for, and how much of the time devices work."""
    offered, flat, deep = (
        ", ".join(f"{typical(rows, column, **row(label, qps)):.2f}" for qps in LOADS)
        for column, label in (("offered_long", FLAT), ("busy", FLAT), ("busy", DEEP))
    )
    return (
        f"at the three loads long prompts ask for {offered} of the prefill that 2D does; devices "
        f"of 2D work for {flat} of the time, of 3D for {deep}"
    )


SPREAD = Mechanism("steps with a sequence on several lanes", fewest("spread_steps", system=DEEP))
FIGURE = Figure(
    "fig17",
    "TTFT with and without KVP, Llama-3 70B, 64 H100",
    "simulated",
    sweep,
    mechanisms=(SPREAD,),
    seeded=True,
    claims=tuple(
        Claim(
            f"median TTFT, 3D / 2D, {qps:g} q/s{under(ms)}",
            1,
            lambda rows, qps=qps, ms=ms: ratio(
                rows, "ttft_s", row(DEEP, qps, ms=ms), row(FLAT, qps, ms=ms)
            ),
            "5.3: 'similar median latencies'",
            remark="a lane has half the stages and all the layers of the other: a short prompt, "
            "which stays on one lane, has half the devices",
            cause=asked,
        )
        for ms in OBJECTIVES_MS
        for qps in LOADS
    ),
    panels=tuple(
        Panel(
            f"{qps:g} q/s",
            "ttft_s",
            "percent",
            "system",
            (("qps", qps), ("objective_ms", OURS_MS)),
            "x",
        )
        for qps in LOADS
    ),
)

if __name__ == "__main__":
    main(FIGURE, "medha")
