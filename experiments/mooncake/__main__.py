"""All figures of Mooncake's evaluation, and summary.md.

python -m experiments.mooncake --out=DIR
"""

from __future__ import annotations

import sys

from experiments.mooncake.figure import OPTIONS, MooncakeSettings
from experiments.papers import Paper

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
where a step takes a drawn factor (`--noise`, lognormal, sigma 0.13, of mean 1) of what \
coefficients say that were fitted to public
measurements of A100; figures 1, 13 to 15, 17, 18 and 21 with three seeds, of routing and noise, \
and of traces that are generated; *computed*:
read off these coefficients, the paper's equations or the traces alone.
"""
PAPER = Paper(
    "mooncake",
    "Mooncake",
    NUMBERS,
    HEAD,
    runs={
        "simulated": "real routing, scheduler and cache, virtual clock",
        "computed": "closed form",
    },
    given=OPTIONS,
    settings_of=MooncakeSettings.of,
    others={
        "2": "a drawing",
        "3": "a drawing",
        "4": "a drawing",
        "7": "made with figure 6",
        "8": "a day of a cluster in production; its load is not public",
        "9": "a drawing",
        "10": "other projects' features",
        "11": "a drawing",
        "12": "a drawing",
        "24": "SGLang on A10, measured; not made",
        "25": "vLLM on A10, measured; not made",
        "table2": "other projects' features",
        "table5": "SGLang on H20, measured; not made",
    },
)


if __name__ == "__main__":
    sys.exit(PAPER.main(sys.argv[1:]))
