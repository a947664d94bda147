"""`jaxserve bench engine`: prefill, decode and the host's work of one engine, without a server."""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.cli.display import table
from jaxserve.cli.engine_flags import engine_config, engine_groups
from jaxserve.cli.files import check_writable
from jaxserve.observe.machine import described, machine
from jaxserve.progress import progress_bar
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError, EngineConfig

ABOUT = """\
Prefill is a prompt's length over the time to its first token. Decode is the time that 64 more
tokens per sequence add to prompts of 128 tokens, for each number of sequences at once. Prompts are
random. A round measures every point once; the first round does not count.

The host's work per decode step is timed in the engine's own path: schedule (what runs next),
arrays (the step as ints) and dispatch (handing it to the devices), which make the total; finish
(taking in the tokens read) and events (telling the callers) come after. A small model with a
short window of attention keeps the device, which may be the host's own cores, short at every
context; the contexts are bookkept, their KV is empty.

  jaxserve bench engine --json=speed.json
  jaxserve bench engine --prefill= --decode= --host_model=smollm2-135m --contexts=128
"""
BENCH = [
    Option("prefill", str, "128,512,2048", "prompt lengths; '' for none"),
    Option("decode", str, "1,8", "sequences that decode at once; '' for none"),
    Option("rounds", int, 5, "measurements of each point", 1),
    Option("json", str, None, "file for all figures"),
]
HOST = [
    Option(
        "contexts",
        str,
        "1024,8192",
        "tokens of context at which the host's work is measured; '' for none",
    ),
    Option("seqs", int, 256, "running sequences", 1, 4096),
    Option("steps", int, 64, "decode steps", 1),
    Option("host_model", str, "random:tiny-window", "model that runs meanwhile"),
]
DEFAULTS = {"chunk_tokens": 2048, "max_seqs": 8, "prefix_caching": False}


def run(values: dict[str, Any]) -> int:
    config = engine_config(values)
    prefill, decode, contexts = (
        counts(name, values[name]) for name in ("prefill", "decode", "contexts")
    )
    if values["json"] is not None:
        check_writable("json", values["json"])
    report: dict[str, Any] = {"machine": machine(), "settings": dataclasses.asdict(config)}
    if prefill or decode:
        report |= _speeds(config, prefill, decode, values["rounds"])
    if contexts:
        report |= _host_times(
            config, values["host_model"], contexts, values["seqs"], values["steps"]
        )
    print(shown(report))
    if values["json"] is not None:
        Path(values["json"]).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def shown(report: Mapping[str, Any]) -> str:
    """A report as tables."""
    parts = [described(report["machine"])]
    if "speed" in report:
        parts.append(_line(report["engine"]))
        rows = [
            [
                row["name"],
                f"{row['best']:.1f}",
                f"{row['median']:.1f}",
                str(len(row["tokens_per_s"])),
            ]
            for row in report["speed"]
        ]
        parts.append(table(["tokens/s", "best", "median", "rounds"], rows))
    if "host" in report:
        parts.append(
            f"{_line(report['host_engine'])}; microseconds of the host per decode step, p50 / p90"
        )
        parts.append(_host_table(report["host"]))
    if late := report.get("compiles_while_measuring"):
        parts.append(f"{late} programs were compiled while measuring: these figures are too low")
    return "\n\n".join(parts)


def _host_table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(rows[0]["micros"])
    lines = []
    for row in rows:
        times = [
            f"{row['micros'][name]['p50']:.0f} / {row['micros'][name]['p90']:.0f}" for name in names
        ]
        lines.append(
            [
                f"{row['sequences']} x {row['context']}",
                *times,
                *(str(row["bytes_per_step"][which]) for which in ("p50", "most")),
            ]
        )
    return table(["sequences x context", *names, "bytes/step", "most"], lines)


def _line(info: Mapping[str, Any]) -> str:
    return (
        f"{info['model']} in {info['dtype']} on {info['device']}, {info['mesh']}: "
        f"{info['max_seqs']} sequences, chunks of "
        f"{info['chunk_tokens']}, {info['pages_per_lane']} pages of {info['block_size']}"
    )


def _speeds(
    config: EngineConfig, prefill: Sequence[int], decode: Sequence[int], rounds: int
) -> dict[str, Any]:
    from jaxserve.lab.cli.bench.speed import Runner, SpeedPoint, measure

    points = [SpeedPoint("prefill", n) for n in prefill] + [SpeedPoint("decode", n) for n in decode]
    if max(decode, default=0) > config.scheduler.max_seqs:
        raise ConfigError(
            "decode",
            f"{max(decode)} sequences are above max_seqs, which is {config.scheduler.max_seqs}",
        )
    engine = _build(config)
    for point in points:
        if point.length > engine.info.max_model_len:
            raise ConfigError(
                point.kind,
                f"{point} needs sequences of {point.length} tokens; the limit is "
                f"{engine.info.max_model_len}",
            )
    with progress_bar("speed", len(points) * (rounds + 1), sys.stderr.isatty()) as bar:
        speeds, late = measure(Runner(engine), points, rounds, bar)
    info = _info(engine)
    engine.close()
    return {
        "engine": info,
        "speed": [speed.record() for speed in speeds],
        "compiles_while_measuring": late,
    }


def _host_times(
    config: EngineConfig, model: str, contexts: Sequence[int], seqs: int, steps: int
) -> dict[str, Any]:
    from jaxserve.lab.cli.bench.host_time import Crowd, host_time

    gc.collect()  # the engine before, and its pages
    crowds = [Crowd(seqs, context, steps) for context in contexts]
    block = config.cache.block_size
    engine = _build(
        dataclasses.replace(
            config,
            source=dataclasses.replace(
                config.source, model=model, max_model_len=max(c.length(block) for c in crowds)
            ),
            cache=dataclasses.replace(
                config.cache, pages=max(c.pages(block) for c in crowds), prefix_caching=True
            ),
            scheduler=dataclasses.replace(
                config.scheduler, max_seqs=seqs, max_queue=max(seqs, config.scheduler.max_queue)
            ),
        )
    )
    with progress_bar("host time", sum(c.turns for c in crowds), sys.stderr.isatty()) as bar:
        rows = [host_time(engine, crowd, bar).record() for crowd in crowds]
    info = _info(engine)
    engine.close()
    return {"host_engine": info, "host": rows}


def _build(config: EngineConfig) -> Any:
    """An engine that compiles what it comes to need: what does not count here runs first."""
    from jaxserve.engine.build import build

    return build(config, progress=sys.stderr.isatty(), warm_up=False)


def _info(engine: Any) -> dict[str, Any]:
    return {
        **engine.info.summary(),
        "device": engine.worker.device_kind,
        "chunk_tokens": engine.info.chunk_tokens,
    }


def counts(name: str, text: str) -> list[int]:
    """'128,512' -> [128, 512]. Errors: ConfigError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(name, f"{text!r} is not a list of whole numbers above 0, such as 128,512")
    return [int(part) for part in parts]


COMMAND = Command(
    {"speed": BENCH, "the host's work": HOST, **engine_groups(**DEFAULTS)}, run, ABOUT
)
