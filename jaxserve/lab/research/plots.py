"""Draws frames on axes of matplotlib: fronts of sweeps, timelines of replicas and plans, regions of
choices. Reports and notebooks share these; axes are the caller's, with their labels and scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from jaxserve.lab.research.frames import pareto, short

BAR = 0.9  # height of a row of a timeline, of 1
EDGED = 400  # bars from which on edges would hide them
NAME_SIZE = (60, 9)  # points, width and height of a mesh's name


def front(
    axes: Any, table: pd.DataFrame, lower: str, higher: str, label: str, color: str
) -> pd.DataFrame:
    """Draws points by two columns, and those of them that none beats as a line on which meshes are
    named where they begin, as far as there is room; returns these. lower: the column of which less
    is better. Scales of the axes must be set before: places of names depend on them."""
    best = pareto(table, lower, higher)
    axes.plot(table[lower], table[higher], ".", color=color, alpha=0.5, label=label)
    axes.plot(best[lower], best[higher], "-", color=color, drawstyle="steps-post")
    name_meshes(axes, best[best["mesh"] != best["mesh"].shift()], lower, higher, color)
    return best


def name_meshes(axes: Any, table: pd.DataFrame, x: str, y: str, color: str) -> None:
    """Writes the mesh of each point to the upper left of it, where a front has no points; not where
    another one's name would be hidden."""
    axes.autoscale_view()
    named: list[np.ndarray] = []
    for _, row in table.iterrows():
        point = axes.transData.transform((row[x], row[y])) * 72 / axes.figure.dpi
        if all((abs(point - other) >= NAME_SIZE).any() for other in named):
            named.append(point)
            axes.annotate(
                short(row["mesh"]),
                (row[x], row[y]),
                xytext=(-3, 2),
                textcoords="offset points",
                ha="right",
                fontsize=7,
                color=color,
            )


def plain(axes: Any, *names: str) -> None:
    """Numbers logarithmic axes, 'x' or 'y', as people write them: 0.2, 0.5, 1, 2, 5."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for name in names:
        axes.set(**{f"{name}scale": "log"})
        axis = getattr(axes, f"{name}axis")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())


def timeline(
    axes: Any, table: pd.DataFrame, by: str, colors: Mapping[str, str]
) -> list[tuple[int, int]]:
    """Draws a frame like that of `frames.timeline`: a row per stage and lane, a bar per step, which
    the chunks of the step share by their tokens there. by: the column that colours go by. Returns
    the (stage, lane) of each row, from the top."""
    bars = table.assign(
        lane=table["lanes"].map(list), tokens=table["tokens"] / table["lanes"].map(len)
    )
    bars = bars.explode("lane").sort_values(by, kind="stable")
    step = bars.groupby(["stage", "lane", "begin", "end"])["tokens"]
    bars["height"] = BAR * bars["tokens"] / step.transform("sum")
    bars["under"] = BAR * (step.cumsum() - bars["tokens"]) / step.transform("sum")
    rows = sorted(set(zip(bars["stage"], bars["lane"])))
    place = {row: -number for number, row in enumerate(rows)}
    bottom = [place[row] for row in zip(bars["stage"], bars["lane"])] + bars["under"]
    edge = 0.5 if len(bars) < EDGED else 0.0
    for name, color in colors.items():
        chosen = bars[by] == name
        _rectangles(axes, bars[chosen], bottom[chosen], color, name, edge)
    several = len({stage for stage, _ in rows}) > 1
    labels = [f"stage {stage} lane {lane}" if several else f"lane {lane}" for stage, lane in rows]
    axes.set_yticks([place[row] + BAR / 2 for row in rows], labels, fontsize=8)
    axes.set(
        xlim=(bars["begin"].min(), bars["end"].max()), ylim=(1 - len(rows) - 0.1, 1.1), xlabel="s"
    )
    return rows


def _rectangles(
    axes: Any, bars: pd.DataFrame, bottom: pd.Series, color: str, label: str, edge: float
) -> None:
    """One collection for all bars: steps are thousands."""
    from matplotlib.collections import PolyCollection

    top = bottom + bars["height"]
    begin, right = bars["begin"], bars["end"]
    corners = ((begin, bottom), (begin, top), (right, top), (right, bottom))
    shapes = np.stack([np.column_stack(corner) for corner in corners], axis=1).astype(float)
    axes.add_collection(
        PolyCollection(
            list(shapes), facecolor=color, edgecolor="white", linewidth=edge, label=label
        )
    )


def regions(
    axes: Any, found: pd.DataFrame, x: str, y: str, value: str, values: Sequence[Any]
) -> None:
    """Draws which of `values` a column has over a grid of two others, a colour for each. Those that
    nowhere occur are in the legend too, so that neighbouring pictures have equal colours."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    numbers = found.assign(number=found[value].map({each: n for n, each in enumerate(values)}))
    table = numbers.pivot(index=y, columns=x, values="number")
    colors = [f"C{number}" for number in range(len(values))]
    axes.pcolormesh(
        table.columns,
        table.index,
        table,
        shading="nearest",
        cmap=ListedColormap(colors),
        vmin=-0.5,
        vmax=len(values) - 0.5,
        alpha=0.75,
    )
    axes.legend(
        handles=[Patch(color=color, alpha=0.75, label=str(v)) for color, v in zip(colors, values)],
        fontsize=7,
        loc="upper right",
        framealpha=0.9,
    )
