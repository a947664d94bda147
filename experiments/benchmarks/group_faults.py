"""Kills and stops the members of a group of processes, one after the other, while it serves: what
becomes of the requests, and how long until tokens come again.

    python -m experiments.benchmarks.group_faults --rounds=30 --json=group_faults.json

`jaxserve launch` serves; callers ask all the time, and every answer is compared with what the same
prompt gave before the first fault. Victims are the leader, each worker and the supervisor; a signal
is SIGKILL or SIGSTOP. When the supervisor is killed this script starts it again, as systemd or
Kubernetes would, once it has seen that no member is left; when it is stopped it goes on after a
while. At the end there must be no process, no listener and no file in /dev/shm left.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from experiments.benchmarks.fault_load import Callers, end, in_turns, kill, report, shared_memory
from experiments.script import command_line
from jaxserve.group.channel import lasting_ports
from jaxserve.group.member import VARIABLE
from jaxserve.observe.machine import described, machine
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option

OPTIONS = {
    "faults": [
        Option("model", str, "smollm2-135m", "model: a fetched name, a folder or a .gguf file"),
        Option("mesh", str, "spp=2", "degrees of the mesh axes"),
        Option("processes", int, 2, "workers", 1),
        Option("rounds", int, 30, "faults", 1),
        Option("callers", int, 4, "that ask at the same time", 1),
        Option("replay", str, "none", "see jaxserve serve", choices=("none", "unsent", "all")),
        Option("seed", int, 0, "of victims and moments"),
        Option("limit", float, 240.0, "seconds that a request and a new start may take"),
        Option("json", str, None, "file for all figures"),
    ]
}
STOPPED_SECONDS = 3.0  # that a stopped supervisor stays so
LEFT_SECONDS = 5.0  # for members to end after their supervisor


def processes() -> list[tuple[str, int]]:
    """All processes of the group, by what they are, from their environment; what the leader
    started goes by its name too."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, StopIteration):
            variables = (folder / "environ").read_bytes().split(b"\0")
            text = next(v for v in variables if v.startswith(f"{VARIABLE}=".encode()))
            worker = json.loads(text.partition(b"=")[2])["worker"]
            name = "leader" if worker < 0 else f"worker {worker}"
            found.append((name, int(folder.name)))
    return sorted(found, key=lambda each: each[1])


def member(name: str) -> int | None:
    """The process that the supervisor started; None while there is none."""
    return next((pid for found, pid in processes() if found == name), None)


class Group:
    """`jaxserve launch -- serve`, with one address however often it is started."""

    def __init__(self, values: dict[str, Any], log: Path):
        self.port, http_port, admin_port = lasting_ports(3, "127.0.0.1")
        serve = [f"--{name}={values[name]}" for name in ("model", "mesh", "replay")] + [
            f"--grpc_port={self.port}",
            f"--port={http_port}",
            f"--admin_port={admin_port}",
            "--dtype=float32",
            "--max_model_len=1024",
            "--max_seqs=4",
            "--chunk_tokens=64",
            "--profile=none",
            "--policy=fcfs",
            "--chunking=static",
            "--admission=queue",
        ]
        launch = [sys.executable, "-m", "jaxserve", "launch", f"--processes={values['processes']}"]
        self._command = [*launch, "--", "serve", *serve]
        self._log = log
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as out:
            self.process = subprocess.Popen(self._command, stdout=out, stderr=out)

    def pid(self, victim: str) -> int | None:
        return self.process.pid if victim == "supervisor" else member(victim)


def hit(group: Group, callers: Callers, victim: str, number: int, limit: float) -> dict[str, Any]:
    """One fault; returns how long until a token came of a request that was sent after it."""
    pid = group.pid(victim)
    assert pid is not None, f"there is no {victim}"
    before = {pid for _, pid in processes()}
    at = time.monotonic()
    os.kill(pid, number)
    if victim == "supervisor" and number == signal.SIGSTOP:
        time.sleep(STOPPED_SECONDS)
        os.kill(pid, signal.SIGCONT)
    left = 0
    if victim == "supervisor" and number == signal.SIGKILL:
        group.process.wait()
        deadline = time.monotonic() + LEFT_SECONDS
        while before & {pid for _, pid in processes()} and time.monotonic() < deadline:
            time.sleep(0.05)
        left = len(before & {pid for _, pid in processes()})
        group.start()
    again = callers.until_answered(at, limit)
    name = signal.Signals(number).name
    return {"victim": victim, "signal": name, "seconds_to_token": again, "left": left}


def run(values: dict[str, Any]) -> int:
    dice = random.Random(values["seed"])
    shared = shared_memory()
    victims = ["leader", *(f"worker {n}" for n in range(values["processes"])), "supervisor"]
    both = list(itertools.product(victims, (signal.SIGKILL, signal.SIGSTOP)))
    log = Path(tempfile.mkdtemp(prefix="group-faults-")) / "launch.log"
    print(f"{described(machine())}; log: {log}", file=sys.stderr)
    began = time.monotonic()
    group = Group(values, log)
    callers = Callers(f"127.0.0.1:{group.port}", values["callers"], values["limit"])
    faults = []
    try:
        callers.learn()
        first = time.monotonic() - began
        print(f"first tokens after {first:.1f} s", file=sys.stderr)
        callers.start()
        for victim, number in in_turns(both, values["rounds"], dice):
            time.sleep(dice.uniform(0.5, 4.0))
            fault = hit(group, callers, victim, number, values["limit"])
            faults.append(fault)
            print(len(faults), fault, Counter(end[1] for end in callers.ends), file=sys.stderr)
            if fault["seconds_to_token"] is None:
                break
        callers.stop()
        left = end(group.process, processes, group.port, shared)
    finally:
        kill([group.process.pid, *(pid for _, pid in processes())])
    return report(values, faults, callers, left, first_seconds=first)


COMMAND = Command(OPTIONS, run, __doc__.partition("\n\n")[2] if __doc__ else "")
if __name__ == "__main__":
    sys.exit(
        command_line(
            "experiments.benchmarks.group_faults",
            "faults of a group of processes",
            COMMAND,
            sys.argv[1:],
        )
    )
