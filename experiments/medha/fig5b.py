"""Figure 5b: what small chunks cost attention alone, on one rank of Llama-3 70B with TP8 (8 query
heads, 1 kv head)."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Panel, Row, cell
from experiments.medha.closed import Node
from experiments.medha.figure import MedhaSettings
from experiments.papers import main
from jaxserve.settings.schema import MeshConfig

CHUNKS = (32, 64, 128, 256, 512, 1024, 2048)
CONTEXTS = (128_000, 256_000, 512_000, 1_000_000)


def sweep(settings: MedhaSettings) -> Iterator[Row]:
    """overhead: attention of all chunks of a prompt, against chunks of 2048, less 1."""
    costs = Node("llama3-70b", MeshConfig(tp=8)).predictor.costs
    for context in CONTEXTS:
        times = {
            chunk: sum(costs.attend_chunk(start, chunk) for start in range(0, context, chunk))
            * costs.layers
            for chunk in CHUNKS
        }
        for chunk, seconds in times.items():
            yield {
                "context": context,
                "chunk": chunk,
                "attention_s": seconds,
                "overhead": seconds / times[2048] - 1,
            }


FIGURE = Figure(
    "fig5b",
    "Attention of a prefill by chunk size, Llama-3 70B, 8 H100",
    "computed",
    sweep,
    claims=(
        Claim(
            "overhead of chunks of 32 against 2048, 1M tokens",
            0.11,
            lambda rows: cell(rows, "overhead", context=1_000_000, chunk=32),
            "3.2",
            "%",
            better="lower",
            remark="at 32 tokens reading KV and computing take about equally long; the greater "
            "of both counts",
        ),
        Claim(
            "overhead of chunks of 64 against 2048, 1M tokens",
            0.11,
            lambda rows: cell(rows, "overhead", context=1_000_000, chunk=64),
            "3.2: less than for 32",
            "%",
            better="lower",
            limit=True,
        ),
    ),
    panels=(Panel("against chunks of 2048", "chunk", "overhead", "context", log="x"),),
)

if __name__ == "__main__":
    main(FIGURE, "medha")
