"""The workers of a group, as their leader knows them, and what became of the group."""

from __future__ import annotations

import json
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from jaxserve.engine.command import StepResult, WorkersLost
from jaxserve.group.channel import Channel, Frame, accept
from jaxserve.group.connection import ChannelError
from jaxserve.group.handshake import HANDSHAKE_SECONDS, Certificate
from jaxserve.group.member import Member
from jaxserve.group.messages import Hello, Kind, difference
from jaxserve.settings.schema import ConfigError

MAX_HANDSHAKES = 64  # at a time: strangers wait
RETRY_SECONDS = 0.2
MAX_HELLO_BYTES = 1 << 16
LOOK_SECONDS = 1.0  # between looks at who is silent; a worker sends a status as often
SILENT_LOOKS = 10  # after which a worker that said nothing is gone
NO_ANSWER = object()
log = logging.getLogger(__name__)


class Peer:
    """A worker that has joined. facts: what it sent before it started; status: what it sends each
    second. silent_looks: since its last frame; progressed_at: monotonic seconds of the last part of
    an answer."""

    def __init__(self, channel: Channel, hello: Hello, host: str):
        self.channel = channel
        self.hello = hello
        self.host = host
        self.facts: dict[str, Any] | None = None
        self.status: dict[str, Any] = {}
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.silent_looks = 0
        self.progressed_at = 0.0


class Peers:
    """The workers of a group by number, for any thread. The group is formed once all have begun,
    ready once they made a token, and lost when one of them is gone. `changed` is its lock, and is
    notified of each change."""

    def __init__(self, workers: int, leader: Hello):
        self.changed = threading.Condition()
        self._asking = threading.Lock()  # answers do not say what they answer
        self.formed = False
        self.ready = False
        self.torn = True  # lost since `WorkerGroup.formed` was called last
        self.closed = False
        self.lost = "no worker has come yet"  # why there is no group
        self.refused: ConfigError | None = None
        self.results: queue.SimpleQueue[StepResult | None] = queue.SimpleQueue()
        self._workers = workers
        self._leader = leader
        self._peers: dict[int, Peer] = {}

    @property
    def all(self) -> list[Peer]:
        """Workers that have come, by number. Needs no lock: it is kept while a group forms."""
        return [peer for _, peer in sorted(self._peers.copy().items())]

    @property
    def complete(self) -> bool:
        """Returns whether all workers have come."""
        return len(self._peers) == self._workers

    @property
    def planned(self) -> bool:
        """Returns whether all workers that have come know their parts."""
        return all(peer.facts is not None for peer in self.all)

    def get(self, number: int) -> Peer | None:
        """The worker with this number, if it has come."""
        return self._peers.get(number)

    # --- coming and going

    def enter(self, peer: Peer) -> dict[str, Any] | None:
        """Notes a worker that has come. Returns None, or why it cannot join and whether it may try
        again."""
        reason = difference(self._leader, peer.hello)
        number = peer.hello.worker
        again = False
        with self.changed:
            if reason is None and not 0 <= number < self._workers:
                reason = f"there is no worker {number} among {self._workers}"
            if reason is None and number in self._peers:
                reason = f"worker {number} is here already"
                again = True  # its host may have vanished, which takes a while to notice
            if reason is not None:
                return {"reason": reason, "again": again}
            self._peers[number] = peer
            self.changed.notify_all()
            return None

    def leave(self, peer: Peer, reason: str) -> None:
        """Notes that a worker is gone. Once the others have begun they cannot go on without it."""
        with self.changed:
            if self._peers.get(peer.hello.worker) is not peer:
                return  # it left with its group
            if self.formed:
                self.disband(reason)
            else:
                del self._peers[peer.hello.worker]
                self.changed.notify_all()
        peer.channel.close()

    def begin(self) -> None:
        """Forms the group of the workers that have come."""
        with self.changed:
            self.formed = True
            self.results = queue.SimpleQueue()

    def disband(self, reason: str) -> None:
        """Sends all workers away."""
        with self.changed:
            if not self.closed:
                log.error("the group is lost: %s", reason)
            self.formed = False
            self.ready = False
            self.torn = True
            self.lost = reason
            for peer in self._peers.values():
                peer.channel.close()
                peer.answers.put(None)
            self._peers = {}
            self.results.put(None)
            self.changed.notify_all()

    # --- messages

    def took_result(self, peer: Peer, result: StepResult) -> None:
        """Passes on what a step left, if its sender is still worker 0."""
        with self.changed:
            if self._peers.get(0) is peer:
                self.results.put(result)

    def tell(self, kind: Kind, content: bytes) -> None:
        """Sends all workers a frame. Errors: WorkersLost."""
        if not self.formed:
            raise WorkersLost(self.lost)
        try:
            for peer in self.all:
                peer.channel.send(kind, content)
        except ChannelError as error:
            self.disband(f"a worker went away ({error})")
            raise WorkersLost(self.lost) from None

    def ask(self, what: str, seconds: float, **arguments: Any) -> list[Any]:
        """Has all workers do something else than a step, and returns their answers by number. Gives
        the group up where a worker makes no progress for `seconds`. Errors: WorkersLost."""
        with self._asking:
            asked_at = time.monotonic()
            peers = self.all
            self.tell(Kind.ASK, json.dumps({"what": what, **arguments}).encode())
            answers = []
            for peer in peers:
                while (answer := _answer(peer, LOOK_SECONDS)) is NO_ANSWER:
                    if time.monotonic() - max(asked_at, peer.progressed_at) > seconds:
                        number = peer.hello.worker
                        self.disband(f"{what} of worker {number} hangs since {seconds:g} s")
                answers.append(answer)
        if not self.formed:
            raise WorkersLost(self.lost)
        return answers

    def look(self) -> None:
        """Gives up workers that have said nothing in `SILENT_LOOKS` of these. Counts looks and not
        seconds, so that a leader that was stopped itself reads first what has come meanwhile."""
        for peer in self.all:
            peer.silent_looks += 1
            if peer.silent_looks > SILENT_LOOKS:
                seconds = SILENT_LOOKS * LOOK_SECONDS
                self.leave(peer, f"worker {peer.hello.worker} has said nothing for {seconds:g} s")

    def members(self, issued: int) -> list[dict[str, Any]]:
        """Describes all workers for people. lag: steps, of those `issued`, that are not
        finished."""
        return [self._described(number, issued) for number in range(self._workers)]

    def _described(self, number: int, issued: int) -> dict[str, Any]:
        peer = self._peers.get(number)
        if peer is None:
            return {"worker": number, "alive": False}
        return {
            "worker": number,
            "alive": True,
            "host": peer.host,
            "lag": issued - peer.status.get("finished", 0),
            "device_bytes": peer.status.get("device_bytes", 0),
        }


