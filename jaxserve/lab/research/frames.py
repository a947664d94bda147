"""Makes pandas frames of sweeps and of what replicas ran, for notebooks and pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from jaxserve.lab.research import runner
from jaxserve.lab.research.points import Point
from jaxserve.lab.research.runner import Runner
from jaxserve.lab.simulate.recorder import Outcome
from jaxserve.replica.protocol import Replica
from jaxserve.settings.schema import MeshConfig

FIGURES = {  # column: path in a line's figures
    "ttft_mean": ("all", "ttft", "mean"),
    "ttft_p50": ("all", "ttft", "p50"),
    "ttft_p90": ("all", "ttft", "p90"),
    "tpot_mean": ("all", "tpot", "mean"),
    "tpot_p50": ("all", "tpot", "p50"),
    "tpot_p90": ("all", "tpot", "p90"),
    "tokens_per_s": ("tokens_per_s",),
    "finished": ("all", "finished"),
    "ttft_met": ("all", "ttft_met"),
    "tpot_met": ("all", "tpot_met"),
    "in_time": ("all", "in_time"),
    "goodput_per_s": ("goodput_per_s",),
    "goodput_tokens_per_s": ("goodput_tokens_per_s",),
}
SOURCES = ("live", "simulated")
TIMED = ("ttft_mean", "ttft_p50", "ttft_p90", "tpot_mean", "tpot_p50", "tpot_p90", "tokens_per_s")
TIMELINE = ["begin", "end", "stage", "lanes", "request", "kind", "first", "tokens"]


def sweep(points: Sequence[Point], out: str | Path, **how: Any) -> pd.DataFrame:
    """Runs points, but those that are in the file `out`, and returns all of them as `frame` does.
    how: fields of `Runner`. Errors: ConfigError."""
    return frame(runner.sweep(points, Runner(**how), Path(out)))


def frame(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """A row per point and source of figures (live, simulated): settings, load, `devices` of the
    mesh, and FIGURES in seconds, tokens/s and shares. A point without figures has one row, with
    its `reason`."""
    return pd.DataFrame([flat for row in rows for flat in _flat(row)])


def _flat(row: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    settings = dict(row["settings"])
    mesh = MeshConfig.parse(settings.get("mesh", ""))
    said = {
        "key": row["key"],
        **settings,
        **row["load"],
        "mesh": str(mesh),
        "devices": mesh.devices,
        "gpu": row["gpu"],
        "reason": row["reason"],
    }
    table = [source for source in SOURCES if row[source]]
    for source in table:
        figures = {name: _at(row[source], path) for name, path in FIGURES.items()}
        yield {**said, "source": source, **figures}
    if not table:
        yield {**said, "source": ""}


def _at(figures: Any, path: Sequence[str]) -> float | None:
    for name in path:
        if name not in figures:
            return None
        figures = figures[name]
    return figures


def with_speed(table: pd.DataFrame) -> pd.DataFrame:
    """Adds `speed`: tokens per second and device."""
    return table.assign(speed=table["tokens_per_s"] / table["devices"])


def short(mesh: str) -> str:
    """A mesh without the axes that have one device."""
    axes = [axis for axis in str(mesh).split(",") if not axis.endswith("=1")]
    return ",".join(axes) or "one device"


def pareto(table: pd.DataFrame, lower: str, higher: str) -> pd.DataFrame:
    """The rows that no other beats in both columns, by the one of which less is better."""
    finite = table.dropna(subset=[lower, higher])
    ordered = finite.sort_values([lower, higher], ascending=[True, False])
    best = ordered[higher].cummax().shift(fill_value=float("-inf"))
    return ordered[ordered[higher] > best]


def compared(table: pd.DataFrame) -> pd.DataFrame:
    """Points that have figures of both sources, a row each: their settings, NAME_live,
    NAME_simulated and NAME_ratio (simulated / live) for each of TIMED."""
    live, simulated = (table[table["source"] == each].set_index("key") for each in SOURCES)
    columns = [name for name in table.columns if name not in (*FIGURES, "key", "source", "reason")]
    table = live[[*columns, *TIMED]].join(
        simulated[[*TIMED]], lsuffix="_live", rsuffix="_simulated", how="inner"
    )
    for name in TIMED:
        table[f"{name}_ratio"] = table[f"{name}_simulated"] / table[f"{name}_live"]
    return table.reset_index(drop=True)


def varied(table: pd.DataFrame) -> list[str]:
    """The columns of settings and load in which points differ."""
    fixed = (*FIGURES, "key", "source", "reason")
    texts = table.astype(str)
    return [name for name in table.columns if name not in fixed and texts[name].nunique() > 1]


def records(outcome: Outcome) -> pd.DataFrame:
    """A row per request of a run: the fields of `RequestRecord`, `ttft` and `tpot` in seconds,
    `late`, whether the first token came after it was due, and `in_time`, whether all objectives
    were kept."""
    rows = [
        {
            **dataclasses.asdict(record),
            "ttft": record.ttft,
            "tpot": record.tpot,
            "late": record.first > record.due,
            "in_time": record.in_time,
        }
        for record in outcome.records
    ]
    return pd.DataFrame(rows)


def timeline(replica: Replica, requests: Collection[str] | None = None) -> pd.DataFrame:
    """Lists what ran lately on a replica, by its journal: a row per stage and chunk of a step, with
    `begin` and `end` (seconds since the first), `stage`, `lanes`, `request`, `kind` (prefill or
    decode), `first` (token) and `tokens`. requests: ids of those that are wanted; default: all."""
    rows: list[tuple[Any, ...]] = []
    since = 0
    more = True
    while more:
        view = replica.view(since)
        for step in view["steps"]:
            rows.extend(_chunks(step, view["names"]))
        since, more = view["next"], view["more"]
    table = pd.DataFrame(rows, columns=TIMELINE)
    if requests is not None:
        table = table[table["request"].isin(requests)]
    first = table["begin"].min()
    return table.assign(begin=table["begin"] - first, end=table["end"] - first)


def _chunks(step: Mapping[str, Any], names: Mapping[int, Any]) -> Iterable[tuple[Any, ...]]:
    for number, lanes, first, tokens, decodes in step["chunks"]:
        request = names.get(number, ("", 0))[0]
        kind = "decode" if decodes else "prefill"
        for stage, (begin, end) in enumerate(step["spans"]):
            yield begin, end, stage, tuple(lanes), request, kind, first, tokens
