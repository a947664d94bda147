"""Kills and stops the processes of a cluster, one after the other, while it serves: what becomes of
the requests, how long until tokens come again, and what is left.

    python -m experiments.benchmarks.cluster_faults --rounds=50 --json=cluster_faults.json

`jaxserve cluster` serves with prefill and decode replicas; callers ask all the time, and every
answer is compared with what the same prompt gave before the first fault. Victims are a replica of
each role, the conductor and the process that started them; a signal is SIGKILL or SIGSTOP, and who
is stopped goes on after some seconds. When the starting process is killed this script starts it
again, as systemd or Kubernetes would, once it has seen what is left of it. At the end no request
may run, no page be held, and no process, listener or file in /dev/shm be left.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from experiments.benchmarks.fault_load import Callers, end, in_turns, kill, report, shared_memory
from experiments.script import command_line
from jaxserve.group.channel import lasting_ports
from jaxserve.observe.machine import described, machine
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option

OPTIONS = {
    "faults": [
        Option("model", str, "random:tiny", "model: a fetched name, a folder or a .gguf file"),
        Option("prefill", int, 2, "replicas that prefill", 1),
        Option("decode", int, 2, "replicas that decode", 1),
        Option("rounds", int, 50, "faults", 1),
        Option("callers", int, 6, "that ask at the same time", 1),
        Option("seed", int, 0, "of victims and moments"),
        Option("limit", float, 120.0, "seconds that a request and a new start may take"),
        Option("json", str, None, "file for all figures"),
    ]
}
VICTIMS = {
    "prefill": "--role=prefill",
    "decode": "--role=decode",
    "conductor": "conductor",
    "cluster": "cluster",
}
STOPPED_SECONDS = 8.0  # that a stopped process stays so: longer than it takes to notice
LEFT_SECONDS = 8.0  # for replicas to end after the process that started them
IDLE_SECONDS = 20.0  # for what ran to end
MARK = "CLUSTER_OF_FAULTS"  # in the environment of our processes
# of the conductor's page of metrics, each over all replicas
BUSY = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def processes(word: str = "") -> list[int]:
    """Lists the processes of our cluster with this word on their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            ours = f"{MARK}={os.getpid()}".encode() in (folder / "environ").read_bytes().split(
                b"\0"
            )
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if ours and (not word or word.encode() in words):
                found.append(int(folder.name))
    return found


class Cluster:
    """`jaxserve cluster`, with the same addresses however often it is started."""

    def __init__(self, values: dict[str, Any], log: Path):
        self.port, self.http_port = lasting_ports(2, "127.0.0.1")
        self._command = [
            sys.executable, "-m", "jaxserve", "cluster",
            *(f"--{name}={values[name]}" for name in ("model", "prefill", "decode")),
            f"--grpc_port={self.port}", f"--port={self.http_port}", "--dtype=float32",
            "--max_model_len=1024", "--max_seqs=4", "--chunk_tokens=64", "--pages=200",
            "--host_cache_gib=0.25", "--profile=none", "--policy=fcfs", "--chunking=static",
            "--admission=queue",
        ]  # fmt: skip
        self._log = log
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as out:
            environment = {**os.environ, MARK: str(os.getpid())}
            self.process = subprocess.Popen(self._command, stdout=out, stderr=out, env=environment)

    def metrics(self) -> str:
        url = f"http://127.0.0.1:{self.http_port}/metrics"
        return urllib.request.urlopen(url, timeout=10).read().decode()

    def replicas(self) -> int:
        """Number of replicas that the conductor can send requests to."""
        with contextlib.suppress(OSError):
            return len(re.findall(r"^jaxserve:replica_alive\{.*\} 1\.0$", self.metrics(), re.M))
        return 0

    def busy(self) -> dict[str, float]:
        """Counts what still runs or is held, over all replicas; {} if nothing is."""
        text = self.metrics()
        sums = {
            name: sum(map(float, re.findall(rf"^jaxserve:{name}(?:\{{.*\}})? (\S+)$", text, re.M)))
            for name in BUSY
        }
        return {name: value for name, value in sums.items() if value}


def hit(
    cluster: Cluster, callers: Callers, victim: str, number: int, dice: random.Random, limit: float
) -> dict[str, Any]:
    """One fault; returns how long until a token came of a request that was sent after it."""
    pid = dice.choice(processes(VICTIMS[victim]))
    at = time.monotonic()
    os.kill(pid, number)
    left = 0
    again = None
    if number == signal.SIGSTOP:
        again = callers.until_answered(at, STOPPED_SECONDS)
        time.sleep(max(0.0, at + STOPPED_SECONDS - time.monotonic()))
        os.kill(pid, signal.SIGCONT)
    elif victim == "cluster":
        cluster.process.wait()
        deadline = time.monotonic() + LEFT_SECONDS
        while processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        left = len(processes())
        cluster.start()
    if again is None:
        again = callers.until_answered(at, limit)
    name = signal.Signals(number).name
    return {"victim": victim, "signal": name, "seconds_to_token": again, "left": left}


def wait(condition: Any, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if condition():
                return True
        time.sleep(0.1)
    return False


def run(values: dict[str, Any]) -> int:
    dice = random.Random(values["seed"])
    shared = shared_memory()
    pairs = list(itertools.product(VICTIMS, (signal.SIGKILL, signal.SIGSTOP)))
    log = Path(tempfile.mkdtemp(prefix="cluster-faults-")) / "cluster.log"
    print(f"{described(machine())}; log: {log}", file=sys.stderr)
    every = values["prefill"] + values["decode"]
    cluster = Cluster(values, log)
    callers = Callers(f"127.0.0.1:{cluster.port}", values["callers"], values["limit"])
    faults: list[dict[str, Any]] = []
    try:
        assert wait(lambda: cluster.replicas() == every, values["limit"]), "no replicas"
        callers.learn()
        callers.start()
        for victim, number in in_turns(pairs, values["rounds"], dice):
            wait(lambda: cluster.replicas() == every, values["limit"])
            time.sleep(dice.uniform(0.2, 2.0))
            fault = hit(cluster, callers, victim, number, dice, values["limit"])
            faults.append(fault)
            print(len(faults), fault, Counter(end[1] for end in callers.ends), file=sys.stderr)
            if fault["seconds_to_token"] is None:
                break
        callers.stop()
        wait(lambda: cluster.replicas() == every, values["limit"])
        wait(lambda: not cluster.busy(), IDLE_SECONDS)
        left = {"busy": cluster.busy()}
        left |= end(cluster.process, processes, cluster.port, shared)
    finally:
        callers.stop()
        kill([cluster.process.pid, *processes()])
    return report(values, faults, callers, left)


COMMAND = Command(OPTIONS, run, __doc__.partition("\n\n")[2] if __doc__ else "")
if __name__ == "__main__":
    sys.exit(
        command_line(
            "experiments.benchmarks.cluster_faults",
            "faults of a cluster of replicas",
            COMMAND,
            sys.argv[1:],
        )
    )
