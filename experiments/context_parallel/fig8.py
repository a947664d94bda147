"""Figure 8: full prefill of 128K to 1M tokens on 8 and 16 hosts, and the share of the peak that
comes of it (appendix A)."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.context_parallel.paper import GPUS, MODEL, PARAMETERS, PEAK
from experiments.context_parallel.system import calibrated
from experiments.figures import Claim, Figure, Panel, Row, Rows, cell, ratio
from experiments.papers import main

LENGTHS = (128_000, 256_000, 512_000, 1_000_000)
ALONE = 540e12  # FLOP/s of FlashAttention 3 alone; appendix A


def flops(tokens: int) -> float:
    """Counts operations of a full prefill: 2 per weight and token, and causal attention (appendix
    A, whose second formula lacks the 4 in print)."""
    return 2 * PARAMETERS * tokens + 4 * tokens**2 / 2 * MODEL.d_model * MODEL.layers


def sweep(settings: None) -> Iterator[Row]:
    for hosts in (8, 16):
        for tokens in LENGTHS:
            seconds = calibrated().ttft(0, tokens, hosts)["pass_kv"]
            yield {
                "hosts": hosts,
                "tokens": tokens,
                "ttft_s": seconds,
                "tflops_per_gpu": flops(tokens) / seconds / hosts / GPUS / 1e12,
            }


def _rate(rows: Rows) -> float:
    return cell(rows, "tflops_per_gpu", hosts=16, tokens=1_000_000)


ISSUE = (
    "the time to issue a step is fitted to two hosts and taken to grow with every further one: "
    "of 15 it is 2 s"
)
FIGURE = Figure(
    "fig8",
    "Full prefill on 8 and 16 hosts",
    "computed",
    sweep,
    claims=(
        Claim(
            "1M on 16 hosts",
            77,
            lambda rows: cell(rows, "ttft_s", hosts=16, tokens=1_000_000),
            "4.2.3",
            "s",
        ),
        Claim(
            "128K on 16 hosts",
            3.8,
            lambda rows: cell(rows, "ttft_s", hosts=16, tokens=128_000),
            "4.2.3",
            "s",
            remark=ISSUE,
        ),
        Claim(
            "128K on 8 hosts",
            5.85,
            lambda rows: cell(rows, "ttft_s", hosts=8, tokens=128_000),
            "4.2.1",
            "s",
            counted_in="figure 6",
        ),
        Claim(
            "FLOP of 1M tokens, 10^18", 4.9, lambda rows: flops(1_000_000) / 1e18, "appendix A", "x"
        ),
        Claim("TFLOP/s per GPU, 1M on 16 hosts", 502, _rate, "4.2.3", "TFLOP/s"),
        Claim("share of the peak", 0.63, lambda rows: _rate(rows) * 1e12 / PEAK, "4.2.3", "%"),
        Claim(
            "share of attention alone", 0.93, lambda rows: _rate(rows) * 1e12 / ALONE, "4.2.3", "%"
        ),
        Claim(
            "1M / 512K on 8 hosts",
            2,
            lambda rows: ratio(
                rows, "ttft_s", dict(hosts=8, tokens=1_000_000), dict(hosts=8, tokens=512_000)
            ),
            "4.2.3: 'more than 2x'",
            better="higher",
            limit=True,
        ),
        Claim(
            "1M, 8 hosts / 16",
            2,
            lambda rows: ratio(
                rows, "ttft_s", dict(hosts=8, tokens=1_000_000), dict(hosts=16, tokens=1_000_000)
            ),
            "figure 8",
        ),
    ),
    panels=(
        Panel("TTFT", "tokens", "ttft_s", "hosts", (), "xy"),
        Panel("rate", "tokens", "tflops_per_gpu", "hosts", (), "x"),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "context_parallel")
