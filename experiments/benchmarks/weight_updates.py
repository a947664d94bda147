"""Seconds that other weights, sleep and waking take on a running engine, idle and under load.

    python -m experiments.benchmarks.weight_updates --json=weight_updates.json

Under load, requests are sent all the time; every greedy answer is compared with those of the
version of weights that it names.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.benchmarks.sharing import WAIT, TimedSink, send_random
from experiments.script import command_line, exit_code, keep
from jaxserve.api.events import Event, Finished
from jaxserve.cli.display import table
from jaxserve.observe.machine import described, machine
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import (
    CacheConfig,
    EngineConfig,
    MeshConfig,
    ModelSource,
    SchedulerConfig,
)

OPTIONS = {
    "updates": [
        Option("model", str, "smollm2-135m", "model: a fetched name, a folder or a .gguf file"),
        Option("mesh", str, "", "mesh of the engine"),
        Option("rounds", int, 5, "times that each is measured", 1),
        Option("requests", int, 4, "requests under way at once, under load", 1),
        Option("tokens", int, 32, "tokens of a prompt, and of an answer", 1),
        Option("folder", str, None, "where weights are written; /dev/shm where there is one"),
        Option("json", str, None, "file for all figures"),
    ]
}
PROMPTS = 8  # different ones


class VersionedSink(TimedSink):
    """A request's tokens, and the version of the weights that it names."""

    version = ""
    reason = ""

    def __call__(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Finished):
                self.version = event.weight_version
                self.reason = event.reason
        super().__call__(events)


class UpdateBench:
    """An engine that runs, and folders with two versions of its weights, used by turns."""

    def __init__(self, values: dict[str, Any], folders: tuple[Path, Path]):
        from jaxserve.engine.build import build

        self.values = values
        self.folders = folders
        self.arrays = [_arrays(folder) for folder in folders]
        length = 2 * values["tokens"] + 16
        config = EngineConfig(
            ModelSource(str(folders[0]), max_model_len=length, dtype="float32"),
            MeshConfig.parse(values["mesh"]),
            CacheConfig(block_size=16, pages=32 * values["requests"]),
            SchedulerConfig(max_seqs=values["requests"], chunk_tokens=128),
        )
        self.engine = build(config, progress=sys.stderr.isatty())
        self.engine.start()
        self.of_version = {"1": 0}  # which of the two
        self.used = 0
        self._serials = itertools.count()

    def send(self, prompt: int) -> VersionedSink:
        tokens = self.values["tokens"]
        heard = VersionedSink()
        send_random(self.engine, f"{next(self._serials)}", tokens, tokens, prompt, heard=heard)
        return heard

    def answers(self) -> list[list[int]]:
        """The answers to all prompts with the weights that are served."""
        return [self.send(prompt).wait().ids for prompt in range(PROMPTS)]

    def update(self, source: str = "folder", mode: str = "finish") -> None:
        """Takes the other weights."""
        other = 1 - self.used
        weights = str(self.folders[other]) if source == "folder" else self.arrays[other]
        self.of_version[self.engine.weights.update(weights, None, mode)] = other
        self.used = other

    @contextmanager
    def load(self, heard: list[tuple[int, VersionedSink]]) -> Iterator[None]:
        """Sends requests all the time, and notes their answers."""
        over = threading.Event()

        def ask(first: int) -> None:
            for number in itertools.count(first):
                if over.is_set():
                    return
                prompt = number % PROMPTS
                heard.append((prompt, self.send(prompt).wait()))

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(self.values["requests"])]
        for thread in threads:
            thread.start()
        while len(heard) < self.values["requests"]:
            time.sleep(0.01)
        yield
        over.set()
        for thread in threads:
            thread.join(WAIT)


