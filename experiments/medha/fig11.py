"""Figure 11: decode with the KV cache over 1 to 4 lanes (KVP), in batches of decodes alone."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Panel, Row, Rows, cell, ratio
from experiments.medha.closed import Node
from experiments.medha.figure import MedhaSettings
from experiments.papers import main
from jaxserve.settings.schema import MeshConfig

MILLION = 1_000_000
DEPTHS = {"llama3-8b": 4, "llama3-70b": 8}  # stages; TP8 (Medha 3.5)
LANES = (1, 2, 4)


def sweep(settings: MedhaSettings) -> Iterator[Row]:
    for model, depth in DEPTHS.items():
        for context in (4 * MILLION, 10 * MILLION):
            for lanes in LANES:
                node = Node(model, MeshConfig(spp=depth, kvp=lanes, tp=8))
                yield {
                    "model": model,
                    "context": context,
                    "kvp": lanes,
                    "tpot_s": node.token(context),
                }


def _row(context: int, kvp: int) -> Row:
    return dict(model="llama3-8b", context=context, kvp=kvp)


def _gain(rows: Rows, context: int, kvp: int) -> float:
    return ratio(rows, "tpot_s", _row(context, 1), _row(context, kvp))


FIGURE = Figure(
    "fig11",
    "Decode by degree of KVP, H100",
    "computed",
    sweep,
    claims=(
        Claim(
            "TPOT, KVP 1 / 4, 8B, 4M tokens",
            1.7,
            lambda rows: _gain(rows, 4 * MILLION, 4),
            "3.5",
            better="higher",
            remark="by Amdahl's law attention is 55 % of the paper's token; it is 86 % of ours, "
            "for what is not attention takes 3 ms in our model and would take 11 to 14 ms in "
            "the paper",
        ),
        Claim(
            "TPOT, KVP 1 / 4, 8B, 10M tokens",
            2.5,
            lambda rows: _gain(rows, 10 * MILLION, 4),
            "3.5",
            better="higher",
            remark="the paper prints '2.5%': 2.5x is meant, and agrees with its 40 % by "
            "Amdahl's law",
        ),
        Claim(
            "TPOT saved by KVP 2, 8B, 10M tokens",
            0.4,
            lambda rows: 1 - 1 / _gain(rows, 10 * MILLION, 2),
            "3.4: 'almost 40%'",
            "%",
            better="higher",
        ),
        Claim(
            "tokens per second, KVP 2, 8B, 10M tokens",
            30,
            lambda rows: 1 / cell(rows, "tpot_s", **_row(10 * MILLION, 2)),
            "figure 11: ~30",
            "tokens/s",
            better="higher",
        ),
    ),
    panels=(
        Panel("Llama-3 8B, SPP4", "kvp", "tpot_s", "context", (("model", "llama3-8b"),)),
        Panel("Llama-3 70B, SPP8", "kvp", "tpot_s", "context", (("model", "llama3-70b"),)),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "medha")
