"""Table 1 with Equations 1 and 2: what reusing a prefix saves, and from which bandwidth on."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Panel, Row, cell
from experiments.mooncake.figure import MooncakeSettings
from experiments.mooncake.node import A800, H800, KV_BYTES, Equations, prefill_seconds
from experiments.papers import main

PREFIXES = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)  # tokens
NODES: dict[str, Equations] = {"8xA800": A800, "8xH800": H800}
FITTED = "8xA100, fitted costs"
CACHED = 0.95  # of a prompt (7.4.3)


def sweep(settings: MooncakeSettings) -> Iterator[Row]:
    for prefix in PREFIXES:
        cached = round(CACHED * prefix)
        for node, equations in NODES.items():
            whole = equations.flops(prefix)
            yield {
                "node": node,
                "tokens": prefix,
                "least_gb_per_s": equations.bandwidth(prefix) / 1e9,
                "saved": equations.flops(cached) / whole,
            }
        seconds = prefill_seconds(prefix)
        yield {
            "node": FITTED,
            "tokens": prefix,
            "least_gb_per_s": prefix * KV_BYTES / seconds / 1e9,
            "saved": 1 - prefill_seconds(prefix, cached) / seconds,
        }


def _least(node: str, paper: float, remark: str = "") -> Claim:
    return Claim(
        f"{node}: least bandwidth for a prefix of 8192 tokens",
        paper,
        lambda rows: cell(rows, "least_gb_per_s", node=node, tokens=8192),
        "2.2",
        "GB/s",
        remark=remark,
    )


FIGURE = Figure(
    "table1",
    "Loading a prefix or computing it, Llama-3 70B",
    "computed",
    sweep,
    claims=(
        _least("8xA800", 6),
        _least("8xH800", 19),
        _least(
            FITTED,
            6,
            "Eq. 2 takes all of the GPUs' peak; steps at the speed that was measured take longer, "
            "and loading is worth it from a lower bandwidth on",
        ),
        Claim(
            "128k tokens, 95 % cached: operations saved by Eq. 1",
            0.92,
            lambda rows: cell(rows, "saved", node="8xA800", tokens=131_072),
            "7.4.3",
            "%",
            "higher",
        ),
        Claim(
            "128k tokens, 95 % cached: prefill time saved, fitted costs",
            0.92,
            lambda rows: cell(rows, "saved", node=FITTED, tokens=131_072),
            "7.4.3",
            "%",
            "higher",
            counted_in="figure 22",
        ),
    ),
    panels=(
        Panel("Eq. 2", "tokens", "least_gb_per_s", "node", log="xy"),
        Panel("95 % cached", "tokens", "saved", "node", log="x"),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "mooncake")
