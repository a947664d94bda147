"""A sweep as one HTML page that needs nothing else: what it was run on, pictures, every point.

Each picture is a function that draws on a figure what applies to the points, or says that it does
not; PICTURES has them in the page's order.
"""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from jaxserve.lab.research import plots
from jaxserve.lab.research.frames import SOURCES, compared, frame, short, varied, with_speed

MAX_SERIES = 12  # lines of a picture; more look alike
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto}"
    "td,th{padding:2px 8px;text-align:right;border-bottom:1px solid #ddd;white-space:nowrap}"
    "svg{max-width:100%;height:auto}"
)
NOT_SHOWN = ("workload", "seed", "requests", "gpu")  # of a series' name, unless they vary
Series = Iterator[tuple[str, str, pd.DataFrame]]  # name, source, points


def page(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    """The page of a sweep's lines."""
    table = frame(rows)
    parts = [f"<h1>{html.escape(title)}</h1>", _head(rows)]
    if "ttft_p50" in table:
        for name, draw in PICTURES.items():
            drawn = _svg(draw, table)
            if drawn:
                parts.append(f"<h2>{html.escape(name)}</h2>{drawn}")
        both = compared(table)
        if len(both):
            parts.append(f"<h2>Predicted beside measured</h2>{_errors(both)}")
    parts.append(f"<h2>All points</h2>{_table(table)}")
    return (
        f"<!doctype html><meta charset='utf-8'><title>{html.escape(title)}</title>"
        f"<style>{STYLE}</style>{''.join(parts)}\n"
    )


def _head(rows: Sequence[Mapping[str, Any]]) -> str:
    machines = {str(sorted(row["machine"].items())): row["machine"] for row in rows}
    lines = [
        "; ".join(f"{name} {value}" for name, value in each.items()) for each in machines.values()
    ]
    count = sum(bool(row["reason"]) for row in rows)
    head = f"{len(rows)} points, {count} of them without figures. Run on:"
    return f"<p>{head}</p>" + "".join(f"<p><code>{html.escape(line)}</code></p>" for line in lines)


def _errors(both: pd.DataFrame) -> str:
    """The spread of simulated / live over all points."""
    ratios = both[[name for name in both.columns if name.endswith("_ratio")]]
    shown = ratios.describe(percentiles=[0.1, 0.5, 0.9]).T
    shown["mean error"] = (ratios - 1).abs().mean()
    columns = ["count", "10%", "50%", "90%", "mean error"]
    return "<p>simulated / live:</p>" + shown[columns].round(3).to_html(border=0)


def _table(table: pd.DataFrame) -> str:
    fixed = set(NOT_SHOWN).difference(varied(table))
    shown = table.drop(columns=["key", *fixed])
    return shown.to_html(border=0, index=False, na_rep="", float_format=lambda x: f"{x:.4g}")


# --- pictures


def _svg(draw: Callable[[Any, pd.DataFrame], bool], table: pd.DataFrame) -> str:
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    if not draw(figure, table):
        return ""
    out = io.StringIO()
    figure.savefig(out, format="svg")
    drawn = out.getvalue()
    return drawn[drawn.index("<svg") :]


def series(table: pd.DataFrame, but: Sequence[str]) -> Series:
    """Points that differ in nothing but these columns, for each source of figures."""
    by = [name for name in varied(table) if name not in (*but, "devices")]
    names = [
        " ".join(short(row[name]) if name == "mesh" else f"{name}={row[name]}" for name in by)
        for _, row in table.iterrows()
    ]
    named = table.assign(series=names)
    for name in named["series"].unique()[:MAX_SERIES]:
        for source in SOURCES:
            points = named[(named["series"] == name) & (named["source"] == source)]
            if len(points):
                yield name, source, points


def _lines(axes: Any, table: pd.DataFrame, but: Sequence[str], x: str, y: str) -> None:
    colors: dict[str, str] = {}
    for name, source, points in series(table, but):
        color = colors.setdefault(name, f"C{len(colors)}")
        label = f"{name} {source}".strip()
        style = {"live": "-o"}.get(source, "--x")
        ordered = points.sort_values(x)
        axes.plot(ordered[x], ordered[y], style, color=color, label=label)


def load(figure: Any, table: pd.DataFrame) -> bool:
    """TTFT and TPOT against load."""
    table = table[table["source"] != ""]
    x = next((name for name in ("qps", "concurrency") if table[name].nunique() > 1), "")
    if not x:
        return False
    left, right = figure.subplots(1, 2)
    for axes, name in ((left, "ttft_p50"), (right, "tpot_p50")):
        _lines(axes, table, [x], x, name)
        axes.set(xlabel=x, ylabel=f"{name[:4].upper()} p50, s", yscale="log")
    _legend(figure, left)
    return True


def front(figure: Any, table: pd.DataFrame) -> bool:
    """Tokens per second and device against TTFT and TPOT, with the points that none beats."""
    panels = figure.subplots(1, 2)
    for axes, name in zip(panels, ("ttft_p90", "tpot_p90")):
        axes.set(xlabel=f"{name[:4].upper()} p90, s", ylabel="tokens/s and device", xscale="log")
        for number, source in enumerate(SOURCES):
            points = table[(table["source"] == source) & (table["finished"] > 0)]
            plots.front(axes, with_speed(points), name, "speed", source, f"C{number}")
    panels[0].legend(fontsize=7)
    return len(table[table["source"] != ""]) > 1


def scaling(figure: Any, table: pd.DataFrame) -> bool:
    """TTFT and tokens/s against devices, beside those of perfect scaling: strong where prompts are
    equal, weak where they are as many times longer as there are devices."""
    table = table[table["source"] != ""]
    if table["devices"].nunique() < 2:
        return False
    weak = is_weak(table)
    left, right = figure.subplots(1, 2)
    but, perfect = ["mesh"], -1  # TTFT of perfect scaling falls with the devices, or is constant
    if weak:
        but, perfect = ["mesh", "prompt"], 0
    for axes, name, power in (
        (left, "ttft_p50", perfect),
        (right, "tokens_per_s", 1),
    ):
        _lines(axes, table, but, "devices", name)
        count = sorted(table["devices"].unique())
        first = table[table["devices"] == count[0]][name].median()
        ideal = [first * (each / count[0]) ** power for each in count]
        axes.plot(count, ideal, ":", color="gray", label="perfect scaling")
        axes.set(xlabel="devices", ylabel=name, xscale="log", yscale="log", xticks=count)
        axes.set_xticklabels(map(str, count))
    _legend(figure, left)
    return True


def is_weak(table: pd.DataFrame) -> bool:
    """Returns true if prompts grow with the devices."""
    prompts = pd.to_numeric(table["prompt"], errors="coerce")
    each = prompts / table["devices"]
    return prompts.nunique() > 1 and each.nunique() == 1


def _legend(figure: Any, axes: Any) -> None:
    figure.legend(
        *axes.get_legend_handles_labels(), fontsize=7, loc="outside lower center", ncols=3
    )


def predicted(figure: Any, table: pd.DataFrame) -> bool:
    """Simulated against live figures of each point."""
    both = compared(table)
    if both.empty:
        return False
    for axes, name in zip(figure.subplots(1, 2), ("ttft_mean", "tpot_mean")):
        x, y = both[f"{name}_live"], both[f"{name}_simulated"]
        axes.loglog(x, y, "o", alpha=0.6)
        ends = [min(x.min(), y.min()), max(x.max(), y.max())]
        axes.loglog(ends, ends, ":", color="gray")
        axes.set(xlabel=f"{name} live, s", ylabel=f"{name} simulated, s")
    return True


PICTURES: Mapping[str, Callable[[Any, pd.DataFrame], bool]] = {
    "Latency against load": load,
    "Speed against latency": front,
    "Scaling over devices": scaling,
    "Predicted against measured": predicted,
}
