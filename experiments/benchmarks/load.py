"""Loading weights: seconds, GB/s, CPU seconds per GB and peak memory, from safetensors files of the
shape of Llama 3 8B in bfloat16, with a cold and a warm page cache, beside plain readings of the
same files.

    python -m experiments.benchmarks.load --folder=DIR --json=load.json

The files hold random bytes and are made again, of --layers layers (all 32 are 16 GB). jaxserve
reads them, lays the weights out as its programs want them, and puts them on --tp devices. Peers do
less: `load_file` of safetensors.numpy makes one array after the other, in the layout of the files;
`read` reads the files from end to end into one buffer, which is the least that anybody can do. All
take turns in every round, each in a process of its own. GB are those of the files. Peak memory is
what the process holds, with the loaded weights in it; files that it maps count too. CPU time is
sturdier than seconds where others use the machine."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.script import command_line, keep
from jaxserve import weights
from jaxserve.checkpoint.model import ModelConfig, declare
from jaxserve.checkpoint.model_config import to_hf
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.cli.display import table
from jaxserve.observe.machine import described, machine
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.sharding import rules
from jaxserve.sharding.mesh import ensure_devices
from jaxserve.weights.names import tensors_of

OPTIONS = {
    "load": [
        Option("folder", str, None, "folder on the disk to measure; the system's for temporaries"),
        Option("model", str, "llama3-8b", "model whose shapes the files have"),
        Option("layers", int, 8, "layers of it", 1),
        Option("dtype", str, "bfloat16", "type in which the devices hold the weights"),
        Option("tp", int, 1, "devices over which each weight is split", 1),
        Option("rounds", int, 3, "rounds, in each of which all take their turn", 1),
        Option("json", str, None, "file for all figures"),
    ]
}
FILES = 4  # that a checkpoint of 8B weights comes in
SAMPLE_SECONDS = 0.01  # between looks at the memory
READ_BYTES = 16 << 20


class Figure(NamedTuple):
    """seconds, cpu: wall and CPU seconds of loading. memory: most bytes held, more than before
    it."""

    seconds: float
    cpu: float
    memory: int


def write_model(folder: Path, config: ModelConfig) -> int:
    """Writes a Hugging Face folder of random weights in bfloat16, with no more than one tensor in
    memory; returns the bytes of the files."""
    shapes = list(tensors_of(config).items())
    random = np.random.Generator(np.random.SFC64(0))
    each = -(-len(shapes) // FILES)
    for number in range(FILES):
        path = folder / f"model-{number + 1:05}-of-{FILES:05}.safetensors"
        write_file(path, dict(shapes[number * each : (number + 1) * each]), random)
    (folder / "config.json").write_text(json.dumps(to_hf(config)))
    return sum(file.stat().st_size for file in files_of(folder))


def write_file(path: Path, shapes: dict[str, tuple[int, ...]], random: np.random.Generator) -> None:
    """Writes a safetensors file of random bfloat16."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            file.write(random.integers(0, 2**16, math.prod(shape), np.uint16).data)


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def load_jaxserve(folder: Path, dtype: str, tp: int) -> object:
    checkpoint = weights.open_checkpoint(folder)
    config = checkpoint.config.with_tp(tp)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:tp]).reshape(1, tp), ("kvp", "tp"))
    declared = declare(config, range(config.layers), tp)
    shardings = {path: rules.sharding(mesh, *d.axes) for path, d in declared.items()}
    params = weights.load(checkpoint, config, declared, shardings, dtype, progress=False)
    return jax.block_until_ready(params)


def load_file(folder: Path, dtype: str, tp: int) -> object:
    from safetensors import numpy

    return [numpy.load_file(file) for file in files_of(folder)]


def read(folder: Path, dtype: str, tp: int) -> object:
    buffer = bytearray(READ_BYTES)
    for path in files_of(folder):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return None


WAYS: dict[str, Callable[[Path, str, int], object]] = {
    "jaxserve": load_jaxserve,
    "load_file": load_file,
    "read": read,
}


