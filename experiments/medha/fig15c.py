"""Our model of LoongServe, asked for what is public of it: the guide to its code, and what Tetris
measured of prefills and decodes on A100 (Table 1, figure 2)."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Panel, Row, Rows, cell
from experiments.medha.figure import MedhaSettings
from experiments.papers import main
from jaxserve.lab.simulate.baselines import pool
from jaxserve.lab.simulate.loongserve import FREE, PUBLISHED, Elasticity, LoongPool
from jaxserve.lab.simulate.run import System, shape_of
from jaxserve.settings.schema import MeshConfig

KINDS = {"free": FREE, "with its costs": PUBLISHED}
# (instances, tokens of the prompt, seconds), Table 1 of Tetris: Llama-3 8B, one GPU an instance
TABLE = (
    (1, 4, 0.28),
    (1, 128, 29.20),
    (8, 4, 0.21),
    (8, 32, 0.58),
    (8, 128, 3.96),
    (16, 4, 0.39),
    (16, 32, 0.53),
    (16, 128, 2.31),
    (16, 256, 7.02),
)
# figure 2 of Tetris: how much longer a decode step takes than with TP8, at most
OF_RANKS = {1: 5.73, 2: 3.87, 4: 1.93}  # on one instance of so many ranks
OF_EIGHT = {1: 1.83, 2: 1.41, 4: 1.15}  # on eight GPUs as instances of so many ranks
BATCH, CONTEXT = 16, 32 * 1024  # sequences of a decode step, and tokens of each
TOY = 16  # tokens of the prompt in the guide, or so


def _pool(model: str, devices: int, tp: int, elasticity: Elasticity) -> LoongPool:
    mesh = MeshConfig(tp=8, spp=devices // 8)
    return pool(System(shape_of(model), "a100", mesh), tp, 0.0, elasticity)


def sweep(settings: MedhaSettings) -> Iterator[Row]:
    for kind, elasticity in KINDS.items():
        whole = _pool("llama3-8b", 16, 1, elasticity)
        for degree, thousands, seconds in TABLE:
            found = whole.prefill([thousands * 1024], degree)
            yield _row(kind, "prefill", degree, thousands) | {"s": found, "paper_s": seconds}
        one = _pool("llama3-8b", 8, 8, elasticity).decode(BATCH, BATCH * CONTEXT, 1)
        for tp in OF_RANKS:
            made = _pool("llama3-8b", 8, tp, elasticity)
            for what, degree in (("decode, one", 1), ("decode, all", 8 // tp)):
                seconds = made.decode(BATCH, BATCH * CONTEXT, degree)
                yield _row(kind, what, tp, 32) | {"s": seconds / one, "paper_s": 1.0}
        toy = _pool("llama2-7b", 8, 2, elasticity)
        yield _row(kind, "toy decode", 4, 0) | {"s": toy.decode(1, TOY, 4), "paper_s": 0.0124}
        yield _row(kind, "toy prefill", 4, 0) | {"s": toy.prefill([TOY], 4), "paper_s": 0.0328}


def _row(kind: str, what: str, degree: int, thousands: int) -> Row:
    return {"kind": kind, "what": what, "degree": degree, "thousands": thousands}


def _found(rows: Rows, kind: str, what: str, degree: int, thousands: int) -> float:
    return cell(rows, "s", **_row(kind, what, degree, thousands))


FIGURE = Figure(
    "fig15c",
    "Our LoongServe beside what is public of it, A100",
    "computed",
    sweep,
    runs="model of LoongServe, coefficients of the step predictor",
    claims=(
        *(
            Claim(
                f"prefill of {thousands}K tokens, 8B, {degree} x TP1, {kind}",
                seconds,
                lambda rows, kind=kind, degree=degree, thousands=thousands: _found(
                    rows, kind, "prefill", degree, thousands
                ),
                "Table 1 of Tetris",
                "s",
                remark="a ring's hops are not hidden behind a short prompt's attention: what is "
                "above ours is some 24 ms for each further instance",
            )
            for degree, thousands, seconds in TABLE
            for kind in KINDS
        ),
        *(
            Claim(
                f"decode step, TP{tp} / TP8, {kind}",
                times,
                lambda rows, kind=kind, tp=tp: _found(rows, kind, "decode, one", tp, 32),
                "figure 2a of Tetris, at most",
                remark="16 sequences of 32K tokens; the step's calls take as long on all degrees, "
                "which lowers the ratio",
            )
            for tp, times in OF_RANKS.items()
            for kind in KINDS
        ),
        *(
            Claim(
                f"decode step on eight GPUs, SP{8 // tp} TP{tp} / TP8, {kind}",
                times,
                lambda rows, kind=kind, tp=tp: _found(rows, kind, "decode, all", tp, 32),
                "figure 2b of Tetris, at most",
                remark="16 sequences of 32K tokens",
            )
            for tp, times in OF_EIGHT.items()
            for kind in KINDS
        ),
        *(
            Claim(
                f"{what} of LWM-7B in the guide to LoongServe's code, 4 x TP2",
                seconds,
                lambda rows, name=name: _found(rows, "with its costs", name, 4, 0),
                "docs/artifact-eval of LoongServe/LoongServe",
                "s",
                given=True,
                remark="two of the costs are what our coefficients leave of it",
            )
            for what, name, seconds in (
                ("decode step", "toy decode", 0.0124),
                ("prefill of a few tokens", "toy prefill", 0.0328),
            )
        ),
    ),
    panels=(
        Panel("prefill", "thousands", "s", "degree", (("what", "prefill"), ("kind", "free")), "xy"),
        Panel(
            "prefill with its costs",
            "thousands",
            "s",
            "degree",
            (("what", "prefill"), ("kind", "with its costs")),
            "xy",
        ),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "medha")
