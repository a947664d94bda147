"""`jaxserve bench sweep`: one load on replicas of many settings, live, simulated, or both."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.cli.display import table
from jaxserve.cli.files import check_writable, figure_class
from jaxserve.costs.profiles import devices
from jaxserve.lab.quotients import cell
from jaxserve.lab.research.points import LOAD, Point, grid, parsed_axes, parsed_base, read_grid
from jaxserve.lab.research.runner import RUNS, Row, Runner, key_of, read, sweep, unfinished
from jaxserve.progress import progress_bar
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError

ABOUT = f"""\
Points are all combinations of the values of --axes, on top of --base; both name flags of `jaxserve
serve` or of the load ({", ".join(LOAD)}). A grid may be a YAML file with `base` and `axes`. Each
point is run by a replica in a process of its own and kept as a line of JSON in --out; a sweep that
was stopped goes on where it was. A point that cannot be run is a line with the reason.

  jaxserve bench sweep --base='model=smollm2-135m;qps=1' --axes='mesh=tp=1|kvp=2;policy=fcfs|slack'
  jaxserve bench sweep --grid=grid.yaml --out=sweep.jsonl --html=sweep.html
  jaxserve bench sweep --run=simulated --gpu=h100 --base='model=llama3-8b;qps=2;prompt=8192' \\
      --axes='mesh=tp=8|spp=2,tp=4'
"""
SWEEP = [
    Option("grid", str, None, "YAML file with base and axes"),
    Option("base", str, "", "settings of all points, as NAME=VALUE;NAME=VALUE"),
    Option("axes", str, "", "settings that vary, as NAME=VALUE|VALUE;NAME=VALUE|VALUE"),
    Option(
        "run",
        str,
        "both",
        "live on the devices here; simulated on --gpu; both: live, and simulated with the costs "
        "that were measured here",
        choices=RUNS,
    ),
    Option("gpu", str, None, "kind of GPU of simulated replicas", choices=tuple(devices())),
    Option("limit", float, 600.0, "seconds for a live point", 1.0),
]
OUTPUT = [
    Option("out", str, "sweep.jsonl", "file of the points' lines; those it has are not run again"),
    Option("html", str, None, "page with pictures of all points (needs matplotlib and pandas)"),
]
HEADERS = ["point", "", "done", "TTFT ms p50", "p90", "TPOT ms p50", "p90", "all tok/s"]
HEADERS += ["in time", "goodput/s", "goodput tok/s"]


def run(values: dict[str, Any]) -> int:
    base, axes = read_grid(values["grid"]) if values["grid"] else ({}, {})
    base |= parsed_base(values["base"])
    axes |= parsed_axes(values["axes"])
    return run_points(grid(base, axes), list(axes), values)


def run_points(points: Sequence[Point], axes: Sequence[str], values: Mapping[str, Any]) -> int:
    """Runs points with the flags of SWEEP and OUTPUT; prints and draws them. axes: the settings by
    which they differ. Errors: ConfigError."""
    runner = Runner(values["run"], values["gpu"], values["limit"])
    out = Path(values["out"])
    for flag in filter(values.get, ("out", "html")):
        check_writable(flag, values[flag])
    if values["html"]:
        _check_libraries()
    keys = {row["key"] for row in read(out)}
    new = sum(key_of(point, runner) not in keys for point in points)
    print(f"{len(points)} points, {len(points) - new} of them in {out}", file=sys.stderr)
    with progress_bar("sweep", len(points), sys.stderr.isatty()) as step:
        rows = sweep(points, runner, out, step)
    print(shown(rows, axes))
    if values["html"]:
        from jaxserve.lab.research.report import page

        Path(values["html"]).write_text(page(rows, f"jaxserve sweep {out.name}"))
    return 1 if unfinished(rows) == len(rows) else 0


def shown(rows: Sequence[Row], axes: Sequence[str]) -> str:
    """The table of a sweep's lines, and the reasons of those without figures."""
    lines = []
    reasons = []
    for row in rows:
        settings = {**row["load"], **row["settings"]}
        name = " ".join(f"{axis}={settings[axis]}" for axis in axes if axis in settings) or "-"
        if row["reason"]:
            reasons.append(f"{name}: {row['reason']}")
        for source in ("live", "simulated"):
            if row[source]:
                lines.append([name, source, *_cells(row[source])])
                name = ""
    parts = []
    if lines:
        parts.append(table(HEADERS, lines))
    if reasons:
        parts.append("without figures:\n" + "\n".join(reasons))
    return "\n\n".join(parts)


def _cells(figures: Mapping[str, Any]) -> list[str]:
    all_ = figures["all"]
    times = [
        cell(all_[name].get(part), ".1f", 1e3)
        for name in ("ttft", "tpot")
        for part in ("p50", "p90")
    ]
    return [
        f"{all_['finished']}/{all_['requests']}",
        *times,
        f"{figures['tokens_per_s']:.0f}",
        # lines of older sweeps have none of these
        cell(all_.get("in_time"), ".0%"),
        cell(figures.get("goodput_per_s"), ".3g"),
        cell(figures.get("goodput_tokens_per_s"), ".1f"),
    ]


def _check_libraries() -> None:
    figure_class("html")
    try:
        import pandas  # noqa: F401
    except ImportError:
        raise ConfigError("html", "needs pandas: pip install jaxserve[research]") from None


COMMAND = Command({"sweep": SWEEP, "output": OUTPUT}, run, ABOUT)
