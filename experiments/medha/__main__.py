"""All figures of Medha's evaluation, and summary.md.

python -m experiments.medha --out=DIR
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from experiments.medha import fig1, fig1b, fig15, fig15b, fig16, fig17, fig18, fig21, fig22, fig23
from experiments.medha.figure import OPTIONS, MedhaSettings
from experiments.medha.systems import make_ahead
from experiments.papers import Paper

NUMBERS = (
    "1",
    "1b",
    "2",
    "5b",
    "6",
    "8",
    "9",
    "10",
    "11",
    "13",
    "15",
    "15b",
    "15c",
    "16",
    "17",
    "18",
    "19",
    "20",
    "21",
    "22",
    "23",
)
UNDER_LOAD = {
    "1": fig1,
    "1b": fig1b,
    "15": fig15,
    "15b": fig15b,
    "16": fig16,
    "17": fig17,
    "18": fig18,
    "21": fig21,
    "22": fig22,
    "23": fig23,
}
HEAD = """\
# Medha's figures, again

Made by `python -m experiments.medha`. Nothing here was measured on a GPU. *simulated*: the real \
scheduler on a virtual clock, where a step
takes a drawn factor (`--noise`, lognormal, sigma 0.13, of mean 1) of what coefficients say that \
were fitted to public measurements; *computed*: read off these
coefficients alone. Baselines are simulated over the same arrivals, with the same coefficients and \
noise. Runs under load last
an hour, as the paper's do, each with three seeds. Objectives per token are ours, 100 ms, and, \
where it says so, the 20 ms that the paper names (2.1, and Algorithm 1 of its later version). \
LoongServe's elasticity is free, and, *with its costs*, takes what its paper and its public code \
say. Figures 1b, 15b and 15c are our own: the numbers of the paper's later version, what rests on \
LoongServe's costs, and our LoongServe beside what is public of it. Numbers in remarks are those \
of the middle seed.
"""


def make_runs_ahead(numbers: Sequence[str], settings: MedhaSettings, jobs: int) -> None:
    """Simulates what the figures under load among these need, each run once."""
    runs = [run for number in numbers if number in UNDER_LOAD for run in UNDER_LOAD[number].runs()]
    make_ahead(runs, settings, jobs)


PAPER = Paper(
    "medha",
    "Medha",
    NUMBERS,
    HEAD,
    runs={
        "simulated": "real scheduler and cache, virtual clock",
        "computed": "closed form of the step predictor",
    },
    given=OPTIONS,
    settings_of=MedhaSettings.of,
    together=(("1", "1b", "15", "15b", "16", "21", "22", "23"), ("17", "18")),
    ahead=make_runs_ahead,
    jobs=os.cpu_count() or 1,
    headlines=(
        ("15", "median TTFT of short requests, LoongServe / Medha, 0.75 q/s, 5 % long"),
        (
            "15",
            "median TTFT of short requests, LoongServe with its costs / Medha, 0.75 q/s, 5 % long",
        ),
        ("15", "capacity, median TTFT of at most 2 s, Medha / best baseline"),
        (
            "15",
            "capacity, median TTFT of at most 2 s, Medha / best baseline with its own costs and "
            "pipeline",
        ),
    ),
    others={
        "3": "a drawing",
        "4": "a drawing of the pools' load over time, without axes to compare with",
        "5a": "a drawing",
        "7": "a drawing",
        "12": "a drawing",
        "14": "a drawing",
        "table1": "notation",
        "table2": "kinds of parallelism compared in words",
    },
)


if __name__ == "__main__":
    sys.exit(PAPER.main(sys.argv[1:]))
