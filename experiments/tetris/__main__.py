"""All figures of Tetris' evaluation, and summary.md.

python -m experiments.tetris --out=DIR
"""

from __future__ import annotations

import sys

from experiments.papers import Paper
from experiments.tetris.figure import OPTIONS, TetrisSettings

NUMBERS = ("table1", "table2", "3", "8", "8_served", "9", "10", "11", "12", "13", "14", "14e")
HEAD = """\
# Tetris' figures, again

Made by `python -m experiments.tetris`. Nothing here was measured on a GPU. *simulated*: the \
real planner on a virtual clock, where chunks
take a drawn factor (`--noise`, lognormal, sigma 0.13, of mean 1) of what Eq. 1 says, fitted to \
the paper's Table 1 for 8B and to a composed
model for 70B, and of what balancing of KV exposes as groups grow, with three seeds; the planner \
knows these alone; *computed*: read off these models alone;
*measured*: on the CPU where this was run, whatever else ran there. Baselines are simulated over \
the same arrivals with the same latencies.
"""
PAPER = Paper(
    "tetris",
    "Tetris",
    NUMBERS,
    HEAD,
    runs={
        "simulated": "real planner; instances by Eq. 1, no engine's scheduler",
        "computed": "closed form",
        "measured": "real planner, timed on a CPU",
    },
    given=OPTIONS,
    settings_of=TetrisSettings.of,
    together=(("8", "9", "10", "13"),),
    others={
        "1": "a drawing",
        "2": "decode latency by TP and SP, measured on A100; not made",
        "4": "a drawing",
        "5": "a drawing",
        "6": "a drawing",
        "7": "a drawing; the handshake for transfers is in figure 14e",
    },
)


if __name__ == "__main__":
    sys.exit(PAPER.main(sys.argv[1:]))
