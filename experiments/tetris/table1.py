"""Table 1: prefill of Llama-3 8B by SP size, as Eq. 1 fits it and as `model` composes it from our
costs of one A100."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from experiments.figures import Claim, Figure, Panel, Row, Rows, cell
from experiments.papers import main
from experiments.tetris.figure import TetrisSettings
from experiments.tetris.model import K, composed, latencies, table_points


def sweep(settings: TetrisSettings) -> Iterator[Row]:
    for size, history, tokens, seconds in table_points():
        yield {
            "sp": size,
            "tokens": tokens,
            "paper_s": seconds,
            "fitted_s": latencies("llama3-8b")[size](history, tokens),
            "composed_s": composed("llama3-8b", size, int(history), int(tokens)),
        }


def _error(rows: Rows, column: str) -> float:
    return float(np.mean([abs(float(row[column]) / float(row["paper_s"]) - 1) for row in rows]))


FIGURE = Figure(
    "table1",
    "Prefill by SP size, Llama-3 8B, A100",
    "computed",
    sweep,
    claims=(
        Claim(
            "mean error of Eq. 1",
            0.05,
            lambda rows: _error(rows, "fitted_s"),
            "our target",
            "%",
            "lower",
            limit=True,
            remark="k is 1024 tokens; the table has no chunks after a history, whose pairs are "
            "taken to cost twice those of a chunk",
        ),
        Claim(
            "256k tokens, SP2 less SP16",
            43.05,
            lambda rows: (
                cell(rows, "fitted_s", sp=2, tokens=256 * K)
                - cell(rows, "fitted_s", sp=16, tokens=256 * K)
            ),
            "2.4 (1)",
            "s",
        ),
        Claim(
            "4k tokens, SP16 / SP4",
            3,
            lambda rows: (
                cell(rows, "fitted_s", sp=16, tokens=4 * K)
                / cell(rows, "fitted_s", sp=4, tokens=4 * K)
            ),
            "2.4 (1)",
        ),
        Claim(
            "mean error of the composed model",
            0.10,
            lambda rows: _error(rows, "composed_s"),
            "our target",
            "%",
            "lower",
            limit=True,
            remark="70B, of which the paper prints nothing, is composed in the same way; a "
            "hop's constant part is read off this table",
        ),
    ),
    panels=tuple(
        Panel(title, "tokens", column, "sp", (), "xy")
        for title, column in (
            ("Table 1", "paper_s"),
            ("Eq. 1", "fitted_s"),
            ("composed", "composed_s"),
        )
    ),
    runs="closed form, fitted to this table",
)

if __name__ == "__main__":
    main(FIGURE, "tetris")
