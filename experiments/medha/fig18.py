"""Figure 18: decode latency with and without a KVP axis, over the runs of figure 17."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Mechanism, Panel, Row, Rows, fewest, ratio, typical
from experiments.medha import fig17
from experiments.medha.closed import Node
from experiments.medha.fig17 import DEEP, FLAT, LOADS, SPREAD, SYSTEMS, row
from experiments.medha.figure import MedhaSettings
from experiments.medha.systems import OBJECTIVES_MS, OURS_MS, Run, rows_of, under
from experiments.papers import main

# the longest prompt, and the least chunk of it
PROMPT = 2_000_000
CHUNK = 64
BESIDE = (1000,) * 16  # contexts of decodes in its steps, in tokens
TIGHT_MS = 30  # an objective per token, which the least chunk of the longest prompts exceeds


def runs() -> Iterator[Run]:
    yield from fig17.runs()
    for label, system in SYSTEMS.items():
        yield "medha", fig17.case(label, LOADS[-1], TIGHT_MS / 1e3), system


def sweep(settings: MedhaSettings) -> Iterator[Row]:
    """least_s: seconds per token of decodes beside the last chunk of the longest prompt, from the
    predictor alone."""
    least = {label: _least(Node("llama3-70b", system.mesh)) for label, system in SYSTEMS.items()}
    yield from (found | {"least_s": least[str(found["system"])]} for found in fig17.sweep(settings))
    for label, system in SYSTEMS.items():
        case = fig17.case(label, LOADS[-1], TIGHT_MS / 1e3)
        for found in rows_of("medha", case, settings, system, label):
            yield found | {"least_s": least[label]}


def _least(node: Node) -> float:
    pace = float(node.paces(PROMPT, CHUNK, BESIDE)[-1])
    return node.predictor.latency(pace, CHUNK + len(BESIDE), -(-len(BESIDE) // node.mesh.kvp))


def _paces(rows: Rows) -> str:
    told = []
    for ms in (*OBJECTIVES_MS, TIGHT_MS):
        found = (1e3 * typical(rows, "tpot_s", **row(name, 1.75, ms=ms)) for name in (FLAT, DEEP))
        told.append("{:.1f} and {:.1f} with {} ms".format(*found, ms))
    least = (1e3 * typical(rows, "least_s", **row(name, 1.75)) for name in (FLAT, DEEP))
    bound = "{:.0f} and {:.0f} ms".format(*least)
    return (
        f"medians of 2D and 3D in ms: {', '.join(told)}; beside the least chunk of a prompt of 2M "
        f"a token takes {bound}, so that only an objective below these can tell them apart"
    )


FIGURE = Figure(
    "fig18",
    "Decode latency with and without KVP, Llama-3 70B, 64 H100",
    "simulated",
    sweep,
    mechanisms=(
        SPREAD,
        Mechanism(
            "steps with a sequence on several lanes, objective of 30 ms",
            fewest("spread_steps", system=DEEP, objective_ms=TIGHT_MS),
        ),
    ),
    seeded=True,
    claims=(
        *(
            Claim(
                f"{'median' if percent == 50 else f'P{percent}'} TPOT, 2D / 3D, 1.75 q/s"
                f"{under(ms)}",
                2,
                lambda rows, percent=percent, ms=ms: ratio(
                    rows, "tpot_s", row(FLAT, 1.75, percent, ms), row(DEEP, 1.75, percent, ms)
                ),
                "5.3",
                better="higher",
                remark="adaptive chunks fill the steps of both up to the objective per token",
                cause=_paces,
            )
            for ms in OBJECTIVES_MS
            for percent in (50, 90)
        ),
        Claim(
            f"P90 TPOT, 2D / 3D, 1.75 q/s{under(TIGHT_MS)}",
            2,
            lambda rows: ratio(
                rows, "tpot_s", row(FLAT, 1.75, 90, TIGHT_MS), row(DEEP, 1.75, 90, TIGHT_MS)
            ),
            "5.3",
            better="higher",
            remark="the tighter the objective, the more steps have the least chunk: the next row "
            "is their limit",
            cause=_paces,
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
        Panel(
            f"{qps:g} q/s",
            "tpot_s",
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
