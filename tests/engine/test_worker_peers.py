"""A leader does not wait for ever for a worker that hangs. The workers are fakes without JAX."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxserve.engine import worker_peers
from jaxserve.engine.command import WorkersLost
from jaxserve.engine.worker_group import uncompiled_anywhere
from jaxserve.engine.worker_peers import Listener, Peers
from jaxserve.group.channel import connect, free_port
from jaxserve.group.member import LEADER, SECRET_VARIABLE, Member
from jaxserve.group.messages import Hello, Kind
from tests.waiting import eventually

WORKER = """
import os, sys, time
from jaxserve.group.channel import connect
from jaxserve.group.member import SECRET_VARIABLE
from jaxserve.group.messages import Kind
from tests.engine.test_worker_peers import hello
channel = connect(("127.0.0.1", int(sys.argv[1])), os.environ[SECRET_VARIABLE].encode())
channel.send(Kind.HELLO, hello().encode())
while True:
    channel.send(Kind.STATUS, b"{}")
    time.sleep(0.05)
"""


def hello() -> Hello:
    return Hello(0, {}, {}, "weights", 1)


class Leader:
    """A leader of one worker, and what it heard."""

    def __init__(self, monkeypatch):
        self.secret = secrets.token_hex(16)
        monkeypatch.setenv(SECRET_VARIABLE, self.secret)
        self.port = free_port("127.0.0.1")
        self.peers = Peers(1, hello())
        member = Member(LEADER, 1, "127.0.0.1", self.port)
        self.listener = Listener(member, None, self.peers, self._hear)

    def _hear(self, peer, frame) -> None:
        if frame.kind == Kind.PROGRESS:
            peer.progressed_at = time.monotonic()
        elif frame.kind == Kind.ANSWER:
            peer.answers.put(frame.content)

    def form(self) -> None:
        eventually(lambda: self.peers.complete)
        self.peers.begin()

    def close(self) -> None:
        self.peers.closed = True
        self.listener.close()
        self.peers.disband("closed")


@pytest.fixture
def leader(monkeypatch):
    monkeypatch.setattr(worker_peers, "LOOK_SECONDS", 0.4)
    leader = Leader(monkeypatch)
    yield leader
    leader.close()


def test_a_stopped_worker_is_given_up_whatever_it_was_asked(leader):
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(leader.port)],
        env=os.environ,
    )
    try:
        leader.form()
        time.sleep(5)  # longer than a silent one is waited for
        assert leader.peers.formed
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(WorkersLost, match="worker 0 has said nothing for 4 s"):
            leader.peers.ask("settle", 60)
    finally:
        process.kill()
        process.wait()


def answering(leader: Leader, parts: int) -> threading.Thread:
    """Joins as a worker that makes progress so many times, 0.3 s apart, and answers then, and lives
    on where it was asked for no progress."""
    channel = connect(("127.0.0.1", leader.port), leader.secret.encode())
    channel.send(Kind.HELLO, hello().encode())

    def run() -> None:
        with contextlib.suppress(OSError):
            while channel.receive().kind != Kind.ASK:
                pass
            for _ in range(parts):
                time.sleep(0.3)
                channel.send(Kind.PROGRESS, b"{}")
            if parts:
                channel.send(Kind.ANSWER, b"done")
            while True:
                time.sleep(0.1)
                channel.send(Kind.STATUS, b"{}")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_a_warm_up_may_take_long_while_it_makes_progress(leader):
    answering(leader, parts=15)
    leader.form()
    assert leader.peers.ask("warm_up", 3.5) == [b"done"]


def test_a_warm_up_that_makes_no_progress_ends_the_group(leader):
    thread = answering(leader, parts=0)
    leader.form()
    with pytest.raises(WorkersLost, match=r"warm_up of worker 0 hangs since 0\.5 s"):
        leader.peers.ask("warm_up", 0.5)
    thread.join(60)
    assert not thread.is_alive(), "the worker is sent away"


def test_no_step_may_have_a_shape_that_one_of_the_workers_has_not_compiled():
    shapes = ["small", "middle", "large"]
    statuses = [{"uncompiled": [0]}, {"uncompiled": [0, 1]}, {"uncompiled": []}, {}]
    assert uncompiled_anywhere(shapes, statuses) == {"small", "middle"}
    assert uncompiled_anywhere(shapes, statuses[2:]) == set()
