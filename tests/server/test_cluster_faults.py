"""A conductor and replicas as processes, under load while one of them is killed or stopped: every
request ends with the right tokens, or with UNAVAILABLE if its conductor was lost, soon, and health
tells the truth. The replicas are the tests' fakes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Collection, Sequence

import pytest

from jaxserve.api.errors import RequestError
from jaxserve.api.sampling import SamplingParams
from jaxserve.group.channel import lasting_ports
from jaxserve.server.client import Client
from jaxserve.server.remote_replica import ANSWER_SECONDS, RemoteReplica
from jaxserve.text.output import CompletionCollector, Delta
from tests.server.fakes import expected
from tests.waiting import SOON, eventually

SECRET = "of the tests of clusters"
ENVIRONMENT = {**os.environ, "JAXSERVE_CLUSTER_SECRET": SECRET}
STEP = 0.005  # seconds
BOUND = 60.0  # seconds in which a request has to end, whatever happens
NOTICED = 8.0  # seconds after which a fault was noticed
TOKENS = 60
LONG = 4000  # tokens
LONG_SECONDS = LONG * STEP  # that a request takes at least if nothing ends it
CALLERS = 6


class Cluster:
    """Replicas with these roles and a conductor, as processes. prompt: tokens of the requests of
    its load."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        roles: Sequence[str] = ("mixed", "mixed"),
        prompt: int = 2,
    ):
        self._stack = stack
        self._roles = roles
        self._prompt = prompt
        self.ports = lasting_ports(len(roles), "127.0.0.1")
        self.replicas = [self.start_replica(number) for number in range(len(roles))]
        self.conductor, self.client, self.url = self.start_conductor()

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
        port, role = str(self.ports[number]), self._roles[number]
        return self._start("tests.server.replica_process", port, str(STEP), role)

    def start_conductor(self) -> tuple[subprocess.Popen[str], Client, str]:
        """A conductor over the replicas, a client of it, and its address for HTTP."""
        targets = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        conductor = self._start(
            "jaxserve", "conductor", "--model=random:none", f"--replicas={targets}",
            "--grpc_port=0", "--port=0", "--drain_timeout=1",
        )  # fmt: skip
        grpc, url = (conductor.stdout.readline().strip() for _ in range(2))
        client = self._stack.enter_context(Client(grpc))
        client.wait_ready(60)
        return conductor, client, url

    def load_prompt(self, caller: int, asked: int) -> list[int]:
        """A prompt that no other request of its load has."""
        return [caller + 1, asked % 200, *[7] * (self._prompt - 2)]

    def members(self) -> list[dict]:
        """Returns what the conductor shows of the replicas."""
        with urllib.request.urlopen(f"{self.url}/page/data", timeout=SOON) as answer:
            return json.load(answer)["members"]

    def ready(self) -> bool:
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(f"{self.url}/ready", timeout=SOON).status == 200
        return False

    def ask(
        self,
        prompt: list[int],
        tokens: int = TOKENS,
        client: Client | None = None,
        spoke: threading.Event | None = None,
    ) -> str:
        """'right', 'wrong', or the status of an error. client: of another conductor. spoke: set
        with the first token."""
        client = client or self.client
        spoke = spoke or threading.Event()
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        collector = CompletionCollector(prompt)
        try:
            for output in client.generate(prompt, sampling, timeout=200, ids_only=True):
                collector.add(output)
                if isinstance(output, Delta):
                    spoke.set()
        except RequestError as error:
            return error.status
        return (
            "right" if list(collector.completions()[0].ids) == expected(prompt, tokens) else "wrong"
        )

    def reach(self, number: int) -> RemoteReplica:
        """A session with a replica beside the conductor's."""
        remote = RemoteReplica(f"127.0.0.1:{self.ports[number]}", SECRET.encode())
        self._stack.callback(remote.close)
        assert remote.wait_connected(SOON)
        return remote


class Load:
    """Callers that ask without a pause, until the block ends. client: of another conductor than the
    cluster's. outcomes: of each request, its result and its seconds."""

    def __init__(self, cluster: Cluster, client: Client | None = None):
        self._cluster = cluster
        self._client = client
        self._over = threading.Event()
        self._threads = concurrent.futures.ThreadPoolExecutor(CALLERS)
        self.outcomes: list[tuple[str, float]] = []

    def __enter__(self) -> Load:
        self._running = [self._threads.submit(self._call, number) for number in range(CALLERS)]
        eventually(lambda: len(self.outcomes) >= CALLERS)
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
            prompt = self._cluster.load_prompt(number, asked)
            outcome = self._cluster.ask(prompt, client=self._client)
            self.outcomes.append((outcome, time.monotonic() - began))

    def after(self, count: int) -> list[str]:
        """The next so many results from now on."""
        before = len(self.outcomes) + CALLERS  # those that run may have begun before
        eventually(lambda: len(self.outcomes) >= before + count, BOUND)
        return [outcome for outcome, _ in self.outcomes[before:]]


def assert_sound(load: Load, outcomes: Collection[str] = ("right", "UNAVAILABLE")) -> None:
    assert {outcome for outcome, _ in load.outcomes} <= set(outcomes)
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
        eventually(lambda: remote.load().running)
    assert_sound(load, ["right"])


def test_a_stopped_replica_is_noticed_and_comes_back(cluster):
    with Load(cluster) as load:
        cluster.replicas[1].send_signal(signal.SIGSTOP)
        try:
            time.sleep(NOTICED)
            assert set(load.after(12)) == {"right"}
        finally:
            cluster.replicas[1].send_signal(signal.SIGCONT)
        remote = cluster.reach(1)
        eventually(lambda: remote.load().running)
    assert_sound(load, ["right"])