def _answer(peer: Peer, seconds: float) -> Any:
    """Waits for a worker's answer; returns NO_ANSWER if none comes in time."""
    try:
        return peer.answers.get(timeout=seconds)
    except queue.Empty:
        return NO_ANSWER


class Listener:
    """Takes in workers that connect, and passes on what they send to `hear`. Errors: ConfigError
    where the address cannot be had."""

    def __init__(
        self,
        member: Member,
        tls: Certificate | None,
        peers: Peers,
        hear: Callable[[Peer, Frame], None],
    ):
        self._secret = member.secret
        self._tls = tls
        self._peers = peers
        self._hear = hear
        self._handshakes = threading.Semaphore(MAX_HANDSHAKES)
        address = member.host, member.port
        try:
            self._socket = socket.create_server(address, backlog=2 * member.workers)
        except OSError as error:
            fault = f"cannot listen on {member.host}:{member.port}: {error.strerror}"
            raise ConfigError("group", fault) from None
        for run in (self._listen, self._watch):
            threading.Thread(target=run, name="group", daemon=True).start()

    def close(self) -> None:
        """Takes no more workers in."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, address = self._socket.accept()
            except OSError as error:
                if self._peers.closed:
                    return
                log.warning("no worker can join just now: %s", error)  # too many open files
                time.sleep(RETRY_SECONDS)
                continue
            self._handshakes.acquire()
            if self._tls is not None:
                self._tls = self._tls.renewed()
            threading.Thread(
                target=self._welcome, args=(connection, address[0]), daemon=True
            ).start()

    def _watch(self) -> None:
        while not self._peers.closed:
            time.sleep(LOOK_SECONDS)
            self._peers.look()

    def _welcome(self, connection: socket.socket, host: str) -> None:
        """Takes a worker in, or sends it away with the reason; then passes on what it sends."""
        try:
            channel = accept(connection, self._secret, self._tls)
            peer = Peer(channel, Hello.decode(_hello(channel)), host)
        except (ChannelError, ValueError) as error:
            log.warning("a stranger at %s was refused: %s", host, error)
            connection.close()
            return
        finally:
            self._handshakes.release()
        number = peer.hello.worker
        refused = self._peers.enter(peer)
        if refused is not None:
            log.error("worker %d at %s was refused: %s", number, host, refused["reason"])
            with suppress(ChannelError):
                channel.send(Kind.REFUSED, json.dumps(refused).encode())
            channel.close()
            return
        log.info("worker %d has come from %s", number, host)
        try:
            while True:
                frame = channel.receive()
                peer.silent_looks = 0
                self._hear(peer, frame)
        except Exception as error:  # also of frames that cannot be read
            self._peers.leave(peer, f"worker {number} is gone ({type(error).__name__}: {error})")


def _hello(channel: Channel) -> bytes:
    """Receives a worker's first frame. Errors: ChannelError where it does not come in time."""
    timer = threading.Timer(HANDSHAKE_SECONDS, channel.close)
    timer.start()
    try:
        frame = channel.receive()
    finally:
        timer.cancel()
    if frame.kind != Kind.HELLO or len(frame.content) > MAX_HELLO_BYTES:
        raise ChannelError("its first frame is not a hello")
    return frame.content
