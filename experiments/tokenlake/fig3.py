"""Figure 3: why to pool GPUs. Prompts and decodes behind a long prefix: on the instance that has
its KV, on another one to which it is sent first, and on four that share it and send queries.

The figure's axes are not known: lengths and batches are ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.figures import Claim, Figure, Panel, Row, Rows, ratio
from experiments.papers import main
from experiments.tokenlake.figure import TokenLakeSettings
from experiments.tokenlake.systems import (
    BASE,
    BLOCK,
    HASHED,
    NVLINK,
    SHAPE,
    STRIPED,
    SYSTEMS,
    WINDOW,
)
from experiments.virtual_cluster.cluster import ClusterSpec, VirtualCluster
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.lane_reads import LaneReads

PREFIXES = (8_192, 32_768, 131_072)  # tokens
NEW = 2048  # of a prompt behind it
BATCH = 8  # sequences that decode
OUTPUT = 32  # tokens of each
LATER = 1000.0  # seconds after which the prefix is cached
ONE = "where it is"
SENT = "sent to another"
PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class Times:
    """Seconds of a prompt behind a prefix, and per token of the decodes."""

    prefill: float
    decode: float


def sweep(settings: TokenLakeSettings) -> Iterator[Row]:
    for prefix in PREFIXES:
        one = measured(BASE, prefix)
        sent = prefix * SHAPE.kv_bytes_per_token() / NVLINK
        ways = {
            ONE: one,
            SENT: replace(one, prefill=one.prefill + sent, decode=one.decode + sent / OUTPUT),
            HASHED: measured(SYSTEMS[HASHED], prefix, pooled=True),
            STRIPED: measured(SYSTEMS[STRIPED], prefix, pooled=True),
        }
        for way, times in ways.items():
            for phase in PHASES:
                yield {
                    "prefix": prefix,
                    "way": way,
                    "phase": phase,
                    "ms": 1e3 * getattr(times, phase),
                }


def measured(spec: ClusterSpec, prefix: int, pooled: bool = False) -> Times:
    """Simulates a prompt behind a cached prefix alone, then BATCH requests that decode behind it.
    Errors: AssertionError where `pooled` and the prefix lay on one lane."""
    blocks = np.arange(prefix // BLOCK, dtype=np.int32)
    alike = lambda time, prompt, output: Arrival(time, prompt, output, "", blocks, BLOCK)
    cluster = VirtualCluster(spec)
    reads = LaneReads(spec.system.mesh.kvp, BLOCK, WINDOW)
    cluster.nodes[0].replica.listeners.append(reads)
    decodes = [alike(3 * LATER, prefix + BLOCK, OUTPUT) for _ in range(BATCH)]
    first = [alike(0.0, prefix + BLOCK, 1), alike(LATER, prefix + NEW, 1)]
    records = cluster.run([*first, *decodes]).records
    assert records[1].cached == prefix, "the prefix was not cached"
    assert not pooled or reads.spread, "the prefix lay on one lane"
    return Times(records[1].ttft, _per_token(records[2:]))


def _per_token(records: Sequence) -> float:
    begin = max(record.first for record in records)
    return (max(record.end for record in records) - begin) / (OUTPUT - 1)


def _gain(rows: Rows, phase: str, prefix: int, other: str, way: str) -> float:
    where = dict(phase=phase, prefix=float(prefix))
    return ratio(rows, "ms", dict(way=other, **where), dict(way=way, **where))


FIGURE = Figure(
    "fig3",
    "A prompt and decodes behind a prefix, Llama-2-7B, 8 A100",
    "simulated",
    sweep,
    claims=tuple(
        Claim(
            f"{phase} behind {prefix} tokens, {other} / {way}",
            1.0,
            lambda rows, phase=phase, prefix=prefix, other=other, way=way: _gain(
                rows, phase, prefix, other, way
            ),
            "Fig. 3, no number in the text",
            better="higher",
            limit=True,
        )
        for phase in PHASES
        for prefix in PREFIXES
        for other in (ONE, SENT)
        for way in (HASHED, STRIPED)
    ),
    panels=tuple(
        Panel(f"{phase}, ms", "prefix", "ms", "way", (("phase", phase),), "xy") for phase in PHASES
    ),
)

if __name__ == "__main__":
    main(FIGURE, "tokenlake")
