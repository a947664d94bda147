"""All figures of Medha's evaluation, and summary.md.

python -m experiments.medha --out=DIR
"""

from __future__ import annotations

import sys

from experiments.medha.figure import OPTIONS, MedhaSettings
from experiments.papers import Paper

NUMBERS = (
    "1",
    "2",
    "5b",
    "6",
    "8",
    "9",
    "10",
    "11",
    "13",
    "15",
    "16",
    "17",
    "18",
    "19",
    "20",
    "21",
    "22",
    "23",
)
HEAD = """\
# Medha's figures, again

Made by `python -m experiments.medha`. Nothing here was measured on a GPU. *simulated*: the real \
scheduler on a virtual clock, where a step
takes a drawn factor (`--noise`, lognormal, sigma 0.13, of mean 1) of what coefficients say that \
were fitted to public measurements; *computed*: read off these
coefficients alone. Baselines are simulated over the same arrivals, with the same coefficients and \
noise. Runs under load last
600 s, those of figures 17 and 18 60 s, each with three seeds; the paper's last an hour.
"""
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
    together=(("1", "15", "16", "21", "22", "23"), ("17", "18")),
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
