"""One long prompt on groups of lanes of every size, by every exchange, alone and beside short ones:
what its steps take and send, and what was predicted of them.

    python -m experiments.benchmarks.lanes --json=lanes.json --plot=lanes.png

Lanes are devices of the CPU. Every engine computes the same tokens, which is checked.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from experiments.benchmarks.sharing import TimedSink, send_random
from experiments.multihost.hlo import collectives
from experiments.script import command_line, keep
from jaxserve.cli.display import table
from jaxserve.cli.files import check_picture
from jaxserve.lab.research import plots
from jaxserve.lab.research.frames import timeline
from jaxserve.lanes.groups import group_sizes
from jaxserve.observe.machine import described, machine
from jaxserve.scheduling.events import StepIssued, StepRead
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
    "lanes": [
        Option("model", str, "smollm2-135m", "model: a fetched name, a folder or random:NAME"),
        Option("lanes", int, 8, "lanes of the mesh", 2, 16),
        Option("prompt", int, 2048, "tokens of the long prompt", 2),
        Option("chunk", int, 128, "tokens of a step for each lane", 1),
        Option("shorts", int, 4, "short prompts of 64 tokens that come with the long one", 0),
        Option("exchanges", str, "gather,pass_q,pass_kv", "exchanges to measure"),
        Option("repeats", int, 3, "runs of each case; the median counts", 1),
        Option("json", str, None, "file for all figures"),
        Option("plot", str, None, "picture of the lanes' timelines, .png or .svg"),
    ]
}
SHORT = 64  # tokens of a short prompt
OUTPUT = 4  # tokens of every request
BLOCK = 16  # tokens of a page
COLORS = {"long prompt": "#4477aa", "short prompts": "#ee6677"}


@dataclasses.dataclass
class Step:
    """A step with prefill: its shape, predicted and measured seconds, and whether these can be
    compared, those in which the host decides and builds it, bytes that the devices were sent."""

    shape: str
    predicted: float
    seconds: float = 0.0
    comparable: bool = False
    host: float = 0.0
    command_bytes: int = 0


class LanesBench:
    """An engine whose long prompts are on groups of `size` lanes, run in this thread."""

    def __init__(self, values: dict[str, Any], exchange: str, size: int):
        from jaxserve.engine.build import build

        lanes = values["lanes"]
        length = values["prompt"] + OUTPUT + BLOCK
        planned = size > 1
        self.values = values
        self.engine = build(
            EngineConfig(
                ModelSource(values["model"], max_model_len=length),
                MeshConfig(kvp=lanes),
                CacheConfig(
                    block_size=BLOCK,
                    pages=-(-length // BLOCK) + values["shorts"] * 8,
                    prefix_caching=False,
                    placement="striped" if planned else "grow",
                ),
                SchedulerConfig(
                    max_seqs=values["shorts"] + 1,
                    chunk_tokens=values["chunk"],
                    exchange=exchange,
                    planner=f"fixed-{size}" if planned else "none",
                    policy="slack",  # so that steps are measured at the start
                ),
                lookahead=0,
            ),
            progress=sys.stderr.isatty(),
            warm_up=False,
        )
        self.steps: list[Step] = []
        self._reading: dict[int, Step] = {}
        self.engine.bus.subscribe(StepIssued, self._issued)
        self.engine.bus.subscribe(StepRead, self._read)
        self._serial = 0

    def close(self) -> None:
        self.engine.worker.close()

    def _issued(self, event: StepIssued) -> None:
        if not event.batch.is_chunk.any():
            return
        plan = self.engine.worker.plan
        shape = plan.shapes[event.command.shape]
        step = Step(str(shape), event.batch.seconds)
        step.host = event.schedule + event.build
        step.command_bytes = event.command.rows.nbytes
        self._reading[event.batch.number] = step
        self.steps.append(step)

    def _read(self, event: StepRead) -> None:
        if step := self._reading.pop(event.batch.number, None):
            step.seconds = event.seconds
            step.comparable = event.comparable

    def send(self, tokens: int, seed: int) -> TimedSink:
        """Sends a random prompt of `tokens` tokens, the same for the same seed."""
        self._serial += 1
        return send_random(self.engine, f"{self._serial}", tokens, OUTPUT, seed)

    def run(self, shorts: int) -> tuple[TimedSink, list[TimedSink], list[Step]]:
        """The long prompt and `shorts` short ones, all at once, to their ends."""
        self.steps = []
        long = self.send(self.values["prompt"], 0)
        others = [self.send(SHORT, seed) for seed in range(1, shorts + 1)]
        while self.engine.step():
            pass
        return long, others, self.steps

    def timeline(self) -> Any:
        """Returns which lanes computed what in the last run, as a frame of
        `research.frames.timeline`, with its prompts as `short` and `long`."""
        first = self._serial - self.values["shorts"]
        found = timeline(self.engine, {str(number) for number in range(first, self._serial + 1)})
        found = found[found["kind"] == "prefill"]
        return found.assign(
            prompt=np.where(found["request"] == str(first), "long prompt", "short prompts")
        )

    def sent_by_a_lane(self, shape: str) -> int:
        """Bytes that a lane sends others in a compiled step, read off the program; those of loops
        once."""
        program = self.engine.worker.stages.programs.compiled[f"layers_0_{shape}"]
        lanes = self.values["lanes"]
        hosts = list(range(lanes))  # each lane a host of its own
        total = 0.0
        for one in collectives(program.as_text(), lanes):
            sent = one.sent(hosts)
            total += one.times * max(
                sum(size for (source, _), size in sent.items() if source == lane) for lane in hosts
            )
        return int(total)


def cases(values: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Exchange and size of group; on one lane nothing is exchanged."""
    yield "gather", 1
    for exchange in values["exchanges"].split(","):
        for size in group_sizes(values["lanes"])[1:]:
            if not size & (size - 1):
                yield exchange, size


