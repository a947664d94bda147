"""Makes many things that take minutes each: in several processes, and only those that are not made
yet."""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from jaxserve.settings.schema import ConfigError


@dataclass(frozen=True)
class Task:
    """Something to make. make: does it, and returns what to print; other processes must be able to
    import it. group: tasks of one are made one after the other in the same process, for they share
    what they compute. stamp: of what it is made; one that was made of the same is kept."""

    name: str
    make: Callable[[], str]
    group: str = ""
    stamp: str = ""


@dataclass(frozen=True)
class Done:
    """Result of a task. state: 'made', 'kept' or 'failed'. seconds: that making it took."""

    name: str
    state: str
    seconds: float


def run(tasks: Sequence[Task], jobs: int = 1, stamps: Path | None = None) -> list[Done]:
    """Makes the tasks, in `jobs` processes, and prints what each returns when it ends; returns what
    came of each, in their order. A failure ends one task alone. stamps: the folder that keeps what
    was made of what; None to make everything. Errors: ConfigError, which all would have."""
    groups: dict[str, list[Task]] = {}
    for task in tasks:
        groups.setdefault(task.group or task.name, []).append(task)
    found: list[Done] = []
    if jobs == 1:
        for group in groups.values():
            found += _in_turn(group, stamps)
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, mp_context=context) as processes:
            futures = [processes.submit(_in_turn, group, stamps) for group in groups.values()]
            try:
                for future in as_completed(futures):
                    found += future.result()
            except BaseException:
                processes.shutdown(wait=False, cancel_futures=True)
                raise
    order = {task.name: place for place, task in enumerate(tasks)}
    return sorted(found, key=lambda done: order[done.name])


def _in_turn(tasks: Sequence[Task], stamps: Path | None) -> list[Done]:
    return [_done(task, stamps) for task in tasks]


def _done(task: Task, stamps: Path | None) -> Done:
    file = stamps / f"{task.name.replace(' ', '-')}.json" if stamps and task.stamp else None
    if file and (seconds := _seconds(file, task.stamp)) is not None:
        return Done(task.name, "kept", seconds)
    began = time.monotonic()
    try:
        said = task.make()
    except ConfigError:
        raise
    except Exception:
        print(f"{task.name} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        return Done(task.name, "failed", time.monotonic() - began)
    seconds = time.monotonic() - began
    print(said, end="\n\n", flush=True)
    print(f"{task.name}: {seconds:.0f} s", file=sys.stderr, flush=True)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"stamp": task.stamp, "seconds": round(seconds, 1)}) + "\n")
    return Done(task.name, "made", seconds)


def _seconds(file: Path, stamp: str) -> float | None:
    """Returns how long it took to make what is kept; None if it has another stamp."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return found["seconds"] if found.get("stamp") == stamp else None
