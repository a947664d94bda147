"""Ten times as many requests as a cluster can serve in time, through its conductor: what is
refused, how soon and with which status, how those that are not fare, and what memory each process
takes.

    python -m experiments.benchmarks.cluster_overload --seconds=60 --json=cluster_overload.json

`jaxserve cluster` serves with mixed replicas that predict whether a first token comes in time. The
capacity is measured with all slots always taken; then requests come as a Poisson process, at 0.9
times the capacity, at `factor` times, and at half of it. Refused are those with HTTP's 429; any
other error, and a request without an end, is a fault.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.benchmarks.overload import OPTIONS as OVERLOAD
from experiments.benchmarks.overload import Asked, LoadGenerator, OverHttp, figures, finished
from experiments.script import command_line, keep
from jaxserve.cli.display import table
from jaxserve.observe.machine import described, machine
from jaxserve.server.client import Client
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError

NAMES = (
    "model",
    "prompt",
    "output",
    "ttft",
    "tpot",
    "max_seqs",
    "overload",
    "factor",
    "seconds",
    "seed",
    "json",
)
OPTIONS = {
    "overload": [
        *(option for option in OVERLOAD["overload"] if option.name in NAMES),
        Option("replicas", int, 2, "that prefill and decode", 1),
        Option("base", float, 30.0, "seconds at 0.9 times the capacity, and at half of it", 1.0),
        Option("limit", float, 600.0, "seconds for the cluster to start", 1.0),
    ]
}
REFUSED = "429"
MARK = "CLUSTER_OF_OVERLOAD"  # in the environment of the cluster's processes


def memory() -> dict[str, float]:
    """Returns MiB of resident memory of each process of the cluster."""
    found = {}
    mark = f"{MARK}={os.getpid()}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            status = (folder / "status").read_text()
        except OSError:
            continue
        role = next((word for word in words if word in ("serve", "conductor", "cluster")), "other")
        mib = int(status.partition("VmRSS:")[2].split()[0]) / 1024
        found[f"{role} {folder.name}"] = mib
    return found


def start(values: dict[str, Any], folder: Path) -> tuple[subprocess.Popen[bytes], dict[str, str]]:
    """Starts the cluster; returns it with its addresses. Errors: ConfigError."""
    ports = folder / "ports.json"
    command = [
        sys.executable, "-m", "jaxserve", "cluster", f"--mixed={values['replicas']}",
        f"--model={values['model']}", "--grpc_port=0", "--port=0", f"--port_file={ports}",
        f"--overload={values['overload']}", "--max_model_len=2048", "--admission=predict",
        "--policy=slack", "--chunking=adaptive", "--noprefix_caching",
        *(f"--{name}={values[name]}" for name in ("max_seqs", "ttft", "tpot")),
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        environment = {**os.environ, MARK: str(os.getpid())}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    deadline = time.monotonic() + values["limit"]
    while not ports.exists():
        time.sleep(0.2)
        if process.poll() is not None or time.monotonic() > deadline:
            process.terminate()
            raise ConfigError("model", f"the cluster did not start; its log: {folder / 'log'}")
    return process, json.loads(ports.read_text())


def phases(values: dict[str, Any], load: LoadGenerator) -> dict[str, Any]:
    load.capacity(10.0)  # what runs first runs slower: it does not count
    capacity = load.capacity(20.0)
    print(f"capacity: {capacity:.2f} requests/s", file=sys.stderr)
    found = {}
    memories = {"before": memory()}
    for factor, seconds in (
        (0.9, values["base"]),
        (values["factor"], values["seconds"]),
        (0.5, values["base"]),
    ):
        asked = load.poisson(factor * capacity, seconds)
        finished(asked)
        name = f"{factor:g}x"
        found[name] = {**figures(asked, seconds, values), "errors": errors(asked)}
        memories[name] = memory()
        print(name, found[name], file=sys.stderr)
    return {"capacity": capacity, "phases": found, "memory_mib": memories}


def errors(asked: Sequence[Asked]) -> int:
    """Counts what is neither an answer nor a refusal."""
    return sum(one.error is not None and one.error.status != REFUSED for one in asked)


def shown(result: dict[str, Any]) -> str:
    loads = [
        [
            name,
            str(found["asked"]),
            str(found["accepted"]),
            f"{found['both_met']:.1%}",
            f"{found['goodput']:.2f}",
            f"{found['ttft']['p50']:.2f}",
            f"{found['ttft']['p99']:.2f}",
            f"{found['refusal']['p50'] * 1e3:.0f}",
            f"{found['refusal']['p99'] * 1e3:.0f}",
            ", ".join(f"{count} {status}" for status, count in found["statuses"].items()) or "-",
        ]
        for name, found in result["phases"].items()
    ]
    processes = result["memory_mib"]["before"]
    memories = [
        [process, *(f"{after.get(process, 0):.0f}" for after in result["memory_mib"].values())]
        for process in processes
    ]
    return "\n\n".join(
        [
            table(
                ["load", "asked", "accepted", "in time", "good/s", "TTFT p50 s", "p99",
                 "ms to refuse p50", "p99", "errors"],
                loads,
            ),
            table(["MiB of", *result["memory_mib"]], memories),
        ]
    )  # fmt: skip


def run(values: dict[str, Any]) -> int:
    folder = Path(tempfile.mkdtemp(prefix="jaxserve-overload-"))
    process, addresses = start(values, folder)
    try:
        with Client(addresses["grpc"]) as client:
            client.wait_ready(values["limit"])
            vocabulary = client.model_info().vocab
        way = OverHttp(int(addresses["http"].rpartition(":")[2]))
        result = phases(values, LoadGenerator(values, way, vocabulary))
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    print(f"{described(machine())}\ncapacity {result['capacity']:.2f} requests/s\n")
    print(shown(result))
    faults = sum(found["errors"] for found in result["phases"].values())
    keep(values, **result, exit_code=code, left=len(memory()))
    print(f"\nneither answered nor refused: {faults}; exit code {code}; left: {len(memory())}")
    return int(bool(faults or code or memory()))


COMMAND = Command(OPTIONS, run, __doc__.partition("\n\n")[2] if __doc__ else "")
if __name__ == "__main__":
    sys.exit(
        command_line(
            "experiments.benchmarks.cluster_overload",
            "ten times too many requests for a cluster",
            COMMAND,
            sys.argv[1:],
        )
    )
