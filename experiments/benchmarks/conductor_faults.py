"""Two conductors over the same replicas, of which one is killed again and again under load: what
becomes of the requests of both, and what each knows of the replicas' blocks.

`jaxserve cluster` starts replicas that prefill and decode, with a conductor, which stays; a second
conductor beside it is killed at random moments and started again at once. Callers ask through both
without a pause. Requests through the one that stays must all end with the right tokens; the
others with the right ones or UNAVAILABLE. At the end both conductors must know the same blocks of
each replica, and nothing may run, wait or be held.

python -m experiments.benchmarks.conductor_faults --rounds=20
"""

from __future__ import annotations

import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from experiments.benchmarks.cluster_faults import (
    IDLE_SECONDS,
    MARK,
    Cluster,
    processes,
    wait,
)
from experiments.benchmarks.fault_load import Callers, end, kill, report, shared_memory
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
        Option("rounds", int, 20, "kills", 1),
        Option("callers", int, 3, "of each conductor, that ask at the same time", 1),
        Option("seed", int, 0, "of moments"),
        Option("limit", float, 120.0, "seconds that a request and a new start may take"),
        Option("json", str, None, "file for all figures"),
    ]
}
SECRET = "JAXSERVE_CLUSTER_SECRET"


class Second:
    """Another conductor over a cluster's replicas, at the same addresses whenever it is started."""

    def __init__(self, cluster: Cluster, model: str, log: Path):
        self.port, self.http_port = lasting_ports(2, "127.0.0.1")
        names = ",".join(row["name"] for row in members(cluster.http_port))
        self._command = [
            sys.executable, "-m", "jaxserve", "conductor", f"--model={model}",
            f"--replicas={names}", f"--grpc_port={self.port}", f"--port={self.http_port}",
        ]  # fmt: skip
        self._log = log
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as out:
            environment = {**os.environ, MARK: str(os.getpid())}
            self.process = subprocess.Popen(self._command, stdout=out, stderr=out, env=environment)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def members(http_port: int) -> list[dict[str, Any]]:
    """Asks a conductor for its replicas."""
    url = f"http://127.0.0.1:{http_port}/page/data"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)["members"]


def blocks(http_port: int) -> dict[str, int]:
    """Counts the blocks that a conductor knows of, by replica."""
    return {row["name"]: row["blocks"] for row in members(http_port)}


def run(values: dict[str, Any]) -> int:
    dice = random.Random(values["seed"])
    shared = shared_memory()
    os.environ.setdefault(SECRET, secrets.token_hex(32))  # of both conductors and the replicas
    log = Path(tempfile.mkdtemp(prefix="conductor-faults-")) / "cluster.log"
    print(f"{described(machine())}; log: {log}", file=sys.stderr)
    every, limit = values["prefill"] + values["decode"], values["limit"]
    cluster = Cluster(values, log)
    staying = Callers(f"127.0.0.1:{cluster.port}", values["callers"], limit)
    pids = [cluster.process.pid]
    faults: list[dict[str, Any]] = []
    try:
        assert wait(lambda: cluster.replicas() == every, limit), "no replicas"
        second = Second(cluster, values["model"], log)
        killed = Callers(f"127.0.0.1:{second.port}", values["callers"], limit)
        try:
            for callers in (staying, killed):
                callers.learn()
                callers.start()
            for _ in range(values["rounds"]):
                time.sleep(dice.uniform(0.2, 2.0))
                faults.append(fault(second, killed, limit))
                print(len(faults), faults[-1], ends(staying), ends(killed), file=sys.stderr)
            time.sleep(1.0)
        finally:
            killed.stop()
            staying.stop()
        wait(lambda: not cluster.busy(), IDLE_SECONDS)
        known = [blocks(port) for port in (cluster.http_port, second.http_port)]
        left = {"busy": cluster.busy(), "other_blocks": known[0] != known[1]}
        second.process.terminate()
        second.process.wait(60)
        left |= end(cluster.process, processes, cluster.port, shared)
    finally:
        kill([*pids, *processes()])
    print(f"blocks that both know: {known[0] == known[1]}: {known}")
    print(f"through the conductor that stays: {ends(staying)}")
    code = report(values, faults, killed, left, staying=ends(staying), blocks=known)
    return int(bool(code or left["other_blocks"] or set(ends(staying)) != {"right"}))


def fault(second: Second, callers: Callers, limit: float) -> dict[str, Any]:
    """Kills the second conductor and starts it again; returns how long until it gave a token."""
    at = time.monotonic()
    second.kill()
    second.start()
    again = callers.until_answered(at, limit)
    return {"victim": "second conductor", "signal": "SIGKILL", "seconds_to_token": again}


def ends(callers: Callers) -> dict[str, int]:
    """Counts requests by how they ended."""
    return dict(Counter(what for _, what, _ in callers.ends))


COMMAND = Command(OPTIONS, run, __doc__.partition("\n\n")[2] if __doc__ else "")
if __name__ == "__main__":
    sys.exit(
        command_line(
            "experiments.benchmarks.conductor_faults",
            "two conductors, of which one is killed",
            COMMAND,
            sys.argv[1:],
        )
    )
