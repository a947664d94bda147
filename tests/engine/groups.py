"""A replica over several processes, led by the test's own: its workers are started by hand, with a
supervisor's variables and without a supervisor."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from jaxserve.engine.build import make_engine, open_group
from jaxserve.engine.engine import Engine
from jaxserve.group.channel import free_port
from jaxserve.group.member import LEADER, SECRET_VARIABLE, Member
from jaxserve.settings.options import make
from jaxserve.settings.schema import EngineConfig

WORKER = """
import json, sys
from jaxserve.engine.worker_process import work
from jaxserve.group.channel import free_port
from jaxserve.group.member import this_member
from jaxserve.settings.options import make
from jaxserve.settings.schema import EngineConfig
work(make(EngineConfig, json.loads(sys.argv[1])), this_member(), globals().get("open_port"))
"""
# code for a worker: it offers its parts of blocks to other replicas, and fetches theirs
OFFERS = """
import os
def open_port(own_host):
    from jaxserve.server.peer_blocks import PeerReplicas
    from jaxserve.server.worker_port import BlocksPort
    from jaxserve.settings.schema import ServerConfig
    return BlocksPort(ServerConfig(), PeerReplicas(os.environ["BLOCKS"].encode()), own_host)
"""
END_SECONDS = 60
SETTINGS = dict(dtype="float32", block_size=16, max_seqs=8, chunk_tokens=64, profile="none")


class Workers:
    """The worker processes of a group. faults: by number, code that a worker runs first."""

    def __init__(
        self,
        settings: dict[str, Any],
        count: int,
        secret: str | None = None,
        faults: Mapping[int, str] | None = None,
        ranks_across_hosts: bool = False,
    ):
        self.settings = settings
        self.faults = faults or {}
        self.secret = secret or secrets.token_hex(16)
        port = free_port("127.0.0.1")
        self.leader = Member(
            LEADER, count, "127.0.0.1", port, ranks_across_hosts=ranks_across_hosts
        )
        self.processes: dict[int, subprocess.Popen] = {}

    def start(self, number: int) -> None:
        """Starts a worker."""
        self.processes[number] = self._process(number, self.secret, self.settings)

    def stranger(self, number: int, secret: str = "", **settings: Any) -> tuple[int, str]:
        """A worker with another secret, or settings in which it differs: its exit code and what it
        printed."""
        process = self._process(
            number, secret or self.secret, {**self.settings, **settings}, stderr=subprocess.PIPE
        )
        try:
            _, said = process.communicate(timeout=END_SECONDS)
        finally:
            process.kill()
            process.wait()
        return process.returncode, said

    def _process(
        self, number: int, secret: str, settings: dict[str, Any], **streams: Any
    ) -> subprocess.Popen:
        leader = self.leader
        member = dataclasses.replace(leader, worker=number, local=number)
        return subprocess.Popen(
            [sys.executable, "-c", self.faults.get(number, "") + WORKER, json.dumps(settings)],
            env={**os.environ, **member.environment(), SECRET_VARIABLE: secret},
            text=True,
            **streams,
        )

    def end(self) -> list[int]:
        """Waits for all processes and returns their exit codes; kills those that do not end."""
        for process in self.processes.values():
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return [process.returncode for process in self.processes.values()]

    def kill(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def led(
    monkeypatch,
    model: str,
    mesh: str,
    processes: int,
    faults: Mapping[int, str] | None = None,
    warm_up: bool = False,
    ranks_across_hosts: bool = False,
    **settings: Any,
) -> Iterator[tuple[Engine, Workers]]:
    """An engine whose workers are `processes` others; all have ended afterwards. faults: see
    Workers. warm_up: whether programs are compiled before it is there."""
    every = {**SETTINGS, "model": str(model), "mesh": mesh, **settings}
    workers = Workers(every, processes, faults=faults, ranks_across_hosts=ranks_across_hosts)
    monkeypatch.setenv(SECRET_VARIABLE, workers.secret)
    config = make(EngineConfig, every)
    for number in range(processes):
        workers.start(number)
    engine = None
    try:
        group, found = open_group(config, workers.leader, progress=False, warm_up=warm_up)
        group.formed()
        engine = make_engine(config, group, found)
        yield engine, workers
        group.close()
        assert workers.end() == [0] * processes
    finally:
        workers.kill()
        workers.end()