Drawn = list[tuple[str, Any]]  # title and frame of a timeline


def measured(
    values: dict[str, Any], exchange: str, size: int, drawn: Drawn
) -> list[dict[str, Any]]:
    """Figures of one engine: the long prompt alone, and beside short ones; the timeline of the last
    run is added to `drawn`."""
    bench = LanesBench(values, exchange, size)
    rows = []
    try:
        for shorts in dict.fromkeys((0, values["shorts"])):
            bench.run(shorts)  # compiles
            runs = [bench.run(shorts) for _ in range(values["repeats"])]
            runs.sort(key=lambda run: run[0].ttft)
            long, others, steps = runs[len(runs) // 2]
            known = [step for step in steps if step.comparable]
            errors = [abs(step.predicted / step.seconds - 1) for step in known]
            shapes = {step.shape: bench.sent_by_a_lane(step.shape) for step in steps}
            rows.append(
                {
                    "exchange": exchange if size > 1 else "none",
                    "lanes": size,
                    "shorts": shorts,
                    "steps": len(steps),
                    "ttft": long.ttft,
                    "ttft_runs": [run[0].ttft for run in runs],
                    "predicted": sum(step.predicted for step in steps),
                    "error": float(np.mean(errors)) if errors else None,
                    "short_ttft": float(np.mean([each.ttft for each in others]))
                    if others
                    else None,
                    "host_ms": 1e3 * float(np.median([step.host for step in steps])),
                    "command_bytes": int(np.mean([step.command_bytes for step in steps])),
                    "sent_mib": sum(shapes[step.shape] for step in steps) / 2**20,
                    "ids": [long.ids, *(each.ids for each in others)],
                    "step_figures": [dataclasses.asdict(step) for step in steps],
                }
            )
        drawn.append((f"{rows[-1]['exchange']}, {size} lanes", bench.timeline()))
    finally:
        bench.close()
    return rows


def run(values: dict[str, Any]) -> int:
    from jaxserve.sharding.mesh import ensure_devices

    if values["plot"]:
        check_picture("plot", values["plot"])
    ensure_devices(values["lanes"])
    print(described(machine()))
    rows: list[dict[str, Any]] = []
    drawn: Drawn = []
    for exchange, size in cases(values):
        rows += measured(values, exchange, size, drawn)
        print(f"{exchange} on {size}: {rows[-1]['ttft']:.2f} s", file=sys.stderr)
        gc.collect()
    right = {row["shorts"]: row["ids"] for row in rows if row["lanes"] == 1}
    for row in rows:
        row["same"] = row["ids"] == right[row["shorts"]]
    print(_shown(rows))
    keep(values, rows=rows)
    if values["plot"]:
        _draw(drawn, values["plot"])
    return 0 if all(row["same"] for row in rows) else 1


def _draw(drawn: Drawn, path: str) -> None:
    """A timeline for each case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = 2
    rows = -(-len(drawn) // columns)
    figure, grid = pyplot.subplots(rows, columns, figsize=(11, 2.0 * rows), squeeze=False)
    for axes in grid.flat[len(drawn) :]:
        axes.axis("off")
    for axes, (title, found) in zip(grid.flat, drawn):
        plots.timeline(axes, found, "prompt", COLORS)
        axes.set_title(title, fontsize=9)
    grid.flat[0].legend(fontsize=7, loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _shown(rows: list[dict[str, Any]]) -> str:
    head = [
        "exchange",
        "lanes",
        "beside",
        "TTFT s",
        "lowest to highest",
        "predicted s",
        "step error",
        "short TTFT s",
        "steps",
        "host ms",
        "command B",
        "a lane sends MiB",
        "tokens",
    ]
    lines = [
        [
            row["exchange"],
            str(row["lanes"]),
            str(row["shorts"]),
            f"{row['ttft']:.2f}",
            f"{min(row['ttft_runs']):.2f} to {max(row['ttft_runs']):.2f}",
            f"{row['predicted']:.2f}",
            "-" if row["error"] is None else f"{row['error']:.0%}",
            "-" if row["short_ttft"] is None else f"{row['short_ttft']:.2f}",
            str(row["steps"]),
            f"{row['host_ms']:.2f}",
            f"{row['command_bytes']:,}",
            f"{row['sent_mib']:.1f}",
            "same" if row["same"] else "OTHERS",
        ]
        for row in rows
    ]
    return table(head, lines)


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])

if __name__ == "__main__":
    sys.exit(command_line("lanes", "a long prompt on groups of lanes", COMMAND, sys.argv[1:]))
