"""Figure 2: what the data sheet of H100 allows for one request of Llama-3 8B, by its length, within
30 s to the first token and 20 ms per token: tokens on one DGX, and GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from experiments.figures import Claim, Figure, Panel, Row, Rows, cell, matching
from experiments.medha.closed import prefill_flops
from experiments.medha.figure import MedhaSettings
from experiments.papers import main
from jaxserve.costs.profiles import devices
from jaxserve.lab.simulate.run import shape_of
from jaxserve.lanes.work import ITEM

MODEL = shape_of("llama3-8b")
TTFT = 30.0  # seconds
TPOT = 0.02
DGX = 8  # GPUs
LENGTHS = tuple(125_000 * 2**n for n in range(8))  # tokens: 125K to 16M
LIMITS = ("compute", "memory", "bandwidth")


def gpus(tokens: int) -> dict[str, float]:
    """GPUs at the peak of the data sheet, by what limits them: operations of a prefill within TTFT,
    bytes of weights and KV, and reading these within TPOT."""
    device = devices()["h100"]
    weights = ITEM * (MODEL.layers * MODEL.layer_weights() + MODEL.head_weights())
    held = weights + tokens * MODEL.kv_bytes_per_token()
    return {
        "compute": prefill_flops(MODEL, tokens) / (TTFT * device.flops_per_s),
        "memory": held / device.memory_bytes,
        "bandwidth": held / (TPOT * device.memory_bytes_per_s),
    }


def longest(limit: str) -> int:
    """Tokens that one DGX serves, by one of the limits: to within a thousand."""
    low, high = 0, 100_000_000
    while high - low > 1000:
        middle = (low + high) // 2
        low, high = (middle, high) if gpus(middle)[limit] <= DGX else (low, middle)
    return low


def sweep(settings: MedhaSettings) -> Iterator[Row]:
    """longest: tokens that one DGX serves by this limit."""
    for limit in LIMITS:
        for tokens in LENGTHS:
            yield {
                "limit": limit,
                "tokens": tokens,
                "gpus": gpus(tokens)[limit],
                "longest": longest(limit),
            }


def _longest(*limits: str) -> Callable[[Rows], float]:
    """Millions of tokens that one DGX serves by the tightest of these."""
    return lambda rows: (
        min(float(matching(rows, limit=limit)[0]["longest"]) for limit in limits) / 1e6
    )


def _gpus(tokens: int) -> Callable[[Rows], float]:
    """Whole GPUs for a request, by the tightest limit."""
    return lambda rows: math.ceil(
        max(cell(rows, "gpus", limit=limit, tokens=tokens) for limit in LIMITS)
    )


FIGURE = Figure(
    "fig2",
    "Bounds of the data sheet for one request, Llama-3 8B, H100",
    "computed",
    sweep,
    claims=(
        Claim(
            "longest prompt of one DGX by compute, million tokens",
            1,
            _longest("compute"),
            "2.1: '~1M'",
            "M",
        ),
        Claim(
            "longest context of one DGX by memory, million tokens",
            4,
            _longest("memory", "bandwidth"),
            "2.1: '4M'",
            "M",
            remark="the tighter of what fits and of what is read within 20 ms",
        ),
        Claim("GPUs for 1M tokens", 10, _gpus(1_000_000), "2.1", "GPUs"),
        Claim(
            "GPUs for 2M tokens",
            40,
            _gpus(2_000_000),
            "2.1",
            "GPUs",
            remark="causal attention and linear parts at the peak; the paper's formula has "
            "attention alone",
        ),
    ),
    panels=(Panel("GPUs by length", "tokens", "gpus", "limit", (), "xy"),),
    runs="closed form of the data sheet",
)

if __name__ == "__main__":
    main(FIGURE, "medha")
