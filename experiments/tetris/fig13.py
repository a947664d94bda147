"""Figure 13: TTFT without chunking (Alg. 1 without its search) over that with it, by load."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from experiments.figures import Claim, Figure, Panel, Row, Rows, cell, matching
from experiments.papers import main
from experiments.tetris.figure import TRACES, TetrisSettings
from experiments.tetris.systems import MODELS, SEVERAL, loads, row_of

SMALL, LARGE = MODELS


def sweep(settings: TetrisSettings) -> Iterator[Row]:
    for model in MODELS:
        for trace in settings.traces:
            for load in loads(model, trace):
                row, whole = (
                    row_of(name, model, trace, load, settings)
                    for name in ("tetris", "single-chunk")
                )
                ratios = {
                    column: float(whole[f"{column}_s"]) / float(row[f"{column}_s"])
                    for column in ("mean", "p50", "p99")
                }
                yield row | ratios | {"idle_whole": whole["idle"]}


def over(choose: Callable, model: str, column: str) -> Callable[[Rows], float]:
    """The least or the greatest of the three traces, each at the load where chunking gains most."""
    return lambda rows: choose(
        max(float(row[column]) for row in matching(rows, model=model, trace=trace))
        for trace in TRACES
    )


def _end(rows: Rows, model: str, first: bool) -> float:
    """The greatest gain of the three traces at the lowest or the highest load."""
    ends = (
        (
            trace,
            (min if first else max)(
                float(row["load"]) for row in matching(rows, model=model, trace=trace)
            ),
        )
        for trace in TRACES
    )
    return max(cell(rows, "p50", model=model, trace=trace, load=load) for trace, load in ends)


PAPER = {
    (SMALL, "p50"): (2.33, 4.17),
    (LARGE, "p50"): (2.71, 4.77),
    (SMALL, "p99"): (2.64, 3.58),
    (LARGE, "p99"): (2.43, 3.23),
}
REMARK = (
    "chunks win back the time in which instances wait for the rest of their group. With plans "
    "in one chunk, which avoid busy groups already, that is 1.5 % of all instances' time over all "
    "loads of 8B and 1.3 % of 70B (`idle_whole` in the CSV), and 10 % at most: little to win. "
    "With several chunks it is as much (`idle`), since what ends later than planned keeps groups "
    "waiting too; moves of history add 0.007 % at most (`exposed`). Both sides have improvement "
    "rates profiled for them"
)
FIRST = (SMALL, "p50", "least")

FIGURE = Figure(
    "fig13",
    "One chunk over several, TTFT",
    "simulated",
    sweep,
    mechanisms=(SEVERAL,),
    seeded=True,
    claims=(
        *(
            Claim(
                f"{column.upper()} TTFT, {model[7:].upper()}, one chunk / several, {word} of "
                "three traces",
                value,
                over(choose, model, column),
                "7.3",
                better="higher",
                remark=REMARK if (model, column, word) == FIRST else "",
            )
            for (model, column), values in PAPER.items()
            for word, choose, value in zip(("least", "greatest"), (min, max), values)
        ),
        Claim(
            "P50 TTFT, 8B, one chunk / several, lowest load",
            1,
            lambda rows: _end(rows, SMALL, True),
            "7.3: 'efficient enough'",
        ),
        Claim(
            "P50 TTFT, 8B, one chunk / several, saturated",
            1,
            lambda rows: _end(rows, SMALL, False),
            "7.3: 'diminishing'",
        ),
    ),
    panels=tuple(
        Panel(f"{model}: {column}", "load", column, "trace", (("model", model),))
        for model in MODELS
        for column in ("p50", "p99")
    ),
)

if __name__ == "__main__":
    main(FIGURE, "tetris")
