"""Figure 8: TTFT by load, and the load that each system can bear."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from experiments.bounds import greatest, least
from experiments.figures import Claim, Figure, Panel, Row, Rows, matching
from experiments.papers import main
from experiments.tetris.figure import TRACES, TetrisSettings
from experiments.tetris.systems import (
    BASELINES,
    MODELS,
    SEVERAL,
    SYSTEMS,
    bound,
    capacity,
    possible,
    swept,
)

SMALL, LARGE = MODELS


def sweep(settings: TetrisSettings) -> Iterator[Row]:
    for model in MODELS:
        for trace in settings.traces:
            most = bound(model, trace, settings)
            for name in possible(SYSTEMS, model):
                yield from (row | {"bound": most} for row in swept(name, model, trace, settings))


def gain(
    rows: Rows, model: str, trace: str, others: tuple[str, ...], system: str = "tetris"
) -> float:
    """The load that a system bears, over the most that any of the others bears."""
    return capacity(rows, system, model, trace) / greatest(
        capacity(rows, other, model, trace) for other in possible(others, model)
    )


def over(
    choose: Callable, model: str, others: tuple[str, ...] = BASELINES, system: str = "tetris"
) -> Callable[[Rows], float]:
    """The least or the greatest gain of the three traces."""
    return lambda rows: choose(gain(rows, model, trace, others, system) for trace in TRACES)


def most(choose: Callable, model: str) -> Callable[[Rows], float]:
    """The least or the greatest of the bounds on the gain over Fixed SP8."""
    return lambda rows: choose(
        float(matching(rows, model=model, trace=trace)[0]["bound"]) for trace in TRACES
    )


def idle(model: str, other: str) -> Callable[[Rows], float]:
    """The least of three traces of another system's mean TTFT over Tetris' at the lowest load."""
    first = lambda rows, trace, name: float(
        matching(rows, model=model, trace=trace, system=name)[0]["mean_s"]
    )
    return lambda rows: min(
        first(rows, trace, other) / first(rows, trace, "tetris") for trace in TRACES
    )


LEFT_OUT = "not among the paper's baselines"
SMALLER = (
    "the smaller a fixed group, the more load it bears, for it wastes less, and the slower it "
    "is when idle; a choice per prompt has both"
)
BOUND = "bound, by the latencies alone"

FIGURE = Figure(
    "fig8",
    "TTFT by load",
    "simulated",
    sweep,
    mechanisms=(SEVERAL,),
    seeded=True,
    claims=(
        Claim(
            "max load, 8B, Tetris / best baseline, least of three traces",
            1.20,
            over(least, SMALL),
            "7.2",
            better="higher",
            remark="max load: where the mean TTFT is 25 times that of requests alone on their "
            "best group; interpolated between loads. Best baseline: of Fixed SP8, SP16 and "
            "LoongServe Disaggregated, on as many prefill instances. Lengths as the paper "
            "bounds them (truncated lognormal)",
        ),
        Claim(
            "max load, 8B, Tetris / best baseline, greatest",
            1.45,
            over(greatest, SMALL),
            "7.2",
            better="higher",
        ),
        Claim(
            "max load, 70B, Tetris / best baseline, least of three traces",
            1.21,
            over(least, LARGE),
            "7.2",
            better="higher",
            remark="70B's latencies are composed (`model`): A100 costs at TP4 and a ring whose "
            "hops cost what Table 1 implies",
        ),
        Claim(
            "max load, 70B, Tetris / best baseline, greatest",
            1.43,
            over(greatest, LARGE),
            "7.2",
            better="higher",
        ),
        Claim(
            "most that any schedule bears over Fixed SP8, 8B, least of three traces",
            1.20,
            most(min, SMALL),
            BOUND,
            remark="instances' time that the requests take on SP8, over that on the size that "
            "takes least of it: Table 1 leaves no more on the long trace. Short runs let a "
            "system bear a little more than that",
        ),
        Claim(
            "most that any schedule bears over Fixed SP8, 8B, greatest",
            1.45,
            most(max, SMALL),
            BOUND,
        ),
        Claim(
            "most that any schedule bears over Fixed SP8, 70B, least of three traces",
            1.21,
            most(min, LARGE),
            BOUND,
        ),
        Claim(
            "most that any schedule bears over Fixed SP8, 70B, greatest",
            1.43,
            most(max, LARGE),
            BOUND,
        ),
        Claim(
            "max load, 8B, Tetris / best baseline, recorded trace",
            1.20,
            lambda rows: gain(rows, SMALL, "recorded", BASELINES),
            "7.2",
            better="higher",
            remark="Mooncake's synthetic trace, its prompts of 4k to 95k tokens, timestamps "
            "stretched",
        ),
        Claim(
            "max load, 8B, LoongServe Disaggregated / Fixed SP8",
            1,
            over(greatest, SMALL, ("fixed-8",), "loongserve-disagg"),
            "7.2: between SP16 and SP8",
            better="lower",
            limit=True,
        ),
        Claim(
            "max load, 8B, LoongServe Disaggregated / Fixed SP16",
            1,
            over(least, SMALL, ("fixed-16",), "loongserve-disagg"),
            "7.2: between SP16 and SP8",
            better="higher",
            limit=True,
        ),
        Claim(
            "max load, 70B, LoongServe Disaggregated / Fixed SP8, greatest",
            1,
            over(greatest, LARGE, ("fixed-8",), "loongserve-disagg"),
            "7.2: 'can outperform'",
            better="higher",
            limit=True,
        ),
        Claim(
            "max load, 8B, Tetris / LoongServe on all instances, least",
            1.20,
            over(least, SMALL, ("loongserve",)),
            "7.2",
            better="higher",
            remark="LoongServe has twice the prefill instances, less one for each request that "
            "decodes. That depends on the outputs, which the paper does not print: ours are "
            "Mooncake's conversations', 340 tokens. In its favour it knows how long they decode",
        ),
        Claim(
            "max load, 70B, Tetris / LoongServe on all instances, least",
            1.21,
            over(least, LARGE, ("loongserve",)),
            "7.2",
            better="higher",
            remark="as for 8B",
        ),
        *(
            Claim(
                f"max load, {name}, Tetris / Fixed {size}, least",
                1,
                over(least, model, (f"fixed-{size[2:]}",)),
                LEFT_OUT,
                better="higher",
                limit=True,
                remark=SMALLER if (model, size) == (SMALL, "SP4") else "",
            )
            for model, name in ((SMALL, "8B"), (LARGE, "70B"))
            for size in ("SP4", "SP1")
        ),
        *(
            Claim(
                f"mean TTFT at the lowest load, {name}, Fixed {size} / Tetris, least",
                1,
                idle(model, f"fixed-{size[2:]}"),
                LEFT_OUT,
                better="higher",
                limit=True,
            )
            for model, name in ((SMALL, "8B"), (LARGE, "70B"))
            for size in ("SP4", "SP1")
        ),
    ),
    panels=tuple(
        Panel(
            f"{model}, {trace}",
            "load",
            "mean_s",
            "system",
            (("model", model), ("trace", trace)),
            "y",
            "",
        )
        for model in MODELS
        for trace in TRACES
    ),
)

if __name__ == "__main__":
    main(FIGURE, "tetris")
