"""Prints how well two limits of a time go together by the power of their norm, from their sum (1)
to the greater of both (inf).

python -m experiments.profiles.exponents --data=../shared/data

Linear parts: reading weights and using them. Chunks after a prefix: pairs of query and key, and
reading KV. Each is fitted to a part of what was measured; the errors are of the rest.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.profiles import llmservingsim, parts, vidur
from experiments.profiles.least_squares import (
    Form,
    fit_form,
    fit_total,
    mape,
    norm,
    smooth_max_form,
)
from experiments.script import command_line
from jaxserve.costs.coefficients import LINEAR_POWER
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError

POWERS = sorted({1.0, 1.5, 2.0, 3.0, 4.0, math.inf, LINEAR_POWER})
FOLDS = 3
SPLITS = 2  # ways to split the points into folds
POINTS = 400  # of chunks, at most
DEGREES = (1, 2, 8)
OPTIONS = {
    "files": [Option("data", str, None, "folder of the measurements; default: JAXSERVE_DATA")]
}


def errors(form: Form, x: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Returns the mean relative error of the points left out, by power.

    form: takes `power` by its name. Each fit starts from that of the power before: where only the
    greater of both counts, a start may lie where one of them never does.
    """
    found: list[list[float]] = [[] for _ in POWERS]
    for split in range(SPLITS):
        fold = np.random.default_rng(split).permutation(len(seconds)) % FOLDS
        for out in range(FOLDS):
            fitted = fold != out
            c = fit_total(x[fitted], seconds[fitted])
            for power, each in zip(POWERS, found):
                with_power = functools.partial(form, power=power)
                c = fit_form(with_power, x[fitted], seconds[fitted], c)
                each.append(mape(with_power(c, x[~fitted]), seconds[~fitted]))
    return [float(np.mean(each)) for each in found]


def chunk_form(c: np.ndarray, x: np.ndarray, power: float) -> np.ndarray:
    """Attention of chunks; x: as `chunk_inputs`."""
    return x[:, :2] @ c[:2] + norm(x[:, 2] * c[2], x[:, 3] * c[3], power)


def chunk_inputs(cached: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Returns [points, 4]: one, new tokens, pairs of query and key, tokens that are read."""
    return np.stack([np.ones_like(new), new, (cached + new / 2) * new, cached + new], 1)


def compared(data: Path) -> Iterator[tuple[str, Sequence[float]]]:
    """Yields what was fitted and its errors by power."""
    for device in parts.ENGINES:
        layers = [parts.linear(data, device, model, tp) for model in parts.LLAMA for tp in DEGREES]
        found = [errors(smooth_max_form, layer.x, layer.seconds) for layer in layers]
        yield f"linear parts, {device}", np.mean(found, axis=0)
    for source, (cached, new, seconds) in (
        ("chunks, Vidur's A100", vidur.chunks(data)),
        ("chunks, LLMServingSim's H100", llmservingsim.chunks(data)),
    ):
        some = np.random.default_rng(0).permutation(len(seconds))[:POINTS]
        yield source, errors(chunk_form, chunk_inputs(cached[some], new[some]), seconds[some])


def run(values: dict[str, Any]) -> int:
    folder = values["data"] or os.environ.get("JAXSERVE_DATA")
    if not folder:
        raise ConfigError("data", "give the folder of the measurements, or set JAXSERVE_DATA")
    print("mean relative error in percent of points held out, by power of the norm")
    print(" " * 30 + "".join(f"{power:8.1f}" for power in POWERS))
    for name, found in compared(Path(folder).expanduser()):
        print(f"{name:30s}" + "".join(f"{100 * error:8.2f}" for error in found), flush=True)
    return 0


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])


if __name__ == "__main__":
    sys.exit(
        command_line(
            "exponents", "how limits go together", COMMAND, sys.argv[1:], FileNotFoundError
        )
    )
