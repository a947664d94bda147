"""Figure 19: FLOP of the model per second of prefill, as a share of the peak (Llama-3 70B, TP8, SPP
1 to 16)."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Panel, Row, cell
from experiments.medha.closed import Node
from experiments.medha.figure import MedhaSettings
from experiments.papers import main
from jaxserve.settings.schema import MeshConfig

DEPTHS = (1, 2, 4, 8, 16)
PROMPTS = (128_000, 256_000, 512_000, 1_000_000, 2_000_000, 4_000_000)
CHUNK = 4096


def sweep(settings: MedhaSettings) -> Iterator[Row]:
    for depth in DEPTHS:
        node = Node("llama3-70b", MeshConfig(spp=depth, tp=8))
        for prompt in PROMPTS:
            yield {
                "gpus": node.mesh.devices,
                "prompt": prompt,
                "mfu": node.mfu(prompt, CHUNK) if node.holds(prompt) else "",
            }


FIGURE = Figure(
    "fig19",
    "MFU of prefill, Llama-3 70B, H100",
    "computed",
    sweep,
    claims=(
        Claim(
            "128 GPUs, 1M tokens",
            0.5,
            lambda rows: cell(rows, "mfu", gpus=128, prompt=1_000_000),
            "5.5: over 50 %",
            "%",
            better="higher",
            limit=True,
        ),
        Claim(
            "16 GPUs, 1M tokens",
            0.55,
            lambda rows: cell(rows, "mfu", gpus=16, prompt=1_000_000),
            "5.5: 50 to 60 %",
            "%",
            better="higher",
        ),
        Claim(
            "128 GPUs, 128K tokens",
            0.5,
            lambda rows: cell(rows, "mfu", gpus=128, prompt=128_000),
            "5.5: 50 to 60 %",
            "%",
            better="higher",
            remark="31 chunks of 4096 fill 16 stages for two thirds of the time",
        ),
    ),
    panels=(Panel("chunks of 4096", "prompt", "mfu", "gpus", log="x"),),
)

if __name__ == "__main__":
    main(FIGURE, "medha")
