"""Figure 10: prompt tokens per second of each system at the highest load at which it keeps its own
latency low."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from experiments.figures import Claim, Figure, Panel, Row, Rows, cell
from experiments.papers import main
from experiments.tetris.figure import TRACES, TetrisSettings
from experiments.tetris.systems import (
    BASELINES,
    MODELS,
    SEVERAL,
    SYSTEMS,
    critical,
    possible,
    row_of,
)

SMALL, LARGE = MODELS


def sweep(settings: TetrisSettings) -> Iterator[Row]:
    for model in MODELS:
        for place, trace in enumerate(settings.traces):
            for name in possible(SYSTEMS, model):
                yield row_of(
                    name, model, trace, critical(name, model, trace, settings), settings
                ) | {"place": place}


def over(choose: Callable, model: str) -> Callable[[Rows], float]:
    """The least or the greatest of Tetris' throughput over a baseline's, of three traces and all
    baselines."""
    of = lambda rows, trace, name: cell(rows, "tokens_per_s", model=model, trace=trace, system=name)
    return lambda rows: choose(
        of(rows, trace, "tetris") / of(rows, trace, name)
        for trace in TRACES
        for name in possible(BASELINES, model)
    )


REMARK = (
    "critical load: where the mean TTFT is 5 times the light-load latency; the paper gives no "
    "number"
)

FIGURE = Figure(
    "fig10",
    "Throughput at each system's critical load",
    "simulated",
    sweep,
    mechanisms=(SEVERAL,),
    seeded=True,
    claims=(
        Claim(
            "throughput, 8B, Tetris / a baseline, least",
            1.24,
            over(min, SMALL),
            "7.3",
            better="higher",
            remark=REMARK,
        ),
        Claim(
            "throughput, 8B, Tetris / a baseline, greatest",
            3.38,
            over(max, SMALL),
            "7.3",
            better="higher",
        ),
        Claim(
            "throughput, 70B, Tetris / a baseline, least",
            1.15,
            over(min, LARGE),
            "7.3",
            better="higher",
        ),
        Claim(
            "throughput, 70B, Tetris / a baseline, greatest",
            1.81,
            over(max, LARGE),
            "7.3",
            better="higher",
        ),
    ),
    panels=tuple(
        Panel(
            f"{model}: short, medium, long, recorded",
            "place",
            "tokens_per_s",
            "system",
            (("model", model),),
        )
        for model in MODELS
    ),
)

if __name__ == "__main__":
    main(FIGURE, "tetris")
