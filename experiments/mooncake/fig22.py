"""Figure 22: the parts of one request's time, with nothing cached and with 95 % of the prompt."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Panel, Row, cell
from experiments.mooncake.figure import MooncakeSettings
from experiments.mooncake.node import (
    KV_BYTES,
    LOAD_BYTES_PER_S,
    SYSTEM,
    TRANSFER_BYTES_PER_S,
    prefill_seconds,
)
from experiments.papers import main
from jaxserve.costs.predictor import Predictor
from jaxserve.lanes.load import LaneLoad

LENGTHS = (8192, 16_384, 32_768, 65_536, 131_072)  # tokens
CACHED = (0.0, 0.95)
DECODED = 128  # tokens


def sweep(settings: MooncakeSettings) -> Iterator[Row]:
    for share in CACHED:
        for tokens in LENGTHS:
            parts = request_parts(tokens, round(share * tokens))
            yield {
                "cached": share,
                "tokens": tokens,
                **parts,
                "ttft_s": parts["prefill_s"] + parts["transfer_s"] + parts["load_s"],
            }


def request_parts(tokens: int, cached: int) -> dict[str, float]:
    """Seconds of a request's parts, one after the other: prefill, which loads what is cached layer
    by layer while it computes; transfer of all KV to the decoding node; its way from that node's
    memory to its GPUs; decoding alone in the batch."""
    size = tokens * KV_BYTES
    loading = cached * KV_BYTES / LOAD_BYTES_PER_S
    return {
        "prefill_s": max(prefill_seconds(tokens, cached), loading),
        "transfer_s": size / TRANSFER_BYTES_PER_S,
        "load_s": size / LOAD_BYTES_PER_S,
        "decode_s": DECODED * decode_seconds(tokens),
    }


def decode_seconds(context: int) -> float:
    """Predicted seconds of a step that decodes one sequence."""
    load = LaneLoad(decodes=1, context=context, longest=context, samples=1)
    return Predictor(SYSTEM.costs, SYSTEM.mesh).stage([load])


def _saved(column: str, paper: float, remark: str = "") -> Claim:
    return Claim(
        f"128k tokens, 95 % cached: {column.removesuffix('_s')} saved",
        paper,
        lambda rows: (
            1
            - cell(rows, column, tokens=131_072, cached=0.95)
            / cell(rows, column, tokens=131_072, cached=0.0)
        ),
        "7.4.3",
        "%",
        "higher",
        remark=remark,
    )


FIGURE = Figure(
    "fig22",
    "Parts of a request's time, Llama-3 70B",
    "computed",
    sweep,
    claims=(
        _saved("prefill_s", 0.92),
        _saved(
            "ttft_s",
            0.86,
            "prefill, transfer and loading one after the other; scheduling and queueing are not "
            "counted",
        ),
    ),
    panels=tuple(
        Panel(name.removesuffix("_s"), "tokens", name, "cached", log="xy")
        for name in ("prefill_s", "transfer_s", "load_s", "decode_s", "ttft_s")
    ),
)

if __name__ == "__main__":
    main(FIGURE, "mooncake")
