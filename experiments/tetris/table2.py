"""Table 2: how long planning takes, by the largest SP size. Measured where this runs; the paper's
scheduler is C++, ours is Python."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator

import numpy as np

from experiments.figures import Claim, Figure, Panel, Row, cell
from experiments.papers import main
from experiments.tetris.figure import TetrisSettings
from experiments.tetris.model import BLOCK, NODE, K, growth, latencies
from jaxserve.lanes.cdsp import Instances, Latency, cdsp

# us, mean and most
PAPER = {8: (22.8, 52.5), 16: (25.8, 86.8), 32: (22.9, 53.4), 64: (24.9, 45.1), 128: (30.6, 73.7)}
DRAWS = 1000
RATE = 0.3


def largest(size: int) -> Instances:
    """Returns as many instances as the largest group has. Beyond Table 1 twice the instances halve
    the work and double what is paid once."""
    found = {known: latency for known, latency in latencies("llama3-8b").items() if known <= size}
    while max(found) < size:
        last = found[max(found)]
        found[2 * max(found)] = Latency(
            2 * last.base, last.token / 2, last.history / 2, last.pair / 2
        )
    return Instances(found, NODE, BLOCK, growth=functools.partial(growth, "llama3-8b"))


def sweep(settings: TetrisSettings) -> Iterator[Row]:
    for size, (mean, most) in PAPER.items():
        rng = np.random.default_rng(settings.seed)
        instances = largest(size)
        took = []
        chunks = []
        for _ in range(min(DRAWS, settings.requests)):
            tokens = int(rng.integers(4 * K, 190 * K))
            queues = rng.uniform(0, 5, size)
            began = time.perf_counter()
            plan = cdsp(instances, queues, tokens, RATE)
            took.append(1e6 * (time.perf_counter() - began))
            chunks.append(len(plan.chunks))
        yield {
            "most_sp": size,
            "paper_mean_us": mean,
            "paper_most_us": most,
            "mean_us": float(np.mean(took)),
            "p50_us": float(np.median(took)),
            "p99_us": float(np.percentile(took, 99)),
            "most_us": float(np.max(took)),
            "chunks": float(np.mean(chunks)),
            "by": "planning",
        }


FIGURE = Figure(
    "table2",
    "Planning a request, microseconds",
    "measured",
    sweep,
    claims=(
        *(
            Claim(
                f"mean, SP up to {size}",
                mean,
                lambda rows, size=size: cell(rows, "mean_us", most_sp=size),
                "table 2",
                "us",
                "lower",
                remark="Python beside C++; lengths of 4k to 190k tokens and queues of 0 to 5 s, "
                "drawn evenly"
                if size == 8
                else "",
            )
            for size, (mean, _) in PAPER.items()
        ),
        Claim(
            "median, SP up to 128",
            1000,
            lambda rows: cell(rows, "p50_us", most_sp=128),
            "our target",
            "us",
            "lower",
            limit=True,
        ),
        Claim(
            "longest of all",
            86.8,
            lambda rows: max(float(row["most_us"]) for row in rows),
            "table 2",
            "us",
            "lower",
            remark="the text says 86.8 us at SP 128, the table at SP 16; ours has whatever else "
            "the machine did",
        ),
    ),
    panels=(
        Panel("median", "most_sp", "p50_us", "by", (), "x"),
        Panel("mean", "most_sp", "mean_us", "by", (), "x"),
        Panel("the paper's mean", "most_sp", "paper_mean_us", "by", (), "x"),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "tetris")
