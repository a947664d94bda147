"""Puts a cluster under load of every kind for a while, and looks for what is left behind.

    python -m experiments.faults.soak --minutes=30 --json=soak.json

The cluster is that of `experiments.faults`: a launched group, etcd and proxies, which do no harm.
Callers read to the end, and compare it with what is right, hang up in the middle, set a deadline
that may be too short, send what is wrong, or come as a crowd. Once a minute memory, threads and
descriptors of every process are recorded. At the end, without requests, nothing may run or be held,
no process may have more threads or descriptors than after the warm-up, and after the end of the
cluster there may be no process, no name in /dev/shm, no address in etcd and no lease.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.faults.__main__ import IDLE_SECONDS, say, wait, whole_cluster
from experiments.faults.__main__ import OPTIONS as FAULTS
from experiments.faults.load import RIGHT, WRONG, Asked, Question, answer
from experiments.faults.system import System, processes
from experiments.script import command_line, keep
from jaxserve.api.errors import RequestError
from jaxserve.api.sampling import SamplingParams
from jaxserve.cli.display import table
from jaxserve.observe.machine import described, machine
from jaxserve.server.client import Client
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option

NOT_OURS = ("rounds", "only", "running")
OPTIONS = {
    "soak": [
        Option("minutes", float, 30.0, "how long", 0.1),
        Option("samples", int, 20, "of the processes, over the whole time", 4),
        *(option for option in FAULTS["faults"] if option.name not in NOT_OURS),
    ]
}
KINDS = {"whole": 6, "leave": 3, "deadline": 2, "wrong": 1}
SOUND = [  # kinds and how they may end
    *([kind, end] for kind in ("whole", "deadline") for end in (RIGHT, "RESOURCE_EXHAUSTED")),
    ["deadline", "DEADLINE_EXCEEDED"],
    ["leave", "left"],
    ["leave", "RESOURCE_EXHAUSTED"],
    ["wrong", "INVALID_ARGUMENT"],
]
CROWD = 0.005  # probability that a caller brings others
CROWD_CALLERS = 24
WARM_UP = 0.25  # share of the run after which threads and descriptors are taken for usual
MORE = 12  # threads or descriptors that may have come since
SETTLE_SECONDS = 40.0  # for idle connections to be closed
BAD = ((), (10**9,), tuple(range(5, 1500)))  # prompts that are refused


class Soak:
    """Callers of every kind until the time is up."""

    def __init__(
        self, target: str, all_questions: Sequence[Question], right: Sequence[Sequence[int]]
    ):
        self._target = target
        self._questions = all_questions
        self._right = right
        self._lock = threading.Lock()
        self.ends: Counter[str] = Counter()

    def run(self, callers: int, until: float) -> list[threading.Thread]:
        threads = [
            threading.Thread(target=self._call, args=(number, until), daemon=True)
            for number in range(callers)
        ]
        for thread in threads:
            thread.start()
        return threads

    def _call(self, number: int, until: float) -> None:
        dice = random.Random(number)
        with Client(self._target) as client:
            while time.monotonic() < until:
                if dice.random() < CROWD:
                    crowd = [
                        threading.Thread(target=self._one, args=(client, "whole", random.Random(n)))
                        for n in range(CROWD_CALLERS)
                    ]
                    for thread in crowd:
                        thread.start()
                    for thread in crowd:
                        thread.join()
                self._one(client, dice.choices(list(KINDS), list(KINDS.values()))[0], dice)
                time.sleep(dice.uniform(0.0, 0.5))

    def _one(self, client: Client, kind: str, dice: random.Random) -> None:
        which = dice.randrange(len(self._questions))
        question = self._questions[which]
        asked = Asked(time.monotonic())
        salt = str(dice.random())
        try:
            if kind == "wrong":
                question = Question(dice.choice(BAD), SamplingParams(max_tokens=4))
            if kind == "leave":
                left = client.generate(
                    question.prompt, question.sampling, ids_only=True, kv={"cache_salt": salt}
                )
                for _, _ in zip(range(dice.randrange(12)), left):
                    pass
                left.close()  # type: ignore[attr-defined]
                end = "left"
            else:
                seconds = dice.uniform(0.05, 1.0) if kind == "deadline" else 120.0
                answer(client, question, salt, seconds, asked)
                end = RIGHT if asked.ids == list(self._right[which]) else WRONG
        except RequestError as error:
            end = error.status
        with self._lock:
            self.ends[f"{kind} {end}"] += 1


def sample() -> dict[str, tuple[float, int, int]]:
    """Returns MiB of resident memory, threads and descriptors of each process."""
    found = {}
    for pid in processes():
        folder = Path(f"/proc/{pid}")
        with contextlib.suppress(OSError, IndexError):
            status = (folder / "status").read_text()
            rows = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            name = next(
                (w for w in words if w in ("launch", "serve", "conductor")), Path(words[0]).name
            )
            found[f"{name} {pid}"] = (
                int(rows["VmRSS"].split()[0]) / 1024,
                int(rows["Threads"]),
                len(os.listdir(folder / "fd")),
            )
    return found


def grown(first: dict[str, Any], last: dict[str, Any]) -> list[str]:
    """Lists processes that have more threads or descriptors than before, or are others."""
    found = [f"{name} ended" for name in first if name not in last]
    for name, (_, threads, descriptors) in last.items():
        _, threads_before, descriptors_before = first.get(name, (0, 0, 0))
        if threads > threads_before + MORE:
            found.append(f"{name}: threads {threads_before} before, {threads} after")
        if descriptors > descriptors_before + MORE:
            found.append(f"{name}: descriptors {descriptors_before} before, {descriptors} after")
    return found


def soak(values: dict[str, Any], system: System, callers: Soak) -> list[dict[str, Any]]:
    """Runs the callers; returns samples, the last one of an idle cluster."""
    began = time.monotonic()
    until = began + 60 * values["minutes"]
    threads = callers.run(values["callers"], until)
    samples = [sample()]
    while time.monotonic() < until:
        time.sleep(min(60 * values["minutes"] / values["samples"], until - time.monotonic() + 0.1))
        samples.append(sample())
        total = sum(size for size, _, _ in samples[-1].values())
        minute = (time.monotonic() - began) / 60
        say(f"minute {minute:.1f}: {total:.0f} MiB in all, {dict(callers.ends)}")
    for thread in threads:
        thread.join(values["bound"])
    wait(lambda: not system.busy(), IDLE_SECONDS)
    time.sleep(SETTLE_SECONDS)
    return [*samples, sample()]


def run(values: dict[str, Any]) -> int:
    with whole_cluster(values, "soak") as subject:
        callers = Soak(subject.system.target, subject.asked, subject.right)
        samples = soak(values, subject.system, callers)
        left = subject.end()
    usual = samples[1 + int(WARM_UP * len(samples))]
    wrong = [*grown(usual, samples[-1]), *(f"{name}: {n}" for name, n in left.items() if n)]
    wrong += [f"{n} {end}" for end, n in callers.ends.items() if end.split() not in SOUND]
    print(f"{described(machine())}\n\n{shown(samples, usual)}\n")
    print("requests: " + ", ".join(f"{name} {n}" for name, n in sorted(callers.ends.items())))
    print("left behind: " + ("; ".join(wrong) or "nothing"))
    keep(values, samples=samples, ends=callers.ends, left=left, wrong=wrong)
    return bool(wrong)


def shown(samples: Sequence[dict[str, Any]], usual: dict[str, Any]) -> str:
    """Returns a table of each process after the warm-up, before the callers' end, and idle."""
    rows = []
    for name in samples[-1]:
        cells = [one.get(name, (0.0, 0, 0)) for one in (usual, samples[-2], samples[-1])]
        rows.append(
            [
                name.split()[0],
                *(f"{size:.0f}" for size, _, _ in cells),
                *(str(threads) for _, threads, _ in cells),
                *(str(descriptors) for _, _, descriptors in cells),
            ]
        )
    times = ["warm", "end", "idle"]
    names = [f"{what} {when}" for what in ("MiB", "threads", "files") for when in times]
    return table(["process", *names], rows)


COMMAND = Command(OPTIONS, run, __doc__.partition("\n\n")[2] if __doc__ else "")
if __name__ == "__main__":
    sys.exit(
        command_line(
            "experiments.faults.soak",
            "a cluster under load of every kind, and what is left behind",
            COMMAND,
            sys.argv[1:],
        )
    )
