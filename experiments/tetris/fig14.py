"""Figure 14 (a) to (d): what it costs to spread a history over the instances that join, hidden
behind linear layers layer by layer."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Panel, Row, Rows, cell, matching
from experiments.papers import main
from experiments.tetris.figure import TetrisSettings
from experiments.tetris.model import TP, K, composed
from experiments.tetris.systems import MODELS
from jaxserve.costs.profiles import costs, devices
from jaxserve.lab.simulate.run import shape_of

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
                yield balancing(model, where, before, after, round(share * chunk), chunk) | {
                    "share": share
                }


def balancing(model: str, where: str, before: int, after: int, history: int, chunk: int) -> Row:
    """Each instance that was there sends half of its KV of a layer to one that joins, beside the
    linear parts of the layer before; the first layer's has nothing to hide behind."""
    shape = shape_of(model)
    tp = TP[model]
    device = devices()["a100"]
    one = costs("a100", shape, tp)
    link = device.ranks[2] if where == "within a node" else device.node
    send = link(
        2 * 2 * shape.rank_heads(tp)[1] * shape.head_dim * history * (1 / before - 1 / after)
    )
    hidden = one.linear(-(-chunk // after))
    exposed = send + (shape.layers - 1) * max(send - hidden, 0.0)
    whole = composed(model, after, history, chunk)
    return {
        "model": model,
        "where": f"{model}, {where}",
        "before": before,
        "after": after,
        "history": history,
        "chunk": chunk,
        "send_s": send,
        "linear_s": hidden,
        "chunk_s": whole,
        "overhead": exposed / whole,
        "not_hidden": shape.layers * send / whole,
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
