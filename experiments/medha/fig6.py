"""Figure 6: prefill of 1M tokens against the decodes that share its steps: chunks of one size, and
chunks that shrink."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from experiments.figures import Claim, Figure, Mechanism, Panel, Row, Rows, cell, fewest, matching
from experiments.medha.figure import MedhaSettings
from experiments.papers import main
from jaxserve.lab.cli.simulate import configs, scheduling_options
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.run import System, execute, shape_of
from jaxserve.settings.schema import MeshConfig

SYSTEM = System(shape_of("llama3-8b"), "h100", MeshConfig(tp=8))
PROMPT = 1_000_000
BEGIN = 0.1  # seconds: when the prefill arrives
DECODES = 8  # requests that decode all the time, after 1000 tokens
CHUNKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def sweep(settings: MedhaSettings) -> Iterator[Row]:
    """An adaptive prefill for each static one, with its P95 of decode latency as the objective.
    chunk: the largest, in tokens; sizes: how many sizes of chunks the long prompt has."""
    prompt = min(PROMPT, 1000 * (settings.requests or PROMPT))
    for chunk in CHUNKS:
        static = _prefill(prompt, dict(chunking="static", chunk_tokens=chunk))
        decode = static[1]
        yield _row("static", prompt, chunk, decode, *static)
        adaptive = _prefill(
            prompt, dict(chunking="adaptive", chunk_tokens=4096, tpot=decode, step_time=decode)
        )
        yield _row("adaptive", prompt, chunk, decode, *adaptive)


def _row(
    chunking: str, prompt: int, chunk: int, target: float, prefill: float, decode: float, sizes: int
) -> Row:
    return {
        "chunking": chunking,
        "prompt": prompt,
        "chunk": chunk,
        "target_s": target,
        "prefill_s": prefill,
        "decode_p95_s": decode,
        "sizes": sizes,
    }


def _prefill(prompt: int, scheduling: dict[str, Any]) -> tuple[float, float, int]:
    """Seconds to the first token of the long prompt, the P95 of the steps in which it shared, and
    how many sizes its chunks have."""
    scheduler, cache = configs({option.name: option.default for option in scheduling_options()})
    steps = prompt // 32 + 100  # more than any prefill here has, so the decodes outlast it
    arrivals = [Arrival(0.0, 1000, steps) for _ in range(DECODES)] + [
        Arrival(BEGIN, prompt, 1, "long")
    ]
    replica = SYSTEM.replica(replace(scheduler, **scheduling), cache)
    outcome = execute(replica, arrivals, keep_steps=True)
    shared = [
        step.end - step.start
        for step in outcome.steps
        if step.decodes and step.start >= BEGIN and step.chunks
    ]
    ttft = next(record.ttft for record in outcome.records if record.kind == "long")
    sizes = {tokens for step in outcome.steps for _, start, tokens in step.chunks if start}
    return ttft, float(np.percentile(shared, 95)), len(sizes)


def _gain(rows: Rows, chunk: int) -> float:
    static, adaptive = (
        matching(rows, chunking=name, chunk=chunk)[0]["prefill_s"]
        for name in ("static", "adaptive")
    )
    return float(static) / float(adaptive)


FIGURE = Figure(
    "fig6",
    "Prefill of 1M tokens against decodes in its steps, Llama-3 8B, 8 H100",
    "simulated",
    sweep,
    mechanisms=(
        Mechanism(
            "chunks of several sizes", lambda rows: fewest("sizes", chunking="adaptive")(rows) - 1
        ),
    ),
    claims=(
        Claim(
            "prefill, chunks of 32 / 4096",
            1.0175,
            lambda rows: (
                cell(rows, "prefill_s", chunking="static", chunk=32)
                / cell(rows, "prefill_s", chunking="static", chunk=4096)
            ),
            "3.2: 'by 1.75%'",
            remark="1.75 % cannot be: 31250 steps that each read 2 GB of weights per GPU take "
            "18 s more; 1.75x is likelier meant",
        ),
        Claim(
            "prefill, chunks of 32 / 4096, if 1.75x is meant",
            1.75,
            lambda rows: (
                cell(rows, "prefill_s", chunking="static", chunk=32)
                / cell(rows, "prefill_s", chunking="static", chunk=4096)
            ),
            "3.2, our reading",
            better="lower",
            remark="half of it is attention, which reads all KV 31250 times; a layer's products "
            "take 36 us, measured in captured CUDA graphs, where reading their weights needs 16 "
            "us: with that as their floor it would be 5 % less",
        ),
        *(
            Claim(
                f"prefill, static {chunk} / adaptive of equal decode latency",
                1,
                lambda rows, chunk=chunk: _gain(rows, chunk),
                "figure 6b: better at both",
                better="higher",
                limit=True,
            )
            for chunk in (64, 256)
        ),
    ),
    panels=(Panel("P95 of decodes", "decode_p95_s", "prefill_s", "chunking", log="xy"),),
)

if __name__ == "__main__":
    main(FIGURE, "medha")
