"""Measures the cost of moving KV between two processes: MB/s and CPU seconds per GB on both sides.

    python -m experiments.benchmarks.transfer --json=transfer.json

Thirty pieces at a time, as the layers of a chunk, between two processes over loopback, by this
project's transfers over TCP, by the Mooncake Transfer Engine where it is installed, and by a plain
loop over a socket, which checks and bounds nothing. In each round every engine moves every size,
in an order that turns; ratios are taken within a round. On loopback both sides share the cores:
the CPU seconds say more than the MB/s.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from experiments.benchmarks.guard import Meter
from experiments.script import command_line, keep
from jaxserve.cli.display import table
from jaxserve.observe.machine import described, machine
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option

OPTIONS = {
    "transfer": [
        Option("rounds", int, 9, "rounds, each with all engines and sizes", 3),
        Option("megabytes", int, 100, "MB that one measurement moves at least", 1),
        Option("json", str, None, "file for all figures"),
    ]
}
OWN = "jaxserve"
PIECES = 30
SIZES = (1 << 16, 1 << 18, 1 << 20)  # bytes of a piece
MEMORY = PIECES * SIZES[-1]
PEER = "experiments.benchmarks.workers.transfer_peer"


class Side:
    """One of an engine's two processes."""

    def __init__(self, engine: str, role: str):
        self.process = subprocess.Popen(
            [sys.executable, "-m", PEER, engine, str(MEMORY), role],
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
        self.sides = [Side(name, role) for role in ("send", "receive")]
        self.sender, self.receiver = self.sides
        self.window = self.receiver.ask("lend", size=MEMORY)
        self.measure(SIZES[0], 1)  # connects
        assert self.measure(SIZES[-1], 1) and self.receiver.ask("right", size=MEMORY), name

    def measure(self, size: int, times: int) -> dict[str, float]:
        """MB/s, CPU seconds per GB of both sides, and others' share of the machine in percent."""
        meter = Meter(side.process.pid for side in self.sides)
        before = [side.ask("cpu") for side in self.sides]
        seconds = self.sender.ask("move", window=self.window, pieces=PIECES, size=size, times=times)
        sent, received = (side.ask("cpu") - since for side, since in zip(self.sides, before))
        gigabytes = PIECES * size * times / 1e9
        return {
            "mb_per_s": 1e3 * gigabytes / seconds,
            "sender_cpu": sent / gigabytes,
            "receiver_cpu": received / gigabytes,
            "foreign": meter.read().foreign,
        }

    def close(self) -> None:
        for side in self.sides:
            side.close()


def names() -> list[str]:
    found = [OWN, "sockets"]
    if importlib.util.find_spec("mooncake"):
        found.append("mooncake")
    return found


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


def of(rows: Sequence[dict[str, Any]], engine: str, size: int, what: str) -> list[float]:
    return [row[what] for row in rows if (row["engine"], row["size"]) == (engine, size)]


def ratios(rows: Sequence[dict[str, Any]], peer: str, size: int, what: str) -> str:
    """Ours over a peer's, within each round."""
    pairs = zip(of(rows, OWN, size, what), of(rows, peer, size, what))
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
                beside = [ratios(rows, engine, size, what) for what in ("mb_per_s", "cpu")]
            lines.append(
                [f"{PIECES} x {size >> 10} KiB", engine, f"{medians[0]:.0f}"]
                + [f"{median:.2f}" for median in medians[1:]]
                + beside
            )
    return table(head, lines)


def run(values: dict[str, Any]) -> int:
    engines: list[Engine] = []
    try:
        for name in names():
            engines.append(Engine(name))
        rows = measured(engines, values["rounds"], values["megabytes"])
    finally:
        for engine in engines:
            engine.close()
    print(described(machine()))
    print(f"{values['rounds']} rounds, medians; ratios: median of rounds (lowest to highest)")
    foreign = [row["foreign"] for row in rows]
    print(
        f"others used {statistics.median(foreign):.0f} % of the machine "
        f"(median; most {max(foreign):.0f} %)\n"
    )
    print(shown(rows))
    keep(values, rows=rows)
    return 0


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])

if __name__ == "__main__":
    sys.exit(command_line("transfer", "what moving KV costs", COMMAND, sys.argv[1:]))
