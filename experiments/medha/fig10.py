"""Figure 10: what a deeper pipeline costs a decode, after 2M tokens."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Panel, Row, ratio
from experiments.medha.closed import Node
from experiments.medha.figure import MedhaSettings
from experiments.papers import main
from jaxserve.settings.schema import MeshConfig

DEPTHS = (1, 2, 4, 8, 16)
CONTEXT = 2_000_000


def sweep(settings: MedhaSettings) -> Iterator[Row]:
    for model in ("llama3-8b", "llama3-70b"):
        for depth in DEPTHS:
            node = Node(model, MeshConfig(spp=depth, tp=8))
            yield {
                "model": model,
                "context": CONTEXT,
                "spp": depth,
                "tpot_s": node.token(CONTEXT) if node.holds(CONTEXT) else "",
            }


def _row(model: str, spp: int) -> Row:
    return dict(model=model, spp=spp)


FIGURE = Figure(
    "fig10",
    "Decode after 2M tokens by depth of the pipeline, TP8, H100",
    "computed",
    sweep,
    claims=(
        Claim(
            "TPOT, 16 stages / 1, 8B",
            1,
            lambda rows: ratio(rows, "tpot_s", _row("llama3-8b", 16), _row("llama3-8b", 1)),
            "3.3: 'minimal impact'",
            better="lower",
            remark="every stage adds 0.2 ms of launch, set, not measured, and a stage's "
            "sampling is counted in each of them",
        ),
        Claim(
            "TPOT, 16 stages / 2, 8B",
            1,
            lambda rows: ratio(rows, "tpot_s", _row("llama3-8b", 16), _row("llama3-8b", 2)),
            "3.3: 'minimal impact'",
            better="lower",
        ),
        Claim(
            "TPOT, 16 stages / 4, 70B",
            1,
            lambda rows: ratio(rows, "tpot_s", _row("llama3-70b", 16), _row("llama3-70b", 4)),
            "3.3: less than for 8B",
            better="lower",
        ),
    ),
    panels=(Panel("2M tokens", "spp", "tpot_s", "model", log="x"),),
)

if __name__ == "__main__":
    main(FIGURE, "medha")
