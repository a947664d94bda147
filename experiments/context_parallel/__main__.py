"""All tables and figures of the context parallel paper, and summary.md.

python -m experiments.context_parallel --out=DIR
"""

from __future__ import annotations

import sys

from experiments.papers import Paper

NUMBERS = ("table4", "table5", "table6", "table7", "table8", "6", "7", "8", "8_served", "9", "10")
HEAD = """\
# Context parallel inference, again

Made by `python -m experiments.context_parallel`. Nothing here was measured on a GPU: all but \
fig8_served is *computed* from the model by which jaxserve
chooses how lanes exchange (`jaxserve/lanes/exchange.py`), calibrated on the paper's \
tables 5, 6 and 8 alone
(`experiments/context_parallel/system.py`). Tables 5, 6 and 8 therefore show how well it fits, \
tables 4 and 7 and the figures what it
predicts: no constant is fitted to them, though what the model distinguishes was chosen with \
table 4 known. *gather* is jaxserve's third
strategy, which the paper does not have. Only fig8_served is *simulated*: a prompt goes through \
the scheduler and the cache that serve, chunk by
chunk, on a virtual clock with the same constants.
"""
PAPER = Paper(
    "context_parallel",
    "Context parallelism",
    NUMBERS,
    HEAD,
    runs={
        "computed": "closed form of the exchange chooser, calibrated on tables 5, 6, 8",
        "simulated": "scheduler, cache and exchange chooser of a virtual replica",
    },
    others={
        "1": "a drawing; the sharding is `placement=zigzag`, tested in tests/lanes",
        "2": "a drawing; as figure 1",
        "3": "a drawing; the exchange is `pass_kv`, tested in tests/sharding",
        "4": "a drawing; the exchange is `pass_q`, tested in tests/sharding",
        "5": "a drawing",
        "table1": "notation",
        "table2": "formulas",
        "table3": "formulas",
        "table9": "the shape of Llama 3 405B, a row of the table of models",
    },
)


if __name__ == "__main__":
    sys.exit(PAPER.main(sys.argv[1:]))
