"""Work for the runner of experiments, in a module that other processes import in no time."""

from __future__ import annotations

import functools
from pathlib import Path

from experiments.runner import Task
from jaxserve.settings.schema import ConfigError


def task(name: str, folder: Path, said: str = "made it", **rest: str) -> Task:
    """A task that says this, fails or is refused."""
    return Task(name, functools.partial(work, name, folder, said), **rest)


def work(name: str, folder: Path, said: str) -> str:
    """Leaves a file for each time it is called."""
    number = len(list(folder.glob(f"{name}-*")))
    (folder / f"{name}-{number}").touch()
    if said == "fails":
        raise RuntimeError(f"{name} is broken")
    if said == "refused":
        raise ConfigError("out", "cannot be used")
    return said
