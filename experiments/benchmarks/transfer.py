"""Measures the cost of moving KV between two processes: MB/s and CPU seconds per GB on both sides.

    python -m experiments.benchmarks.transfer --json=transfer.json

Thirty pieces at a time, as the layers of a chunk, between two processes over loopback, by this
project's transfers over TCP, by the Mooncake Transfer Engine (over TCP) where it is installed, and
by a plain loop over a socket, which checks and bounds nothing. Then blocks from a replica's port to
a reader, by each plane (`--transfer`), with all that belongs to it: handshake, staging, checksums.
In each round every engine moves every size, in an order that turns; ratios are taken within a
round. On loopback both sides share the cores: the CPU seconds say more than the MB/s.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from experiments.benchmarks.guard import Meter
from experiments.script import command_line, keep
from jaxserve.cli.display import table
from jaxserve.observe.machine import described, machine
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.transfer.plane import MOONCAKE, TCP

OPTIONS = {
    "transfer": [
        Option("rounds", int, 9, "rounds, each with all engines and sizes", 3),
        Option("megabytes", int, 100, "MB that one measurement moves at least", 1),
        Option("block_kib", int, 1024, "KiB of a block between replicas", 1),
        Option("json", str, None, "file for all figures"),
    ]
}
OWN = "jaxserve"
PIECES = 30
SIZES = (1 << 16, 1 << 18, 1 << 20)  # bytes of a piece
MEMORY = PIECES * SIZES[-1]
PEER = "experiments.benchmarks.workers.transfer_peer"
PLANE_PEER = "experiments.benchmarks.workers.plane_peer"
BLOCKS = "blocks"  # in place of a size


class Side:
    """One of an engine's two processes."""

    def __init__(self, module: str, *arguments: object):
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, what: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Engine:
    """A sender and a receiver."""

    def __init__(self, name: str):
        self.name = name
        self.sides = [Side(PEER, name, MEMORY, role) for role in ("send", "receive")]
        self.receiver = self.sides[1]
        lender, self.mover = reversed(self.sides)
        if name == MOONCAKE:  # the receiver moves
            lender, self.mover = self.sides
        self.window = lender.ask("lend", size=MEMORY)
        self.measure(SIZES[0], 1)  # connects
        assert self.measure(SIZES[-1], 1) and self.receiver.ask("right", size=MEMORY), name

    def measure(self, size: int, times: int) -> dict[str, float]:
        """MB/s, CPU seconds per GB of both sides, and others' share of the machine in percent."""
        move = functools.partial(
            self.mover.ask, "move", window=self.window, pieces=PIECES, size=size, times=times
        )
        return metered(self.sides, move, PIECES * size * times / 1e9)

    def close(self) -> None:
        for side in self.sides:
            side.close()


class PlanePair:
    """A source of blocks and a reader that have a plane."""

    def __init__(self, plane: str, blocks: int, block_bytes: int):
        self.name = plane
        self.gigabytes = blocks * block_bytes / 1e9
        roles = ("send", "receive")
        self.sides = [Side(PLANE_PEER, plane, blocks, block_bytes, role) for role in roles]
        self.address = self.sides[0].ask("address")
        self.measure()  # connects
        found = self.sides[1].ask("plane")
        assert found.startswith(plane), found

    def measure(self) -> dict[str, float]:
        """Moves all blocks once; returns what `metered` does."""
        fetch = functools.partial(self.sides[1].ask, "fetch", address=self.address)
        return metered(self.sides, fetch, self.gigabytes)

    def close(self) -> None:
        for side in self.sides:
            side.close()


def metered(sides: Sequence[Side], move: Callable[[], float], gigabytes: float) -> dict[str, float]:
    """Measures what a move costs both sides, sender and receiver. move: returns its seconds."""
    meter = Meter(side.process.pid for side in sides)
    before = [side.ask("cpu") for side in sides]
    seconds = move()
    sent, received = (side.ask("cpu") - since for side, since in zip(sides, before))
    return {
        "mb_per_s": 1e3 * gigabytes / seconds,
        "sender_cpu": sent / gigabytes,
        "receiver_cpu": received / gigabytes,
        "foreign": meter.read().foreign,
    }


def names() -> list[str]:
    found = [OWN, "sockets"]
    if has_mooncake():
        found.append(MOONCAKE)
    return found


def has_mooncake() -> bool:
    return importlib.util.find_spec("mooncake") is not None


