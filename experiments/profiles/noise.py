"""Fits the spread of step times around their prediction, which simulations draw with `--noise`
(`jaxserve/lab/simulate/noise.py`), to public measurements.

    python -m experiments.profiles.noise --data=DIR

Two spreads, each a standard deviation of logarithms. Served: measured over predicted time per
output token of one model, engine and number of ranks on H100 (aiconfigurator), without what they
have in common, which the online correction learns. It is mostly what the model of costs lacks.
Repeated: of the kernels of a layer when the same is run 20 times (Vidur), as if all of a step were
slow at the same time. It is what no model can know.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.papers import data_folder
from experiments.profiles import served, vidur
from experiments.script import command_line
from jaxserve.cli.display import table
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError

LAYERS = (
    "a100__Meta-Llama-3-8B__mlp",
    "a100__Meta-Llama-3-70B__mlp",
    "h100__Llama-2-7b-hf__mlp",
    "h100__Llama-2-70b-hf__mlp",
)
OPTIONS = {"fit": [Option("data", str, None, "folder of measurements; default: as of figures")]}


def pooled(groups: Sequence[Sequence[float]]) -> float:
    """Standard deviation within groups, each around its own mean."""
    found = [np.asarray(group) for group in groups]
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in found)
    return float(np.sqrt(squares / sum(len(group) - 1 for group in found)))


def served_groups(data: Path) -> Mapping[str, list[float]]:
    """Logarithms of measured over predicted seconds of a served token, by device, model, engine
    and ranks."""
    groups: dict[str, list[float]] = {}
    for point in served.compared(data):
        name = " ".join(map(str, point["key"]))
        groups.setdefault(name, []).append(float(np.log(point["measured"] / point["predicted"])))
    return groups


def repeated(data: Path, name: str) -> np.ndarray:
    """Standard deviation over mean of a layer's kernels, by row of a table of Vidur's."""
    rows = vidur.timings(data, name)
    return rows["std"] / rows["mean"]


def lines(data: Path) -> Iterator[list[str]]:
    """Rows of the printed table: what was measured, points, sigma."""
    groups = served_groups(data)
    for name, group in groups.items():
        yield [f"served {name}", str(len(group)), f"{pooled([group]):.3f}"]
    total = sum(map(len, groups.values()))
    yield ["served, pooled", str(total), f"{pooled(list(groups.values())):.3f}"]
    spreads = {name: repeated(data, name) for name in LAYERS}
    for name, spread in spreads.items():
        yield [f"repeated {name}", str(len(spread)), f"{_rms(spread):.3f}"]
    every = np.concatenate(list(spreads.values()))
    yield ["repeated, pooled", str(len(every)), f"{_rms(every):.3f}"]


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt((values**2).mean()))


def run(values: dict[str, Any]) -> int:
    data = data_folder(values["data"])
    if data is None:
        raise ConfigError("data", "names no folder of measurements")
    print(table(["spread of times", "points", "sigma"], list(lines(data))))
    return 0


COMMAND = Command(OPTIONS, run, __doc__.partition("\n\n")[2])

if __name__ == "__main__":
    summary = "the spread of step times around their prediction"
    sys.exit(command_line("noise", summary, COMMAND, sys.argv[1:], FileNotFoundError))
