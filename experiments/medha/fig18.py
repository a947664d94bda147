"""Figure 18: decode latency with and without a KVP axis, over the runs of figure 17."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Mechanism, Panel, Row, fewest, ratio
from experiments.medha import fig17
from experiments.medha.closed import Node
from experiments.medha.fig17 import DEEP, FLAT, LOADS, SPREAD, SYSTEMS, row
from experiments.medha.figure import MedhaSettings
from experiments.medha.systems import rows_of
from experiments.papers import main

# the longest prompt, and the least chunk of it
PROMPT = 2_000_000
CHUNK = 64
BESIDE = (1000,) * 16  # contexts of decodes in its steps, in tokens
TIGHT = 0.03  # seconds per token, which the least chunk of the longest prompts exceeds


def sweep(settings: MedhaSettings) -> Iterator[Row]:
    """least_s: seconds per token of decodes beside the last chunk of the longest prompt, from the
    predictor alone."""
    least = {label: _least(Node("llama3-70b", system.mesh)) for label, system in SYSTEMS.items()}
    yield from (found | {"least_s": least[str(found["system"])]} for found in fig17.sweep(settings))
    for label, system in SYSTEMS.items():
        case = fig17.case(label, LOADS[-1], TIGHT)
        for found in rows_of("medha", case, settings, system, tight(label)):
            yield found | {"least_s": least[label]}


def tight(label: str) -> str:
    """The system whose requests have the tight objective."""
    return f"{label}, {TIGHT * 1e3:.0f} ms"


def _least(node: Node) -> float:
    pace = float(node.paces(PROMPT, CHUNK, BESIDE)[-1])
    return node.predictor.latency(pace, CHUNK + len(BESIDE), -(-len(BESIDE) // node.mesh.kvp))


FIGURE = Figure(
    "fig18",
    "Decode latency with and without KVP, Llama-3 70B, 64 H100",
    "simulated",
    sweep,
    mechanisms=(
        SPREAD,
        Mechanism(
            "steps with a sequence on several lanes, objective of 30 ms",
            fewest("spread_steps", system=tight(DEEP)),
        ),
    ),
    seeded=True,
    claims=(
        *(
            Claim(
                f"{'median' if percent == 50 else f'P{percent}'} TPOT, 2D / 3D, 1.75 q/s",
                2,
                lambda rows, percent=percent: ratio(
                    rows, "tpot_s", row(FLAT, 1.75, percent), row(DEEP, 1.75, percent)
                ),
                "5.3",
                better="higher",
                remark="adaptive chunks fill the steps of both up to the objective of 100 ms "
                "per token",
            )
            for percent in (50, 90)
        ),
        Claim(
            f"P90 TPOT, objective of {TIGHT * 1e3:.0f} ms, 2D / 3D, 1.75 q/s",
            2,
            lambda rows: ratio(
                rows, "tpot_s", row(tight(FLAT), 1.75, 90), row(tight(DEEP), 1.75, 90)
            ),
            "5.3",
            better="higher",
            remark="the tighter the objective, the more steps have the least chunk: the next row "
            "is their limit",
        ),
        Claim(
            "TPOT beside 64 tokens of a prompt of 2M, 2D / 3D (computed)",
            2,
            lambda rows: ratio(rows, "least_s", row(FLAT, 1.75), row(DEEP, 1.75)),
            "5.3",
            better="higher",
            remark="what the paper's explanation, small chunks of 2M prompts that delay "
            "decodes, comes to",
        ),
    ),
    panels=tuple(
        Panel(f"{qps:g} q/s", "tpot_s", "percent", "system", (("qps", qps),), "x") for qps in LOADS
    ),
)

if __name__ == "__main__":
    main(FIGURE, "medha")