def measure(way: str, folder: Path, dtype: str, tp: int) -> Figure:
    """Loads once, in a process that does nothing else."""
    ensure_devices(tp)
    jax.devices()  # JAX starts before the time does
    with peak_memory() as peak:
        cpu, began = time.process_time(), time.perf_counter()
        loaded = WAYS[way](folder, dtype, tp)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    del loaded
    return Figure(seconds, cpu, peak[0])


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Yields a list whose one entry is the most memory that this process has held since, more than
    it does now, in bytes."""
    before = held_memory()
    peak = [0]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(SAMPLE_SECONDS):
            peak[0] = max(peak[0], held_memory() - before)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()
        peak[0] = max(peak[0], held_memory() - before)


def held_memory() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["VmRSS"].split()[0]) << 10


def drop_from_page_cache(folder: Path) -> None:
    for path in files_of(folder):
        file = os.open(path, os.O_RDONLY)
        os.fdatasync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def measure_all(
    folder: Path, dtype: str, tp: int, rounds: int
) -> dict[tuple[str, str], list[Figure]]:
    """Figures of each round, by way of loading and state of the page cache."""
    found: dict[tuple[str, str], list[Figure]] = defaultdict(list)
    spawn = multiprocessing.get_context("spawn")
    for turn in range(rounds):
        for way in (list(WAYS), list(reversed(WAYS)))[turn % 2]:
            for cache in ("cold", "warm"):
                if cache == "cold":
                    drop_from_page_cache(folder)
                with ProcessPoolExecutor(1, spawn) as process:
                    figure = process.submit(measure, way, folder, dtype, tp).result()
                found[way, cache].append(figure)
    return found


def rows(found: dict[tuple[str, str], list[Figure]], size: int) -> list[list[str]]:
    listed = []
    for (way, cache), figures in sorted(found.items(), key=lambda item: item[0][1]):
        seconds = sorted(each.seconds for each in figures)
        middle = statistics.median(seconds)
        listed.append(
            [
                cache,
                way,
                f"{middle:.1f} ({seconds[0]:.1f} to {seconds[-1]:.1f})",
                f"{size / middle / 1e9:.2f}",
                ratios(figures, found["read", cache]),
                f"{statistics.median(each.cpu for each in figures) / size * 1e9:.2f}",
                f"{max(each.memory for each in figures) / 1e9:.1f}",
            ]
        )
    return listed


def ratios(figures: list[Figure], reads: list[Figure]) -> str:
    """Speed as a share of that of reading alone in the same round: median and range."""
    shares = sorted(read.seconds / each.seconds for each, read in zip(figures, reads))
    return f"{statistics.median(shares):.2f} ({shares[0]:.2f} to {shares[-1]:.2f})"


HEAD = ["page cache", "", "s: median (range)", "GB/s", "of read", "CPU s/GB", "peak GB"]


def held_bytes(config: ModelConfig, values: dict[str, Any]) -> int:
    """Bytes of the loaded weights."""
    dtype = jax.numpy.dtype(values["dtype"])
    split = config.with_tp(values["tp"])
    declared = declare(split, range(config.layers), values["tp"])
    return sum(each.size * each.dtype(dtype).itemsize for each in declared.values())


def run(values: dict[str, Any]) -> int:
    config = replace(MODELS[values["model"]], layers=values["layers"])
    with tempfile.TemporaryDirectory(dir=values["folder"]) as name:
        folder = Path(name)
        size = write_model(folder, config)
        found = measure_all(folder, values["dtype"], values["tp"], values["rounds"])
    print(described(machine()))
    print(
        f"{size / 1e9:.2f} GB in {FILES} files, {config.layers} layers of {config.name} to "
        f"{values['dtype']} on {values['tp']} devices ({held_bytes(config, values) / 1e9:.2f} GB), "
        f"{values['rounds']} rounds; "
        f"load {os.getloadavg()[0]:.1f}\n"
    )
    print(table(HEAD, rows(found, size)))
    figures = [
        {"way": way, "page_cache": cache, "rounds": [each._asdict() for each in rounds]}
        for (way, cache), rounds in found.items()
    ]
    keep(values, bytes=size, weights=held_bytes(config, values), figures=figures)
    return 0


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])

if __name__ == "__main__":
    sys.exit(command_line("load", "loading weights", COMMAND, sys.argv[1:]))
