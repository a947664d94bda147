"""All figures of Medha's evaluation, and summary.md.

    python -m experiments.medha --out=DIR
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

from experiments.medha import summary
from experiments.medha.figure import OPTIONS, Figure, make, settings_of
from experiments.script import command_line
from jaxserve.config import ConfigError
from jaxserve.flags import Command
from jaxserve.options import Option

NUMBERS = ("1", "5b", "6", "8", "9", "10", "11", "13", "15", "16", "17", "18", "19", "20", "21", "22", "23")
CHOICE = Option("figures", str, ",".join(NUMBERS), "which, as N,N; the summary has all whose CSV is in the folder")


def figures(numbers: str = ",".join(NUMBERS)) -> list[Figure]:
    """Errors: ConfigError for a figure that there is not."""
    wanted = [number for number in numbers.replace(" ", "").split(",") if number]
    if unknown := [number for number in wanted if number not in NUMBERS]:
        raise ConfigError("figures", f"{', '.join(unknown)}: known are {', '.join(NUMBERS)}")
    return [importlib.import_module(f"experiments.medha.fig{number}").FIGURE for number in wanted]


def run(values: dict[str, Any]) -> int:
    out, settings = Path(values["out"]), settings_of(values)
    for figure in figures(values["figures"]):
        began = time.monotonic()
        print(make(figure, settings, out), end="\n\n", flush=True)
        print(f"{figure.name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    (out / "summary.md").write_text(summary.text(figures(), out))
    return 0


COMMAND = Command({"what is made": [*OPTIONS, CHOICE]}, run, __doc__.partition("\n")[2])

if __name__ == "__main__":
    sys.exit(command_line("medha", "all figures of Medha's evaluation", COMMAND, sys.argv[1:]))
