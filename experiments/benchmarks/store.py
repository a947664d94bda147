"""Blocks outside the devices: MB/s and CPU seconds per GB of sealing and verifying in host memory,
and of putting and getting on disk, beside one file per block.

    python -m experiments.benchmarks.store --folder=DIR --json=store.json

The peer writes each block with a checksum behind it to a file of its own, renames it into place,
and checks the checksum when it reads. Both have the same checksum, threads and blocks, and take
turns. What both put has reached the disk when their time ends: the file of `DiskBlocks` is written
beside the page cache, the peer's files are flushed once all are written. What both get comes from
the disk: the peer's files are dropped from the page cache first. CPU time is this process's, the
kernel's work for it included; what the kernel writes back on its own threads is not in it, which
favours the peer.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from experiments.script import command_line, keep
from jaxserve.cli.display import table
from jaxserve.observe.machine import described, machine
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.store.checksum import block_checksum
from jaxserve.store.disk import DiskBlocks
from jaxserve.store.host_memory import HostBlocks
from jaxserve.store.record import record_bytes

OPTIONS = {
    "store": [
        Option("folder", str, None, "folder on the disk to measure; the system's for temporaries"),
        Option("mib", int, 64, "MiB of blocks that are put and got at a time", 4),
        Option("rounds", int, 5, "rounds, in each of which all take their turn", 1),
        Option("records", int, 16384, "records of 64 KiB whose headers are read at a start", 16),
        Option("json", str, None, "file for all figures"),
    ]
}
KIB = (64, 256, 1024)  # of a block
THREADS = (1, 4)
ROUNDS_ON_DISK = 3  # of blocks for which there is room
CHECKSUM_BYTES = 4


class Figure(NamedTuple):
    """mb_s: 10^6 bytes per second. cpu_s_gb: CPU seconds per 10^9 bytes."""

    mb_s: float
    cpu_s_gb: float


class Store(Protocol):
    """One of the ways in which blocks lie on disk."""

    def put(self, key: bytes, data: np.ndarray) -> bool: ...

    def get(self, key: bytes, into: np.ndarray) -> bool: ...

    def flush(self, pool: ThreadPoolExecutor) -> None:
        """Has everything on the disk and nothing in the page cache."""

    def forget(self, turn: int, blocks: int) -> None:
        """Removes what was put, where that does not come about by itself."""


class Ours(DiskBlocks):
    """Blocks in one file, beside the page cache."""

    def flush(self, pool: ThreadPoolExecutor) -> None:
        assert self._file is not None and self._file.direct, "the file system has no direct I/O"

    def forget(self, turn: int, blocks: int) -> None:
        pass


class FilePerBlock:
    """The peer: a file per block, replaced as a whole."""

    def __init__(self, folder: Path):
        self.folder = folder

    def put(self, key: bytes, data: np.ndarray) -> bool:
        partial = self.folder / f"{key.hex()}.partial"
        with open(partial, "wb", buffering=0) as file:
            file.write(data.data)
            file.write(block_checksum(key, data).to_bytes(CHECKSUM_BYTES, "little"))
        os.rename(partial, self.folder / key.hex())
        return True

    def get(self, key: bytes, into: np.ndarray) -> bool:
        with open(self.folder / key.hex(), "rb", buffering=0) as file:
            whole = file.readinto(into.data) == into.size
            checksum = int.from_bytes(file.read(CHECKSUM_BYTES), "little")
        return whole and checksum == block_checksum(key, into)

    def flush(self, pool: ThreadPoolExecutor) -> None:
        def flush_one(path: Path) -> None:
            file = os.open(path, os.O_RDONLY)
            os.fdatasync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)

        list(pool.map(flush_one, self.folder.iterdir()))

    def forget(self, turn: int, blocks: int) -> None:
        for slot in range(blocks):
            (self.folder / key_of(turn, slot).hex()).unlink()


def figure(work: Callable[[], None], size: int) -> Figure:
    cpu, began = time.process_time(), time.perf_counter()
    work()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return Figure(size / seconds / 1e6, cpu / size * 1e9)


def filled(blocks: int, block_bytes: int) -> HostBlocks:
    """Blocks of random bytes."""
    host = HostBlocks(blocks, block_bytes)
    random = np.random.Generator(np.random.SFC64(0))
    for slot in range(blocks):
        host.view(slot)[:] = random.integers(0, 256, block_bytes, np.uint8)
    return host


class Blocks(NamedTuple):
    """Blocks to put, and memory for those that are read."""

    host: HostBlocks
    into: HostBlocks

    def put_all(self, store: Store, turn: int, pool: ThreadPoolExecutor) -> None:
        put = lambda slot: store.put(key_of(turn, slot), self.host.view(slot))
        assert all(pool.map(put, range(self.host.slots)))
        store.flush(pool)

    def get_all(self, store: Store, turn: int, pool: ThreadPoolExecutor) -> None:
        get = lambda slot: store.get(key_of(turn, slot), self.into.view(slot))
        assert all(pool.map(get, range(self.host.slots))), "a block was missed"


def key_of(turn: int, slot: int) -> bytes:
    return b"%d.%d" % (turn, slot)


def measure_disk(
    folder: Path, blocks: Blocks, threads: int, rounds: int
) -> dict[str, list[Figure]]:
    """Figures of each round, by what was done."""
    found: dict[str, list[Figure]] = defaultdict(list)
    host = blocks.host
    size = host.slots * host.block_bytes
    capacity = ROUNDS_ON_DISK * host.slots * record_bytes(host.block_bytes)
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(threads))
        ours_in, theirs_in = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder))) for _ in range(2)
        )
        ours = Ours(ours_in, capacity, host.block_bytes)
        stack.enter_context(closing(ours))
        stores: dict[str, Store] = {"disk": ours, "file": FilePerBlock(theirs_in)}
        for turn in range(-ROUNDS_ON_DISK, rounds):
            for name in (list(stores), list(reversed(stores)))[turn % 2]:
                put = functools.partial(blocks.put_all, stores[name], turn, pool)
                get = functools.partial(blocks.get_all, stores[name], turn, pool)
                if turn < 0:
                    put()  # the file comes to its size
                else:
                    found[f"{name} put"].append(figure(put, size))
                    found[f"{name} get"].append(figure(get, size))
            stores["file"].forget(turn, host.slots)
    return found


def measure_memory(host: HostBlocks, rounds: int) -> dict[str, list[Figure]]:
    size = host.slots * host.block_bytes
    seal = lambda: [host.seal(slot, b"key") for slot in range(host.slots)]
    verify = lambda: [host.verify(slot, b"key") for slot in range(host.slots)]
    seal()
    return {
        "seal": [figure(seal, size) for _ in range(rounds)],
        "verify": [figure(verify, size) for _ in range(rounds)],
    }


def measure_start(folder: Path, records: int) -> float:
    """Seconds in which a store of `records` records finds its blocks again."""
    block = np.zeros(64 << 10, np.uint8)
    capacity = records * record_bytes(block.size)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        with closing(DiskBlocks(Path(name), capacity, block.size)) as store:
            for number in range(records):
                assert store.put(b"%d" % number, block)
        began = time.perf_counter()
        with closing(DiskBlocks(Path(name), capacity, block.size)) as store:
            assert len(store.keys()) == records
        return time.perf_counter() - began


def spread(values: Iterable[float], digits: int) -> str:
    ordered = sorted(values)
    middle = statistics.median(ordered)
    return f"{middle:.{digits}f} ({ordered[0]:.{digits}f} to {ordered[-1]:.{digits}f})"


def memory_rows(found: dict[int, dict[str, list[Figure]]]) -> list[list[str]]:
    return [
        [
            f"{kib} KiB",
            what,
            spread((each.mb_s for each in figures), 0),
            spread((each.cpu_s_gb for each in figures), 3),
        ]
        for kib, by_what in found.items()
        for what, figures in by_what.items()
    ]


def disk_rows(found: dict[tuple[int, int], dict[str, list[Figure]]]) -> list[list[str]]:
    rows = []
    for (kib, threads), by_what in found.items():
        for what in ("put", "get"):
            ours, theirs = by_what[f"disk {what}"], by_what[f"file {what}"]
            rows.append(
                [
                    f"{kib} KiB",
                    str(threads),
                    what,
                    f"{statistics.median(each.mb_s for each in ours):.0f}",
                    f"{statistics.median(each.mb_s for each in theirs):.0f}",
                    spread((a.mb_s / b.mb_s for a, b in zip(ours, theirs)), 2),
                    f"{statistics.median(each.cpu_s_gb for each in ours):.2f}",
                    f"{statistics.median(each.cpu_s_gb for each in theirs):.2f}",
                    spread((a.cpu_s_gb / b.cpu_s_gb for a, b in zip(ours, theirs)), 2),
                ]
            )
    return rows


DISK_HEAD = [
    "block",
    "threads",
    "",
    "MB/s",
    "file per block",
    "ratio of rounds: median (range)",
    "CPU s/GB",
    "file per block",
    "ratio",
]


def run(values: dict[str, Any]) -> int:
    folder = Path(values["folder"] or tempfile.gettempdir())
    memory, disk = {}, {}
    for kib in KIB:
        blocks = max(1, values["mib"] * 1024 // kib)
        given = Blocks(filled(blocks, kib << 10), HostBlocks(blocks, kib << 10))
        memory[kib] = measure_memory(given.host, values["rounds"])
        for threads in THREADS:
            disk[kib, threads] = measure_disk(folder, given, threads, values["rounds"])
    start = measure_start(folder, values["records"])
    print(described(machine()))
    print(f"{values['rounds']} rounds of {values['mib']} MiB; load {os.getloadavg()[0]:.1f}\n")
    print(table(["block", "", "MB/s: median (range)", "CPU s/GB"], memory_rows(memory)))
    print()
    print(table(DISK_HEAD, disk_rows(disk)))
    print(f"\nA start with {values['records']} records: {start:.2f} s")
    named = itertools.chain(
        ((f"{kib} KiB", found) for kib, found in memory.items()),
        ((f"{kib} KiB, {threads} threads", found) for (kib, threads), found in disk.items()),
    )
    figures = [
        {"of": of, "what": what, "rounds": [each._asdict() for each in rounds]}
        for of, found in named
        for what, rounds in found.items()
    ]
    keep(values, figures=figures, start_seconds=start)
    return 0


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])

if __name__ == "__main__":
    sys.exit(command_line("store", "blocks outside the devices", COMMAND, sys.argv[1:]))
