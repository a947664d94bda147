"""Figure 3 and the examples of section 2.4, with Table 1's own seconds: what one chunk must choose
between, and several need not."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from experiments.figures import Claim, Figure, Panel, Row, cell
from experiments.papers import main
from experiments.tetris.figure import TetrisSettings
from experiments.tetris.model import LENGTHS, NODE, TABLE, K, growth
from jaxserve.lanes.cdsp import PLANNERS, CdspPlan, Instances, Latency, Queues

RATE = 0.1


def occupied(queues: Queues, plan: CdspPlan) -> np.ndarray:
    """Queue times once the plan is under way: who takes part is busy until its last chunk has
    ended. Returns [instances] seconds."""
    out = np.array(queues, float)
    for chunk in plan.chunks:
        out[list(chunk.group)] = chunk.end
    return out


def exact(size: int) -> Latency:
    """The one that gives Table 1's seconds of 16k, 32k and 128k tokens exactly."""
    lengths = np.array([16 * K, 32 * K, 128 * K], float)
    seconds = [TABLE[size][LENGTHS.index(int(length))] for length in lengths]
    base, token, pair = np.linalg.solve(
        np.stack([lengths**0, lengths, lengths**2], 1), seconds
    ).tolist()
    return Latency(base, token, 2 * pair, pair)


INSTANCES = Instances(
    {8: exact(8), 16: exact(16)}, NODE, growth=functools.partial(growth, "llama3-8b")
)
RULES = {"SP16": ("single", 0.0), "SP8": ("fixed-8", 0.0), "CDSP": ("cdsp", RATE)}


def plans(rule: str, queues: np.ndarray, *prompts: int) -> Iterator[CdspPlan]:
    """Yields plans of prompts that come at one moment."""
    policy, rate = RULES[rule]
    for prompt in prompts:
        plan = PLANNERS[policy](INSTANCES, queues, prompt, rate)
        queues = occupied(queues, plan)
        yield plan


def sweep(settings: TetrisSettings) -> Iterator[Row]:
    """Sixteen instances. 'queue': all have a second to go, then 32k and 16k tokens come; 'gap': 16k
    run on eight as 128k come."""
    running = PLANNERS["single"](INSTANCES, np.zeros(16), 16 * K, RATE)
    gap = occupied(np.zeros(16), running)
    for rule in RULES:
        first, second = plans(rule, np.ones(16), 32 * K, 16 * K)
        (third,) = plans(rule, gap, 128 * K)
        for example, prompt, plan in (
            ("queue", 32 * K, first),
            ("queue", 16 * K, second),
            ("gap", 128 * K, third),
        ):
            yield {
                "example": example,
                "rule": rule,
                "tokens": prompt,
                "ttft_s": plan.ttft,
                "chunks": len(plan.chunks),
                "first_chunk": plan.chunks[0].tokens,
                "largest": len(plan.chunks[-1].group),
            }


def _ttft(example: str, rule: str, thousands: int):
    return lambda rows: cell(rows, "ttft_s", example=example, rule=rule, tokens=thousands * K)


GAP = {rule: _ttft("gap", rule, 128) for rule in RULES}

FIGURE = Figure(
    "fig3",
    "Examples of section 2.4, 16 instances, Llama-3 8B",
    "computed",
    sweep,
    claims=(
        Claim(
            "32k, then 16k: SP16 for the first, TTFT of 32k",
            1.53,
            _ttft("queue", "SP16", 32),
            "2.4 (2)",
            "s",
            given=True,
        ),
        Claim(
            "32k, then 16k: SP16 for the first, TTFT of 16k",
            1.84,
            _ttft("queue", "SP16", 16),
            "2.4 (2)",
            "s",
            given=True,
        ),
        Claim(
            "32k, then 16k: SP8 for both, TTFT of 32k",
            1.58,
            _ttft("queue", "SP8", 32),
            "2.4 (2)",
            "s",
            given=True,
        ),
        Claim(
            "32k, then 16k: SP8 for both, TTFT of 16k",
            1.31,
            _ttft("queue", "SP8", 16),
            "2.4 (2)",
            "s",
            given=True,
        ),
        Claim(
            "32k, then 16k: CDSP, TTFT of 16k",
            1.84,
            _ttft("queue", "CDSP", 16),
            "2.4 (2): below SP16's",
            "s",
            "lower",
            limit=True,
        ),
        Claim(
            "128k beside 16k on SP8: SP8 more than SP16",
            1.34,
            lambda rows: GAP["SP8"](rows) - GAP["SP16"](rows),
            "2.4 (3)",
            "s",
            given=True,
        ),
        Claim(
            "128k beside 16k on SP8: CDSP",
            2.62,
            GAP["CDSP"],
            "2.4 (3): 2.31 s and 0.31 s of idling on SP16",
            "s",
            "lower",
            limit=True,
            remark="the gap of 0.31 s is filled with 16k tokens, by which Table 1's SP16 row "
            "falls little: its constant part rules",
        ),
    ),
    panels=(
        Panel("32k, then 16k", "tokens", "ttft_s", "rule", (("example", "queue"),)),
        Panel("128k beside 16k", "tokens", "ttft_s", "rule", (("example", "gap"),)),
    ),
    runs="real planner, latencies of Table 1",
)

if __name__ == "__main__":
    main(FIGURE, "tetris")
