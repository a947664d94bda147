"""A conductor and replicas as processes, under load while one of them is killed or stopped: every
request ends with the right tokens or with UNAVAILABLE, soon, and health tells the truth. The
replicas are the tests' fakes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

from jaxserve.api.errors import RequestError
from jaxserve.api.sampling import SamplingParams
from jaxserve.group.channel import free_port
from jaxserve.server.client import Client
from jaxserve.server.remote_replica import RemoteReplica
from tests.server.fakes import expected
from tests.waiting import eventually

SECRET = "of the tests of clusters"
ENVIRONMENT = {**os.environ, "JAXSERVE_CLUSTER_SECRET": SECRET}
STEP = 0.005  # seconds
BOUND = 15.0  # seconds in which a request has to end, whatever happens
NOTICED = 8.0  # seconds in which a fault has to be noticed
TOKENS = 60
LONG = 4000  # tokens of a request that takes longer than NOTICED
CALLERS = 6


class Cluster:
    """Two replicas and a conductor, as processes."""

    def __init__(self, stack: contextlib.ExitStack):
        self._stack = stack
        self.ports = [free_port("127.0.0.1") for _ in range(2)]
        self.replicas = [self.start_replica(number) for number in range(2)]
        targets = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        self.conductor = self._start(
            "jaxserve", "conductor", "--model=random:none", f"--replicas={targets}",
            "--port=0", "--http_port=0", "--drain_timeout=1",
        )  # fmt: skip
        self.grpc, self.url = (self.conductor.stdout.readline().strip() for _ in range(2))
        self.client = stack.enter_context(Client(self.grpc))
        self.client.wait_ready(30)

    def _start(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=ENVIRONMENT,
        )
        self._stack.callback(process.communicate)
        self._stack.callback(process.kill)
        return process

    def start_replica(self, number: int) -> subprocess.Popen[str]:
        return self._start("tests.server.replica_process", str(self.ports[number]), str(STEP))

    def ready(self) -> bool:
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(f"{self.url}/ready", timeout=10).status == 200
        return False

    def ask(self, prompt: list[int], tokens: int = TOKENS) -> str:
        """'right', 'wrong', or the status of an error."""
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        try:
            found = self.client.complete(prompt, sampling, timeout=60, ids_only=True)[0].ids
        except RequestError as error:
            return error.status
        return "right" if list(found) == expected(prompt, tokens) else "wrong"

    def reach(self, number: int) -> RemoteReplica:
        """A session with a replica beside the conductor's."""
        remote = RemoteReplica(f"127.0.0.1:{self.ports[number]}", SECRET.encode())
        self._stack.callback(remote.close)
        assert remote.wait_connected(10)
        return remote


class Load:
    """Callers that ask without a pause, until the block ends. outcomes: of each request, its result
    and its seconds."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._over = threading.Event()
        self._threads = concurrent.futures.ThreadPoolExecutor(CALLERS)
        self.outcomes: list[tuple[str, float]] = []

    def __enter__(self) -> Load:
        self._running = [self._threads.submit(self._call, number) for number in range(CALLERS)]
        eventually(lambda: len(self.outcomes) >= CALLERS, 20)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._threads.shutdown()
        for call in self._running:
            call.result()

    def _call(self, number: int) -> None:
        asked = 0
        while not self._over.is_set():
            asked += 1
            began = time.monotonic()
            outcome = self._cluster.ask([number + 1, asked % 200])
            self.outcomes.append((outcome, time.monotonic() - began))

    def after(self, count: int) -> list[str]:
        """The next so many results from now on."""
        before = len(self.outcomes) + CALLERS  # those that run may have begun before
        eventually(lambda: len(self.outcomes) >= before + count, BOUND)
        return [outcome for outcome, _ in self.outcomes[before:]]


def assert_sound(load: Load) -> None:
    assert {outcome for outcome, _ in load.outcomes} <= {"right", "UNAVAILABLE"}
    assert max(seconds for _, seconds in load.outcomes) < BOUND


@pytest.fixture(scope="module")
def cluster():
    with contextlib.ExitStack() as stack:
        yield Cluster(stack)


def test_a_killed_replica_leaves_its_load_to_the_other_and_comes_back(cluster):
    with Load(cluster) as load:
        cluster.replicas[0].kill()
        cluster.replicas[0].wait()
        assert set(load.after(12)) == {"right"}
        assert cluster.ready()
        cluster.replicas[0] = cluster.start_replica(0)
        remote = cluster.reach(0)
        eventually(lambda: remote.load().running, 20)
    assert_sound(load)


def test_a_stopped_replica_is_noticed_and_comes_back(cluster):
    with Load(cluster) as load:
        cluster.replicas[1].send_signal(signal.SIGSTOP)
        try:
            time.sleep(NOTICED)
            assert set(load.after(12)) == {"right"}
        finally:
            cluster.replicas[1].send_signal(signal.SIGCONT)
        remote = cluster.reach(1)
        eventually(lambda: remote.load().running, 20)
    assert_sound(load)


def test_without_replicas_health_says_so_and_requests_are_refused_at_once(cluster):
    for replica in cluster.replicas:
        replica.kill()
        replica.wait()
    eventually(lambda: not cluster.client.healthy(), NOTICED)
    assert not cluster.ready()
    began = time.monotonic()
    assert cluster.ask([1, 2]) == "UNAVAILABLE"
    assert time.monotonic() - began < 2
    cluster.replicas = [cluster.start_replica(number) for number in range(2)]
    eventually(cluster.client.healthy, 20)
    assert cluster.ready() and cluster.ask([1, 2]) == "right"


def test_a_conductor_that_was_stopped_or_killed_leaves_no_request_behind(cluster):
    remotes = [cluster.reach(number) for number in range(2)]
    busy = lambda: any(remote.load().running for remote in remotes)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        asked = thread.submit(cluster.ask, [3, 4], LONG)
        eventually(busy)
        cluster.conductor.send_signal(signal.SIGSTOP)
        try:
            eventually(lambda: not busy(), NOTICED)
        finally:
            cluster.conductor.send_signal(signal.SIGCONT)
        assert asked.result(BOUND) == "UNAVAILABLE"
        eventually(lambda: cluster.ask([3, 4]) == "right", 20)
        asked = thread.submit(cluster.ask, [3, 4], LONG)
        eventually(busy)
        cluster.conductor.kill()
        assert asked.result(BOUND) == "UNAVAILABLE"
    eventually(lambda: not busy(), NOTICED)
