"""Executes the research notebooks, each in a process of its own.

python -m experiments.notebooks                                          # whether all of them run
python -m experiments.notebooks --only=sweep,slack --pictures=docs/images/notebooks
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.notebooks.sizes import SMALL
from experiments.script import command_line
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError

INSTALL = "pip install -e '.[research]'"

OPTIONS = {
    "notebooks": [
        Option("only", str, None, "which, as NAME,NAME; default: all"),
        Option(
            "size",
            str,
            "full",
            "full: as they are written; small: as tests run them",
            choices=("full", "small"),
        ),
        Option("pictures", str, None, "folder for their pictures"),
        Option("executed", str, None, "folder for the notebooks with their outputs"),
    ]
}


def run(values: dict[str, Any]) -> int:
    try:
        import nbformat

        from experiments.notebooks import execute as notebooks
    except ModuleNotFoundError as error:
        raise ConfigError("notebooks", f"needs {error.name}: {INSTALL}") from None
    chosen = notebooks.names() if values["only"] is None else values["only"].split(",")
    sizes = SMALL if values["size"] == "small" else {}
    read = {
        name: notebooks.with_values(notebooks.read(name), sizes.get(name, {})) for name in chosen
    }
    failed = 0
    for name, notebook in read.items():
        began, worked = time.monotonic(), _cpu_seconds()
        try:
            notebooks.execute(notebook)
        except notebooks.FAILURES as error:
            failed += 1
            print(error, file=sys.stderr)
        took, cpu = time.monotonic() - began, _cpu_seconds() - worked
        print(f"{name}: {took:.0f} s, {cpu:.0f} s of CPU", flush=True)
        if values["pictures"]:
            for file, data in notebooks.pictures(name, notebook):
                _folder(values["pictures"]).joinpath(file).write_bytes(data)
        if values["executed"]:
            nbformat.write(notebook, _folder(values["executed"]) / f"{name}.ipynb")
    return 1 if failed else 0


def _cpu_seconds() -> float:
    """Sums processor time of ended processes, which a busy machine does not lengthen."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _folder(name: str) -> Path:
    folder = Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])


def main(arguments: Sequence[str]) -> int:
    return command_line("notebooks", "executes the research notebooks", COMMAND, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