def measured(engines: Sequence[Engine], rounds: int, megabytes: int) -> list[dict[str, Any]]:
    """One row for each round, engine and size. The first round is not counted."""
    rows = []
    for number in range(rounds + 1):
        turn = number % len(engines)
        for size in SIZES:
            times = -(-megabytes * 1_000_000 // (PIECES * size))
            for engine in [*engines[turn:], *engines[:turn]]:
                found = engine.measure(size, times)
                if number:
                    rows.append({"engine": engine.name, "size": size, "round": number, **found})
    return rows


def measured_planes(pairs: Sequence[PlanePair], rounds: int) -> list[dict[str, Any]]:
    """One row for each round and plane."""
    rows = []
    for number in range(1, rounds + 1):
        turn = number % len(pairs)
        for pair in [*pairs[turn:], *pairs[:turn]]:
            row = {"engine": pair.name, "size": BLOCKS, "round": number}
            rows.append({**row, **pair.measure()})
    return rows


def of(rows: Sequence[dict[str, Any]], engine: str, size: int | str, what: str) -> list[float]:
    return [row[what] for row in rows if (row["engine"], row["size"]) == (engine, size)]


def ratios(rows: Sequence[dict[str, Any]], own: str, peer: str, size: int | str, what: str) -> str:
    """Ours over a peer's, within each round."""
    pairs = zip(of(rows, own, size, what), of(rows, peer, size, what))
    found = sorted(ours / theirs for ours, theirs in pairs if theirs)
    if not found:
        return "-"
    return f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"


def shown(rows: Sequence[dict[str, Any]]) -> str:
    found = {row["engine"] for row in rows}
    engines = [OWN, *sorted(found - {OWN})]
    columns = ("mb_per_s", "sender_cpu", "receiver_cpu")
    head = ["pieces", "engine", "MB/s", "sender CPU s/GB", "receiver CPU s/GB"]
    head += [f"{OWN} / it: MB/s", "CPU of both"]
    lines = []
    for row in rows:
        row["cpu"] = row["sender_cpu"] + row["receiver_cpu"]
    for size in SIZES:
        for engine in engines:
            medians = [statistics.median(of(rows, engine, size, what)) for what in columns]
            beside = ["", ""]
            if engine != OWN:
                beside = [ratios(rows, OWN, engine, size, what) for what in ("mb_per_s", "cpu")]
            lines.append(
                [f"{PIECES} x {size >> 10} KiB", engine, f"{medians[0]:.0f}"]
                + [f"{median:.2f}" for median in medians[1:]]
                + beside
            )
    return table(head, lines)


def shown_planes(rows: Sequence[dict[str, Any]], block_kib: int) -> str:
    lines = []
    for plane in dict.fromkeys([TCP, *(row["engine"] for row in rows)]):
        rates = sorted(of(rows, plane, BLOCKS, "mb_per_s"))
        cpu = [
            f"{statistics.median(of(rows, plane, BLOCKS, what)):.2f}"
            for what in ("sender_cpu", "receiver_cpu")
        ]
        spread = f"{statistics.median(rates):.0f} ({rates[0]:.0f} to {rates[-1]:.0f})"
        beside = "" if plane == TCP else ratios(rows, TCP, plane, BLOCKS, "mb_per_s")
        lines.append([plane, spread, *cpu, beside])
    head = [f"blocks of {block_kib} KiB by", "MB/s", "source CPU s/GB", "reader CPU s/GB"]
    return table([*head, f"{TCP} / it: MB/s"], lines)


def run(values: dict[str, Any]) -> int:
    open_now: list[Engine | PlanePair] = []
    block_bytes = values["block_kib"] << 10
    blocks = -(-values["megabytes"] * 1_000_000 // block_bytes)
    try:
        engines = []
        for name in names():
            engines.append(Engine(name))
            open_now.append(engines[-1])
        rows = measured(engines, values["rounds"], values["megabytes"])
        pairs = []
        for plane in [TCP, MOONCAKE] if has_mooncake() else [TCP]:
            pairs.append(PlanePair(plane, blocks, block_bytes))
            open_now.append(pairs[-1])
        plane_rows = measured_planes(pairs, values["rounds"])
    finally:
        for one in open_now:
            one.close()
    print(described(machine()))
    print(f"{values['rounds']} rounds, medians; ratios: median of rounds (lowest to highest)")
    foreign = [row["foreign"] for row in [*rows, *plane_rows]]
    print(
        f"others used {statistics.median(foreign):.0f} % of the machine "
        f"(median; most {max(foreign):.0f} %)\n"
    )
    print(shown(rows))
    print()
    print(shown_planes(plane_rows, values["block_kib"]))
    keep(values, rows=[*rows, *plane_rows])
    return 0


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])

if __name__ == "__main__":
    sys.exit(command_line("transfer", "what moving KV costs", COMMAND, sys.argv[1:]))
