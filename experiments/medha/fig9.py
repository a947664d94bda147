"""Figure 9: prefill of up to 10M tokens by depth of the pipeline. Rows without a time do not fit in
memory."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Panel, Row, Rows, matching, ratio
from experiments.medha.closed import Node
from experiments.medha.figure import MedhaSettings
from experiments.papers import main
from jaxserve.settings.schema import MeshConfig

DEPTHS = (1, 2, 4, 8, 16)
MILLION = 1_000_000
CHUNK = 4096


def sweep(settings: MedhaSettings) -> Iterator[Row]:
    for model in ("llama3-8b", "llama3-70b"):
        for prompt in (MILLION, 2 * MILLION, 4 * MILLION, 10 * MILLION):
            for depth in DEPTHS:
                node = Node(model, MeshConfig(spp=depth, tp=8))
                seconds = node.first_token(prompt, CHUNK) if node.holds(prompt) else ""
                yield {"model": model, "prompt": prompt, "spp": depth, "ttft_s": seconds}


def _least(rows: Rows, model: str) -> float:
    """The least depth that holds 10M tokens."""
    return min(
        float(row["spp"])
        for row in matching(rows, model=model, prompt=10 * MILLION)
        if row["ttft_s"] != ""
    )


def _speedup(rows: Rows, model: str) -> float:
    return ratio(
        rows,
        "ttft_s",
        dict(model=model, prompt=MILLION, spp=1),
        dict(model=model, prompt=MILLION, spp=16),
    )


FIGURE = Figure(
    "fig9",
    "Prefill by depth of the pipeline, TP8, H100",
    "computed",
    sweep,
    claims=(
        Claim(
            "speed-up of 16 stages, 8B, 1M tokens",
            16,
            lambda rows: _speedup(rows, "llama3-8b"),
            "3.3: 'nearly linearly'",
            better="higher",
        ),
        Claim(
            "speed-up of 16 stages, 70B, 1M tokens",
            16,
            lambda rows: _speedup(rows, "llama3-70b"),
            "3.3: 'nearly linearly'",
            better="higher",
        ),
        Claim(
            "least stages that hold 10M tokens of 70B",
            8,
            lambda rows: _least(rows, "llama3-70b"),
            "3.5 with figure 9b",
            "stages",
        ),
    ),
    panels=(
        Panel("Llama-3 8B", "spp", "ttft_s", "prompt", (("model", "llama3-8b"),), "xy"),
        Panel("Llama-3 70B", "spp", "ttft_s", "prompt", (("model", "llama3-70b"),), "xy"),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "medha")
