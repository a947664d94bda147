"""Figure 11: TTFT of fixed improvement rates over that of a rate that follows the load, Llama-3 8B.
Figure 12 is the same for 70B."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Panel, Row, Rows, matching
from experiments.papers import main
from experiments.tetris.figure import TRACES, TetrisSettings
from experiments.tetris.systems import MODELS, PATIENCE, SEVERAL, loads, row_of

FIXED = (0.1, 0.3, 0.5, 0.7)  # as in the paper's figures
NEAR = 1.15  # over the best fixed rate: near-optimal


def sweep(settings: TetrisSettings, model: str = MODELS[0]) -> Iterator[Row]:
    for trace in TRACES:
        for load in loads(model, trace)[1::2]:
            follows = row_of("tetris", model, trace, load, settings)
            for rate in FIXED:
                row = row_of("tetris", model, trace, load, settings, rate)
                yield row | {
                    "rate": rate,
                    "mean": float(row["mean_s"]) / float(follows["mean_s"]),
                    "p50": float(row["p50_s"]) / float(follows["p50_s"]),
                    "p99": float(row["p99_s"]) / float(follows["p99_s"]),
                }


def by_load(rows: Rows, trace: str) -> list[list[Row]]:
    """The rows of a trace, a list of all fixed rates for each load, ascending."""
    return [
        matching(rows, trace=trace, load=load)
        for load in sorted({float(row["load"]) for row in matching(rows, trace=trace)})
    ]


def borne(rows: Rows, trace: str) -> list[Row]:
    """The highest load at which the best fixed rate keeps the mean TTFT within what counts as
    served."""
    within = lambda row: float(row["mean_s"]) <= PATIENCE * float(row["light_s"])
    found = by_load(rows, trace)
    return max((some for some in found if any(map(within, some))), key=found.index)


def best(some: Rows) -> float:
    """The best of the fixed rates."""
    return float(min(some, key=lambda row: row["mean"])["rate"])


def spread(some: Rows) -> float:
    """The worst of the fixed rates over the best."""
    found = [float(row["mean"]) for row in some]
    return max(found) / min(found)


def behind(rows: Rows) -> float:
    """The worst, over traces and loads, of the rate that follows the load over the best fixed
    one."""
    return max(
        1 / min(float(row["mean"]) for row in some)
        for trace in TRACES
        for some in by_load(rows, trace)
    )


CLAIMS = (
    Claim(
        "best fixed rate at the lowest load, highest of three traces",
        0.3,
        lambda rows: max(best(by_load(rows, trace)[0]) for trace in TRACES),
        "7.3: 0.1 or 0.3",
        "",
        "lower",
    ),
    Claim(
        "best fixed rate at the highest load borne, lowest of three traces",
        0.5,
        lambda rows: min(best(borne(rows, trace)) for trace in TRACES),
        "7.3: 0.5 or 0.7",
        "",
        "higher",
    ),
    Claim(
        "following the load / the best fixed rate, mean TTFT, worst of all loads",
        NEAR,
        behind,
        "7.3: 'near-optimal', say 15 %",
        better="lower",
        limit=True,
    ),
    Claim(
        "worst / best fixed rate when saturated, over the same at the highest load borne",
        1,
        lambda rows: max(
            spread(by_load(rows, trace)[-1]) / spread(borne(rows, trace)) for trace in TRACES
        ),
        "7.3: 'less sensitive'",
        better="lower",
        limit=True,
    ),
)
PANELS = tuple(
    Panel(f"{trace}: {column} TTFT", "load", column, "rate", (("trace", trace),))
    for column in ("mean", "p99")
    for trace in TRACES
)

FIGURE = Figure(
    "fig11",
    "Fixed improvement rates over one that follows the load, Llama-3 8B",
    "simulated",
    sweep,
    CLAIMS,
    PANELS,
    mechanisms=(SEVERAL,),
    seeded=True,
)

if __name__ == "__main__":
    main(FIGURE, "tetris")
