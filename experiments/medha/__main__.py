"""All figures of Medha's evaluation, and summary.md.

python -m experiments.medha --out=DIR
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from experiments.figures import main_of_all
from experiments.medha.figure import OPTIONS, settings_of

NUMBERS = (
    "1",
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
takes what coefficients say that were fitted to public measurements; *computed*: read off these \
coefficients alone. Baselines are
simulated over the same arrivals, with the same coefficients. Runs under load last an hour, \
those of figures 17 and 18 ten minutes.
"""


def main(arguments: Sequence[str]) -> int:
    return main_of_all("medha", NUMBERS, OPTIONS, settings_of, HEAD, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
