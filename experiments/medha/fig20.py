"""Figure 20: bytes that a decode must read per second, as a share of the peak (TP8, KVP 1 to
16)."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Panel, Row
from experiments.medha.closed import Node
from experiments.medha.figure import MedhaSettings
from experiments.papers import main
from jaxserve.settings.schema import MeshConfig

LANES = (1, 2, 4, 8, 16)
CONTEXTS = (128_000, 256_000, 512_000, 1_000_000, 2_000_000, 4_000_000, 10_000_000)


def sweep(settings: MedhaSettings) -> Iterator[Row]:
    for model in ("llama3-8b", "llama3-70b"):
        for lanes in LANES:
            node = Node(model, MeshConfig(kvp=lanes, tp=8))
            for context in CONTEXTS:
                yield {
                    "model": model,
                    "kvp": lanes,
                    "context": context,
                    "mbu": node.mbu(context) if node.holds(context) else "",
                }


FIGURE = Figure(
    "fig20",
    "MBU of decode, TP8 and KVP, H100",
    "computed",
    sweep,
    claims=(
        Claim(
            "the highest",
            0.92,
            lambda rows: max(float(row["mbu"]) for row in rows if row["mbu"] != ""),
            "5.5: up to 92 %",
            "%",
            better="higher",
            remark="attention alone was measured at 93 % of the peak; weights are read at 80 %, "
            "and sums and launches read nothing",
        ),
    ),
    panels=(
        Panel("Llama-3 8B", "context", "mbu", "kvp", (("model", "llama3-8b"),), "x"),
        Panel("Llama-3 70B", "context", "mbu", "kvp", (("model", "llama3-70b"),), "x"),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "medha")
