"""Decodes behind one prefix on two lanes: with copies of the prefix, and without, in turns.

    python -m experiments.benchmarks.prefix_copies --json=prefix_copies.json

Lanes are devices of the CPU. What a lane computes in a step is limited, so half of the sequences
get another home than the prefix; without copies they read it from there in every step. All runs
must give the same tokens.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from experiments.benchmarks.sharing import TimedSink
from experiments.script import command_line, keep
from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.cli.display import table
from jaxserve.observe.machine import described, machine
from jaxserve.scheduling.events import StepIssued
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import (
    CacheConfig,
    EngineConfig,
    MeshConfig,
    ModelSource,
    SchedulerConfig,
)

OPTIONS = {
    "prefix_copies": [
        Option("model", str, "smollm2-135m", "model: a fetched name, a folder or random:NAME"),
        Option("lanes", int, 2, "lanes of the mesh", 2, 16),
        Option("prefix", int, 3000, "tokens that all prompts begin with", 64),
        Option("decodes", int, 16, "sequences that decode at once", 2),
        Option("tokens", int, 48, "tokens that each generates", 2),
        Option("rounds", int, 3, "runs of each engine that count, in turns", 1),
        Option("json", str, None, "file for all figures"),
    ]
}
OWN = 24  # tokens of a prompt behind the prefix
BLOCK = 64  # tokens of a page
CHUNK = 256  # tokens of prefill that a lane computes in a step


class CopiesBench:
    """An engine that has computed the prefix, run in this thread."""

    def __init__(self, values: dict[str, Any], copies: bool):
        from jaxserve.engine.build import build

        length = values["prefix"] + OWN + values["tokens"] + BLOCK
        own = -(-(OWN + values["tokens"]) // BLOCK) + 1
        self.values = values
        self.engine = build(
            EngineConfig(
                ModelSource(values["model"], max_model_len=length),
                MeshConfig(kvp=values["lanes"]),
                CacheConfig(
                    block_size=BLOCK,
                    pages=2 * (-(-length // BLOCK) + own * values["decodes"]),
                    prefix_copies=copies,
                ),
                SchedulerConfig(max_seqs=values["decodes"], chunk_tokens=CHUNK),
                profile="none",
            ),
            progress=sys.stderr.isatty(),
            warm_up=False,
        )
        self.spread: list[int] = []  # sequences of a step that are on several lanes
        self.copied = 0
        self.engine.bus.subscribe(StepIssued, self._issued)
        self._serial = 0
        dice = np.random.default_rng(0)
        vocab = self.engine.info.vocab
        self._prefix = dice.integers(0, vocab, values["prefix"])
        self._send(np.arange(OWN), 1)
        self._work()

    def close(self) -> None:
        self.engine.worker.close()

    def _issued(self, event: StepIssued) -> None:
        self.spread.append(int(event.batch.spread.sum()))
        self.copied += len(event.batch.moves)

    def _send(self, own: np.ndarray, tokens: int) -> TimedSink:
        self._serial += 1
        heard = TimedSink()
        info = self.engine.info
        request = Request.make(
            f"{self._serial}",
            np.concatenate([self._prefix, own]),
            SamplingParams.make(temperature=0, max_tokens=tokens, ignore_eos=True),
            vocab=info.vocab,
            max_len=info.max_model_len,
            arrival=self.engine.now(),
        )
        self.engine.submit(request, heard)
        return heard

    def _work(self) -> None:
        while self.engine.step():
            pass

    def run(self, seed: int) -> tuple[float, list[list[int]]]:
        """Answers prompts that are the same for the same seed, all at once; returns tokens per
        second, and the tokens."""
        dice = np.random.default_rng(seed)
        prompts = dice.integers(0, self.engine.info.vocab, (self.values["decodes"], OWN))
        self.spread = []
        self.copied = 0
        began = time.perf_counter()
        heard = [self._send(own, self.values["tokens"]) for own in prompts]
        self._work()
        seconds = time.perf_counter() - began
        return len(heard) * self.values["tokens"] / seconds, [each.ids for each in heard]


def run(values: dict[str, Any]) -> int:
    from jaxserve.sharding.mesh import ensure_devices

    ensure_devices(values["lanes"])
    print(described(machine()))
    engines = {"no copy": CopiesBench(values, False), "copies": CopiesBench(values, True)}
    rows: list[dict[str, Any]] = []
    for number in range(1 + values["rounds"]):  # the first one compiles, and copies
        right: list[list[int]] = []
        for name, bench in engines.items():
            speed, ids = bench.run(number)
            right = right or ids
            rows.append(
                {
                    "round": number,
                    "engine": name,
                    "tokens_per_s": speed,
                    "spread": float(np.mean(bench.spread)),
                    "copied": bench.copied,
                    "equal": ids == right,
                }
            )
    for bench in engines.values():
        bench.close()
    print(report(rows))
    speeds = {
        name: np.array([row["tokens_per_s"] for row in rows if row["engine"] == name][1:])
        for name in engines
    }
    gain = float(np.median(speeds["copies"] / speeds["no copy"]))
    best = max(speeds["copies"]) / max(speeds["no copy"])
    print(f"tokens/s with copies by those without, median of rounds: {gain:.2f}, best: {best:.2f}")
    keep(values, runs=rows, gain=gain)
    return int(not all(row["equal"] for row in rows))


def report(rows: list[dict[str, Any]]) -> str:
    """Makes a table of all runs."""
    head = ["engine", "round", "tokens/s", "spread sequences of a step", "blocks copied", "tokens"]
    lines = [
        [
            row["engine"],
            str(row["round"]),
            f"{row['tokens_per_s']:.1f}",
            f"{row['spread']:.1f}",
            str(row["copied"]),
            "same" if row["equal"] else "OTHERS",
        ]
        for row in rows
    ]
    return table(head, lines)


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])

if __name__ == "__main__":
    summary = "decodes behind one prefix, with and without copies of it"
    sys.exit(command_line("prefix_copies", summary, COMMAND, sys.argv[1:]))
