"""Figure 17: the first token with and without a KVP axis, Llama-3 70B on 64 H100, 5 % long requests
of up to 2M tokens. A prompt's second lane joins at 128K tokens."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Mechanism, Panel, Row, fewest, ratio
from experiments.medha.figure import MedhaSettings
from experiments.medha.systems import LARGE_2D, LARGE_3D, LoadCase, rows_of
from experiments.papers import main

SYSTEMS = {"2D: SPP8 TP8": LARGE_2D, "3D: SPP4 KVP2 TP8": LARGE_3D}
FLAT, DEEP = SYSTEMS
LOADS = (0.25, 0.75, 1.75)
SECONDS = 60.0  # of a run
LANE_TOKENS = 2**17  # of a prompt on a lane: a lane alone would hold any
STRETCH = 2.0  # on the lengths of the long prompts, which end at 1M (Medha 5.3)


def sweep(settings: MedhaSettings) -> Iterator[Row]:
    for qps in LOADS:
        for label, system in SYSTEMS.items():
            yield from rows_of("medha", case(label, qps), settings, system, label)


def case(label: str, qps: float, tpot: float | None = None) -> LoadCase:
    """A load on a system; with KVP where it has lanes."""
    lane_tokens = LANE_TOKENS if label == DEEP else None
    return LoadCase(qps, 5, STRETCH, SECONDS, tpot, lane_tokens)


def row(system: str, qps: float, percent: int = 50) -> Row:
    return dict(system=system, qps=qps, percent=percent)


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
            f"median TTFT, 3D / 2D, {qps:g} q/s",
            1,
            lambda rows, qps=qps: ratio(rows, "ttft_s", row(DEEP, qps), row(FLAT, qps)),
            "5.3: 'similar median latencies'",
            remark=note,
        )
        for qps, note in (
            (
                0.25,
                "a lane has half the stages and all the layers of the other: a short prompt, "
                "which stays on one lane, has half the devices",
            ),
            (0.75, ""),
            (1.75, ""),
        )
    ),
    panels=tuple(
        Panel(f"{qps:g} q/s", "ttft_s", "percent", "system", (("qps", qps),), "x") for qps in LOADS
    ),
)

if __name__ == "__main__":
    main(FIGURE, "medha")
