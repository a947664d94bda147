"""All figures of Tetris' evaluation, and summary.md.

python -m experiments.tetris --out=DIR
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from experiments.figures import main_of_all
from experiments.tetris.figure import OPTIONS, settings_of

NUMBERS = ("table1", "table2", "3", "8", "8_served", "9", "10", "11", "12", "13", "14")
HEAD = """\
# Tetris' figures, again

Made by `python -m experiments.tetris`. Nothing here was measured on a GPU. *simulated*: the \
real planner on a virtual clock, where chunks
take what Eq. 1 says, fitted to the paper's Table 1 for 8B and to a composed model for 70B; \
*computed*: read off these models alone;
*measured*: on the CPU where this was run, whatever else ran there. Baselines are simulated over \
the same arrivals with the same latencies.
"""


def main(arguments: Sequence[str]) -> int:
    return main_of_all("tetris", NUMBERS, OPTIONS, settings_of, HEAD, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