def test_without_replicas_health_says_so_and_requests_are_refused_at_once(cluster):
    for replica in cluster.replicas:
        replica.kill()
        replica.wait()
    eventually(lambda: not cluster.client.healthy())
    assert not cluster.ready()
    began = time.monotonic()
    assert cluster.ask([1, 2]) == "UNAVAILABLE"
    assert time.monotonic() - began < ANSWER_SECONDS, "no replica is waited for"
    cluster.replicas = [cluster.start_replica(number) for number in range(2)]
    eventually(cluster.client.healthy)
    assert cluster.ready() and cluster.ask([1, 2]) == "right"


def assert_conductors_may_be_killed_beside_another(cluster: Cluster, kills: int) -> None:
    """Checks that requests of the conductor that stays are served throughout; of the others nothing
    is left behind."""
    remotes = [cluster.reach(number) for number in range(len(cluster.ports))]
    with Load(cluster) as staying:
        for _ in range(kills):
            second, client, _ = cluster.start_conductor()
            with Load(cluster, client) as killed:
                others = sum(remote.other_requests for remote in remotes)
                second.kill()
                second.wait()
                assert set(killed.after(CALLERS)) == {"UNAVAILABLE"}
            assert others > 0 and "right" in {outcome for outcome, _ in killed.outcomes}
            assert_sound(killed)
        assert set(staying.after(12)) == {"right"}
    assert {outcome for outcome, _ in staying.outcomes} == {"right"}
    assert_sound(staying)
    eventually(lambda: not any(remote.other_requests for remote in remotes))
    assert not any(remote.load().running for remote in remotes)
    assert_nothing_left(cluster)


def test_a_conductor_is_killed_beside_another_one_over_the_same_replicas(cluster):
    assert_conductors_may_be_killed_beside_another(cluster, kills=1)


def begun(cluster: Cluster, thread: concurrent.futures.Executor) -> concurrent.futures.Future[str]:
    """Asks for LONG tokens and waits for the first: before it a request that is lost begins anew on
    another replica, and takes as long as that takes."""
    spoke = threading.Event()
    asked = thread.submit(cluster.ask, [3, 4], LONG, spoke=spoke)
    assert spoke.wait(BOUND)
    return asked


def test_a_conductor_that_was_stopped_or_killed_leaves_no_request_behind(cluster):
    remotes = [cluster.reach(number) for number in range(2)]
    busy = lambda: any(remote.load().running for remote in remotes)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        asked = begun(cluster, thread)
        cluster.conductor.send_signal(signal.SIGSTOP)
        try:
            eventually(lambda: not busy(), LONG_SECONDS * 3 / 4)
        finally:
            cluster.conductor.send_signal(signal.SIGCONT)
        # it may go on at another replica once the conductor does
        assert asked.result(BOUND + LONG_SECONDS) in ("right", "UNAVAILABLE")
        eventually(lambda: cluster.ask([3, 4]) == "right")
        asked = begun(cluster, thread)
        cluster.conductor.kill()
        assert asked.result(BOUND) == "UNAVAILABLE"
    eventually(lambda: not busy(), LONG_SECONDS * 3 / 4)


# --- replicas with roles


@pytest.fixture(scope="module")
def parted():
    """Two replicas that prefill and two that decode."""
    with contextlib.ExitStack() as stack:
        cluster = Cluster(stack, ("prefill", "prefill", "decode", "decode"), prompt=100)
        eventually(lambda: all(member["usable"] for member in cluster.members()))
        yield cluster


@pytest.mark.matrix
@pytest.mark.parametrize("number", [0, 2], ids=["prefill", "decode"])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_one_of_each_role_may_be_lost_under_load_and_come_back(parted, number, fault):
    with Load(parted) as load:
        parted.replicas[number].send_signal(fault)
        try:
            time.sleep(NOTICED if fault == signal.SIGSTOP else 0.1)
            assert set(load.after(12)) == {"right"}
            assert parted.ready()
        finally:
            if fault == signal.SIGSTOP:
                parted.replicas[number].send_signal(signal.SIGCONT)
            else:
                parted.replicas[number].wait()
                parted.replicas[number] = parted.start_replica(number)
        eventually(lambda: all(member["usable"] for member in parted.members()))
        assert set(load.after(12)) == {"right"}
    assert_sound(load)
    assert_nothing_left(parted)


@pytest.mark.matrix
def test_without_one_of_the_roles_the_other_serves(parted):
    for gone in ((0, 1), (2, 3)):
        for number in gone:
            parted.replicas[number].kill()
            parted.replicas[number].wait()
        eventually(lambda: sum(member["usable"] for member in parted.members()) == 2)
        assert parted.ready() and parted.ask(parted.load_prompt(1, 1)) == "right"
        for number in gone:
            parted.replicas[number] = parted.start_replica(number)
        eventually(lambda: all(member["usable"] for member in parted.members()))
    assert_nothing_left(parted)


@pytest.mark.matrix
def test_conductors_are_killed_again_and_again_beside_another_one(parted):
    assert_conductors_may_be_killed_beside_another(parted, kills=10)


def assert_nothing_left(cluster: Cluster) -> None:
    def idle() -> bool:
        rows = cluster.members()
        books = not any(row["prefills"] or row["decodes"] for row in rows)
        return books and not any(row["load"]["running"] for row in rows)

    eventually(idle)
