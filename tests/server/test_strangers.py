"""Callers without the cluster's secret cost a replica neither memory nor its places: conductors
come in beside them, and sessions go on."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from jaxserve.api.errors import RequestError
from jaxserve.group.channel import free_port
from jaxserve.server import replica_pb2_grpc as rpc
from jaxserve.server.remote_replica import RemoteReplica
from jaxserve.server.replica_auth import CallerProof
from jaxserve.server.replica_service import ReplicaService
from jaxserve.server.replica_session import ReplicaSession
from tests.server.fakes import FakeReplica
from tests.server.strangers import Strangers
from tests.waiting import SOON, eventually

SECRET = "of the tests of strangers"
GROWTH_MIB = 50
SILENT = 64


@pytest.fixture
def replica():
    """A process with the tests' fake replica, and its port."""
    port = free_port("127.0.0.1")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.server.replica_process", str(port), "0.005"],
        stdin=subprocess.PIPE,
        env={**os.environ, "JAXSERVE_CLUSTER_SECRET": SECRET},
    )
    try:
        yield process, port
    finally:
        process.kill()
        process.communicate()


def peak_mib(process: subprocess.Popen[bytes]) -> int:
    """Largest memory that a process has had."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) >> 10


def join(port: int) -> RemoteReplica:
    """A new conductor's session, once it has begun."""
    remote = RemoteReplica(f"127.0.0.1:{port}", SECRET.encode())
    assert remote.wait_connected(SOON), remote.fault
    return remote


@pytest.mark.parametrize(
    "mib", [120, pytest.param(10240, marks=pytest.mark.matrix)], ids=["small", "10GiB"]
)
def test_strangers_take_no_memory_and_keep_no_conductor_out(replica, mib):
    process, port = replica
    with contextlib.ExitStack() as stack:
        first = join(port)
        stack.callback(first.close)
        before = peak_mib(process)
        strangers = Strangers(port)
        stack.callback(strangers.end)
        strangers.throw_messages(mib << 20)
        strangers.throw_bytes(mib << 20)
        strangers.connect_silently(SILENT)
        strangers.call_silently(SILENT)
        second = join(port)
        stack.callback(second.close)
        growth = peak_mib(process) - before
        assert growth <= GROWTH_MIB
        assert first.alive


@pytest.fixture
def port():
    """The port of a replica in this process."""
    behind = FakeReplica()
    behind.start()
    service = ReplicaService(SECRET.encode())
    port = service.start("127.0.0.1:0")
    service.open(behind)
    try:
        yield port
    finally:
        service.stop()
        behind.close()


def test_a_proof_admits_one_call(port):
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        proof = CallerProof.begin(rpc.HandshakeStub(channel), SECRET.encode())
        session = rpc.ReplicaStub(channel).Session
        first = proof.call(session, iter(queue.SimpleQueue().get, None))
        proof.check(first)
        with pytest.raises(RequestError, match="was used") as refusal:
            proof.check(proof.call(session, iter(())))
        assert refusal.value.status == "UNAUTHENTICATED"
        assert next(first).welcome.info


def test_conductors_beyond_the_places_are_refused_until_one_leaves(port):
    sessions = [ReplicaSession(f"127.0.0.1:{port}", SECRET.encode()) for _ in range(17)]
    with contextlib.ExitStack() as stack:
        for session in sessions:
            stack.callback(session.end)
        for session in sessions[:16]:
            assert session.open().info
        with pytest.raises(RequestError, match="16 conductors") as refusal:
            sessions[16].open()
        assert refusal.value.status == "RESOURCE_EXHAUSTED"
        sessions[0].end()
        eventually(lambda: _opens(port))


def _opens(port: int) -> bool:
    session = ReplicaSession(f"127.0.0.1:{port}", SECRET.encode())
    try:
        return bool(session.open().info)
    except RequestError:
        return False
    finally:
        session.end()
