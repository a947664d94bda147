"""Figure 14 (a) to (d): what it costs to spread a history over the instances that join, hidden
behind linear layers layer by layer."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Panel, Row, Rows, cell, matching
from experiments.papers import main
from experiments.tetris.figure import TetrisSettings
from experiments.tetris.model import K, balancing, composed
from experiments.tetris.systems import MODELS

CHUNK = {"llama3-8b": 128 * K, "llama3-70b": 64 * K}  # tokens (7.4)
SHARES = (0.25, 0.5, 1.0, 1.5, 2.0)  # of history, by the chunk
GROUPS = {
    "llama3-8b": {"within a node": (4, 8), "across nodes": (8, 16)},
    "llama3-70b": {"within a node": (1, 2), "across nodes": (4, 8)},
}


def sweep(settings: TetrisSettings) -> Iterator[Row]:
    for model, chunk in CHUNK.items():
        for where, (before, after) in GROUPS[model].items():
            for share in SHARES:
                history = round(share * chunk)
                found = balancing(model, before, after, history, chunk)
                whole = composed(model, after, history, chunk)
                yield {
                    "model": model,
                    "where": f"{model}, {where}",
                    "before": before,
                    "after": after,
                    "history": history,
                    "chunk": chunk,
                    "send_s": found.send,
                    "linear_s": found.linear,
                    "chunk_s": whole,
                    "overhead": found.exposed / whole,
                    "not_hidden": found.layers * found.send / whole,
                    "share": share,
                }


def _most(rows: Rows, column: str) -> float:
    return max(float(row[column]) for row in rows)


FIGURE = Figure(
    "fig14",
    "Balancing of KV beside prefill",
    "computed",
    sweep,
    claims=(
        Claim(
            "most overhead of balancing",
            0.018,
            lambda rows: _most(rows, "overhead"),
            "7.4",
            "%",
            "lower",
            limit=True,
            remark="only what is not hidden is counted: the first layer's transfer. What "
            "transfers take from kernels that run beside them is not modelled. If nothing were "
            "hidden it would be up to 1.4 %",
        ),
        Claim(
            "history twice the chunk, 8B, across nodes: send / linear parts of a layer",
            1,
            lambda rows: (
                cell(matching(rows, where=f"{MODELS[0]}, across nodes"), "send_s", share=2.0)
                / cell(matching(rows, where=f"{MODELS[0]}, across nodes"), "linear_s", share=2.0)
            ),
            "4.1: hidden",
            better="lower",
            limit=True,
        ),
    ),
    panels=(
        Panel("hidden", "share", "overhead", "where"),
        Panel("not hidden", "share", "not_hidden", "where"),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "tetris")
