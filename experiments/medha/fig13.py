"""Figure 13: the first token of 4M tokens against the decodes that share its steps, by chunk size
and degree of KVP (TP4, SPP4)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from experiments.figures import Claim, Figure, Panel, Row, cell, ratio
from experiments.medha.closed import Node
from experiments.medha.figure import MedhaSettings
from experiments.papers import main
from jaxserve.settings.schema import MeshConfig

PROMPT = 4_000_000
CHUNKS = (32, 64, 128, 256)
LANES = (1, 2, 4)
BESIDE = (1000,) * 8  # contexts of the decodes in its steps, in tokens


def sweep(settings: MedhaSettings) -> Iterator[Row]:
    for lanes in LANES:
        for chunk in CHUNKS:
            node = Node("llama3-8b", MeshConfig(spp=4, kvp=lanes, tp=4))
            pace = float(np.percentile(node.paces(PROMPT, chunk, BESIDE), 95))
            yield {
                "prompt": PROMPT,
                "kvp": lanes,
                "chunk": chunk,
                "ttft_s": node.first_token(PROMPT, chunk, BESIDE),
                "decode_p95_s": node.predictor.latency(
                    pace, chunk + len(BESIDE), -(-len(BESIDE) // lanes)
                ),
            }


def _row(kvp: int, chunk: int = 128) -> Row:
    return dict(kvp=kvp, chunk=chunk)


FIGURE = Figure(
    "fig13",
    "First token of 4M tokens against decodes in its steps, Llama-3 8B, TP4 SPP4, H100",
    "computed",
    sweep,
    claims=(
        Claim(
            "P95 of decodes beside chunks of 128, KVP 1",
            0.1,
            lambda rows: cell(rows, "decode_p95_s", **_row(1)),
            "3.4: 'almost 100ms'",
            "s",
            better="lower",
        ),
        Claim(
            "P95 of decodes, KVP 1 / 4, chunks of 128",
            1,
            lambda rows: ratio(rows, "decode_p95_s", _row(1), _row(4)),
            "3.5: KVP reduces both",
            better="higher",
            limit=True,
        ),
        Claim(
            "TTFT, KVP 1 / 4, chunks of 128",
            1,
            lambda rows: ratio(rows, "ttft_s", _row(1), _row(4)),
            "3.5: KVP reduces both",
            better="higher",
            limit=True,
        ),
        Claim(
            "TTFT, chunks of 32 / 256, KVP 1",
            1,
            lambda rows: ratio(rows, "ttft_s", _row(1, 32), _row(1, 256)),
            "3.5: larger chunks, sooner",
            better="higher",
            limit=True,
        ),
    ),
    panels=(Panel("chunks of 32 to 256", "decode_p95_s", "ttft_s", "kvp", log="xy"),),
)

if __name__ == "__main__":
    main(FIGURE, "medha")