def _arrays(folder: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


def write_other(folder: Path, base: Path) -> Path:
    """Writes a folder of the same model with other weights."""
    import shutil

    import numpy as np
    from safetensors.numpy import save_file

    shutil.copytree(base, folder)
    random = np.random.default_rng(0)
    arrays = _arrays(base)
    for name, value in arrays.items():
        if value.ndim > 1:
            noise = random.standard_normal(value.shape, np.float32) * (0.3 * value.std())
            arrays[name] = value + noise
    save_file(arrays, folder / "model.safetensors")
    return folder


def device_mib() -> float:
    """MiB of all arrays on devices of this process."""
    import jax

    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays()) / 2**20


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(bench: UpdateBench) -> tuple[dict[str, list[float]], dict[str, float], list[str]]:
    """Returns seconds by what was done, MiB on devices awake and asleep, and what went wrong."""
    weights = bench.engine.weights
    rounds = range(bench.values["rounds"])
    right = {0: bench.answers()}
    bench.update()
    right[1] = bench.answers()
    seconds: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        seconds.setdefault(name, []).append(seconds_of(work))

    for _ in rounds:
        timed("update from a folder, idle", bench.update)
        timed("update from arrays, idle", lambda: bench.update("arrays"))
    mib = {"awake": device_mib()}
    for _ in rounds:
        timed("sleep, level 1, idle", lambda: weights.sleep(1))
        mib["asleep"] = device_mib()
        timed("wake up after level 1", weights.wake_up)
        timed("sleep, level 2, idle", lambda: weights.sleep(2))
        timed("update and wake up after level 2", lambda: (bench.update(), weights.wake_up()))
    heard: list[tuple[int, VersionedSink]] = []
    with bench.load(heard):
        for _ in rounds:
            timed("an answer under load", lambda: bench.send(0).wait())
            timed("update under load, finish", bench.update)
            timed("update under load, abort", lambda: bench.update(mode="abort"))
            timed("sleep under load, keep", lambda: weights.sleep(1, "keep"))
            timed("wake up after that", weights.wake_up)
    return seconds, mib, faults_of(heard, right, bench.of_version)


def faults_of(
    heard: list[tuple[int, VersionedSink]],
    right: dict[int, list[list[int]]],
    of_version: dict[str, int],
) -> list[str]:
    """Returns what is wrong with answers: each must be that of its version, or its beginning where
    it was aborted."""
    faults = []
    for prompt, answer in heard:
        whole = right[of_version[answer.version]][prompt]
        ended = answer.reason == "length"
        if answer.ids != (whole if ended else whole[: len(answer.ids)]):
            faults.append(f"prompt {prompt} has tokens of other weights than {answer.version}")
    ended = sum(answer.reason == "length" for _, answer in heard)
    versions = len({answer.version for _, answer in heard})
    print(f"{ended} answers and {len(heard) - ended} aborted ones, of {versions} versions")
    return faults


def run(values: dict[str, Any]) -> int:
    from experiments.benchmarks.model_files import folder_of

    place = values["folder"] or ("/dev/shm" if Path("/dev/shm").is_dir() else None)
    with tempfile.TemporaryDirectory(dir=place) as name:
        base = folder_of(values["model"], Path(name))
        other = write_other(Path(name, "other"), base)
        size = (base / "model.safetensors").stat().st_size
        bench = UpdateBench(values, (base, other))
        try:
            seconds, mib, faults = measure(bench)
        finally:
            bench.engine.close()
    print(described(machine()))
    print(f"{values['model']}, {size / 2**20:.0f} MiB of weights in float32; on devices ", end="")
    print(f"{mib['awake']:.0f} MiB awake, {mib['asleep']:.1f} asleep\n")
    rows = [
        (name, f"{statistics.median(some):.3f}", f"{min(some):.3f} to {max(some):.3f}")
        for name, some in seconds.items()
    ]
    print(table(("", "s: median", "range"), rows))
    keep(values, seconds=seconds, mib=mib, faults=faults)
    return exit_code(faults)


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])

if __name__ == "__main__":
    sys.exit(command_line("weight_updates", "other weights while serving", COMMAND, sys.argv[1:]))
