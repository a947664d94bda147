"""All figures of TokenLake's evaluation, and summary.md.

python -m experiments.tokenlake --out=DIR
"""

from __future__ import annotations

import sys

from experiments.papers import Paper
from experiments.tokenlake.figure import OPTIONS, TokenLakeSettings

NUMBERS = ("3", "9", "10", "11", "12", "13")
HEAD = """\
# TokenLake's figures, again

Made by `python -m experiments.tokenlake`. Nothing here was measured on a GPU. *simulated*: the \
real scheduler, cache and lanes on a virtual clock,
where a step takes what coefficients say that were fitted to public measurements of A100. \
Workloads are generated; what of them is published and what is
ours, and why numbers differ, is in [docs/tokenlake.md](../../../docs/tokenlake.md).
"""
PAPER = Paper(
    "tokenlake",
    "TokenLake",
    NUMBERS,
    HEAD,
    runs={"simulated": "real scheduler, cache and lanes, virtual clock"},
    given=OPTIONS,
    settings_of=TokenLakeSettings.of,
    together=(("9", "10"),),
    others={
        "1": "a drawing",
        "2": "a drawing",
        "4": "a drawing; the interface is `jaxserve.scheduling.pool`",
        "5": "a listing; the same names are in `jaxserve.scheduling.pool`",
        "6": "a drawing",
        "7": "a drawing; the policy is `placement=grow`",
        "8": "a drawing",
    },
)


if __name__ == "__main__":
    sys.exit(PAPER.main(sys.argv[1:]))
