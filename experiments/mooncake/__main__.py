"""All figures of Mooncake's evaluation, and summary.md.

python -m experiments.mooncake --out=DIR
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from experiments.figures import main_of_all
from experiments.mooncake.figure import OPTIONS, settings_of

NUMBERS = (
    "table1",
    "table3",
    "table4",
    "1",
    "5",
    "6",
    "13",
    "14",
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
# Mooncake's figures, again

Made by `python -m experiments.mooncake`. Nothing here was measured on a GPU. *simulated*: the \
real cache, scheduler and routing on a virtual clock,
where a step takes what coefficients say that were fitted to public measurements of A100; \
*computed*: read off these coefficients, the
paper's equations or the traces alone.
"""


def main(arguments: Sequence[str]) -> int:
    return main_of_all("mooncake", NUMBERS, OPTIONS, settings_of, HEAD, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
