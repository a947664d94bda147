"""Tables and a picture of the runs of `jaxserve bench serve`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.cli.display import table
from jaxserve.cli.files import figure_class
from jaxserve.lab.quotients import cell
from jaxserve.lab.research.generator import OK, Sent
from jaxserve.lab.research.load import Load
from jaxserve.lab.research.served_figures import CONFIDENCE, intervals

TIMES = ("ttft", "tpot", "itl", "e2e")
DRAWN = ("ttft", "tpot", "e2e")
SHOWN = {  # figures whose intervals are shown: factor
    **{f"{name}.{point}": 1e3 for name in TIMES for point in ("p50", "p90", "p99")},
    **dict.fromkeys(("output_tokens_per_s", "requests_per_s"), 1.0),
    **{"goodput_share": 100.0, "goodput_per_s": 1.0, "goodput_tokens_per_s": 1.0},
    "prefix_hit_rate": 100.0,
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One load, once, and what came of it."""

    load: Load
    repeat: int
    sent: list[Sent]
    figures: dict[str, Any]

    @property
    def name(self) -> str:
        if self.load.concurrency is not None:
            return f"{self.load.concurrency} at once"
        if self.load.qps is None:
            return "trace"
        return f"{self.load.qps:g}/s"


def report(runs: Sequence[Run]) -> str:
    """The tables of all runs."""
    all_figures = [run.figures for run in runs]
    extra: dict[str, Any] = {}
    if any(each["goodput_share"] is not None for each in all_figures):
        extra["in time %"] = lambda each: cell(each["goodput_share"], ".1f", 100)
        extra["goodput/s"] = lambda each: cell(each["goodput_per_s"], ".2f")
        extra["goodput tok/s"] = lambda each: cell(each["goodput_tokens_per_s"], ".1f")
    if any(each["prefix_hit_rate"] is not None for each in all_figures):
        extra["hits %"] = lambda each: cell(each["prefix_hit_rate"], ".1%").removesuffix("%")
    headers = ["load", "run", "done", "refused", "failed"]
    headers += ["TTFT ms", "TPOT ms (of)", "ITL ms (of)", "E2E ms", "late ms p99"]
    headers += ["out tok/s", "all tok/s", "req/s", *extra]
    rows = [
        [run.name, str(run.repeat + 1), *_cells(run.figures)]
        + [show(run.figures) for show in extra.values()]
        for run in runs
    ]
    note = (
        "Milliseconds are p50/p90/p99 over the requests that are done, from the planned moment of "
        "sending.\nTPOT is over answers of two tokens or more, ITL over all gaps between events of "
        "a stream; late is how\nmuch later than planned the generator sent."
    )
    reasons = [
        f"{run.name}, run {run.repeat + 1}: {count} {kind}: {reason}"
        for run in runs
        for kind in ("refused", "failed")
        for reason, count in run.figures[kind].items()
    ]
    repeated = [_interval_table(runs)] if any(run.repeat for run in runs) else []
    return "\n\n".join(
        [table(headers, rows), *(["\n".join(reasons)] * bool(reasons)), note, *repeated]
    )


def _cells(figures: Mapping[str, Any]) -> list[str]:
    def points(name: str) -> str:
        spread = figures[name]
        if not spread["count"]:
            return "-"
        return "/".join(f"{spread[point] * 1e3:.1f}" for point in ("p50", "p90", "p99"))

    return [
        str(figures["done"]),
        str(sum(figures["refused"].values())),
        str(sum(figures["failed"].values())),
        points("ttft"),
        f"{points('tpot')} ({figures['tpot']['count']})",
        f"{points('itl')} ({figures['itl']['count']})",
        points("e2e"),
        f"{figures['lag']['p99'] * 1e3:.1f}",
        f"{figures['output_tokens_per_s']:.1f}",
        f"{figures['total_tokens_per_s']:.1f}",
        f"{figures['requests_per_s']:.2f}",
    ]


def _interval_table(runs: Sequence[Run]) -> str:
    """Mean and t-interval of each figure over the repeats of each load."""
    names = list(dict.fromkeys(run.name for run in runs))
    by_name = [intervals([run.figures for run in runs if run.name == name]) for name in names]
    rows = [
        [_label(path), *(_interval(each.get(path), factor) for each in by_name)]
        for path, factor in SHOWN.items()
        if any(path in each for each in by_name)
    ]
    head = f"Mean of the runs, and Student's t-interval at {CONFIDENCE:.0%}:"
    return f"{head}\n\n{table(['', *names], rows)}"


def _label(path: str) -> str:
    if "." in path:
        name, point = path.split(".")
        return f"{name.upper()} {point} ms"
    return {"prefix_hit_rate": "prefix hits %"}.get(path, path.replace("_per_s", "/s"))


def _interval(mean: tuple[float, float] | None, factor: float) -> str:
    if mean is None:
        return "-"
    return f"{mean[0] * factor:.2f} ± {mean[1] * factor:.2f}"


def plot(runs: Sequence[Run], file: str) -> None:
    """Draws the share of requests by latency, a curve for each run."""
    figure = figure_class()(figsize=(12, 3.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, 3), DRAWN):
        for run in runs:
            times = sorted(getattr(each, name) * 1e3 for each in run.sent if each.status == OK)
            shares = [(place + 1) / len(times) for place in range(len(times))]
            axes.step(times, shares, where="post", label=f"{run.name}, run {run.repeat + 1}")
        axes.set(xlabel=f"{name.upper()}, ms", ylabel="share of requests", ylim=(0, 1))
    axes.legend(fontsize=7)
    figure.savefig(file)
