"""The leader's side of a replica with several processes: passes step commands on to all workers,
and takes what worker 0 read of the last stage.

A group forms when all workers have come and loaded their part of the weights. When one of them is
gone nothing that was computed can be used: every method raises WorkersLost until `formed` is asked,
the other workers are sent away, and the group forms anew when all have come again. The leader
itself has no device, and goes on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Set
from typing import Any

from jaxserve.api.batch import PageStores
from jaxserve.cache.tiers import Fetch
from jaxserve.costs.profiles import Link
from jaxserve.engine.block_mover import Arrival
from jaxserve.engine.command import NO_STEP, StepCommand, StepResult, WorkersLost
from jaxserve.engine.profiling.measure import first_token
from jaxserve.engine.sampling_rows import VARIANTS
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.engine.step_shapes import StepShape
from jaxserve.group.channel import Channel, Frame, accept
from jaxserve.group.connection import ChannelError
from jaxserve.group.handshake import HANDSHAKE_SECONDS, Certificate
from jaxserve.group.member import Member
from jaxserve.group.messages import Hello, Kind, difference
from jaxserve.settings.schema import ConfigError

MAX_HANDSHAKES = 64  # at a time: strangers wait
RETRY_SECONDS = 0.2
MAX_HELLO_BYTES = 1 << 16
HANGS = 3  # times hang_timeout that a step may take before the workers are given up
END_SECONDS = 5.0  # for workers to end by themselves
log = logging.getLogger(__name__)


class _Peer:
    """A worker that has joined. facts: what it said when it was loaded; status: what it says each
    second."""

    def __init__(self, channel: Channel, hello: Hello, host: str):
        self.channel = channel
        self.hello = hello
        self.host = host
        self.facts: dict[str, Any] | None = None
        self.status: dict[str, int] = {}
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()


class WorkerGroup:
    """Executes commands on the workers of a group. Implements `engine.CommandExecutor`.

    plan: what the stages of all workers together are made of. leader: what this side is, which
    workers must equal. settings: by name, for workers to follow. warm_up: have workers compile all
    programs first; progress: hears of each. tell_state: hears what the group is doing. Listens for
    workers from the start, and forms groups of them by itself. Errors: ConfigError where the
    address cannot be had.
    """

    def __init__(
        self,
        plan: StagePlan,
        member: Member,
        leader: Hello,
        settings: dict[str, Any],
        *,
        warm_up: bool = True,
        hang_timeout: float = 60.0,
        progress: Callable[[str], None] = lambda name: None,
        tell_state: Callable[[str], None] = lambda state: None,
        tls: Certificate | None = None,
    ):
        self.plan = plan
        self._member = member
        self._leader = leader
        self._settings = settings
        self._tls = tls
        self._secret = member.secret
        self._codec = plan.codec()
        self._news = threading.Condition()
        self._peers: dict[int, _Peer] = {}
        self._warm = warm_up
        self._hang_timeout = hang_timeout
        self._formed = False  # all workers have begun
        self._ready = False  # and made a token
        self._torn = True  # lost since `formed` was last asked
        self._closed = False
        self._lost = "no worker has come yet"
        self._refused: ConfigError | None = None
        self._progress = progress
        self._tell_state = tell_state
        self._results: queue.SimpleQueue[StepResult | None] = queue.SimpleQueue()
        self._issued = 0
        self._handshakes = threading.Semaphore(MAX_HANDSHAKES)
        try:
            self._listener = socket.create_server(
                (member.host, member.port), backlog=2 * member.workers
            )
        except OSError as error:
            raise ConfigError(
                "group", f"cannot listen on {member.host}:{member.port}: {error.strerror}"
            ) from None
        for run in (self._listen, self._form_again_and_again):
            threading.Thread(target=run, name="group", daemon=True).start()

    # --- joining

    def _listen(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                log.warning("no worker can join just now: %s", error)  # too many open files
                time.sleep(RETRY_SECONDS)
                continue
            self._handshakes.acquire()
            threading.Thread(
                target=self._welcome, args=(connection, address[0]), daemon=True
            ).start()

    def _welcome(self, connection: socket.socket, host: str) -> None:
        """Takes a worker in, or sends it away with the reason; then hears what it says."""
        try:
            channel = accept(connection, self._secret, self._tls)
            peer = _Peer(channel, Hello.decode(_hello(channel)), host)
        except (ChannelError, ValueError) as error:
            log.warning("a stranger at %s was refused: %s", host, error)
            connection.close()
            return
        finally:
            self._handshakes.release()
        number = peer.hello.worker
        refused = self._enter(peer)
        if refused is not None:
            log.error("worker %d at %s was refused: %s", number, host, refused["reason"])
            with contextlib.suppress(ChannelError):
                channel.send(Kind.REFUSED, json.dumps(refused).encode())
            channel.close()
            return
        log.info("worker %d has come from %s", number, host)
        try:
            while True:
                self._hear(peer, channel.receive())
        except Exception as error:  # also one that says what nobody understands
            self._leave(peer, f"worker {number} is gone ({type(error).__name__}: {error})")

    def _enter(self, peer: _Peer) -> dict[str, Any] | None:
        """Notes a worker that has come. Returns None, or why it cannot join and whether it may try
        again."""
        reason = difference(self._leader, peer.hello)
        again = False
        with self._news:
            number = peer.hello.worker
            if reason is None and not 0 <= number < self._member.workers:
                reason = f"there is no worker {number} among {self._member.workers}"
            if reason is None and number in self._peers:
                reason = f"worker {number} is here already"
                again = True  # its host may have vanished, which takes a while to notice
            if reason is None:
                self._peers[number] = peer
                self._news.notify_all()
                return None
        return {"reason": reason, "again": again}

    def _hear(self, peer: _Peer, frame: Frame) -> None:
        if frame.kind == Kind.RESULT:
            result = self._codec.decode_result(frame.content)
            with self._news:
                if self._peers.get(0) is peer:
                    self._results.put(result)
            return
        said = json.loads(frame.content)
        if frame.kind == Kind.STATUS:
            peer.status = said
        elif frame.kind == Kind.PROGRESS:
            self._progress(said["name"])
        elif frame.kind == Kind.ANSWER:
            peer.answers.put(said)
        elif frame.kind == Kind.LOADED:
            with self._news:
                peer.facts = said
                self._news.notify_all()
        elif frame.kind == Kind.FAULT:
            if said["field"] is not None:
                self._refused = ConfigError(said["field"], said["error"])
            self._leave(peer, f"worker {peer.hello.worker} failed: {said['error']}")
        else:
            raise ChannelError(f"it said {frame.kind}")

    def _leave(self, peer: _Peer, reason: str) -> None:
        """A worker is gone. Once the others have begun they cannot go on without it."""
        with self._news:
            if self._peers.get(peer.hello.worker) is not peer:
                return  # it left with its group
            if self._formed:
                self._disband(reason)
            else:
                del self._peers[peer.hello.worker]
                self._news.notify_all()
        peer.channel.close()

    def _disband(self, reason: str) -> None:
        """Sends all workers away. The caller holds the lock."""
        if not self._closed:
            log.error("the group is lost: %s", reason)
        self._formed = False
        self._ready = False
        self._torn = True
        self._lost = reason
        for peer in self._peers.values():
            peer.channel.close()
            peer.answers.put(None)
        self._peers = {}
        self._results.put(None)
        self._news.notify_all()

    # --- forming

    def _form_again_and_again(self) -> None:
        """Whenever there is no group: waits for all workers, and makes one of them."""
        while not self._closed:
            try:
                if self._gather():
                    self._prepare()
                    with self._news:
                        self._news.wait_for(lambda: not self._formed)
            except WorkersLost:
                pass  # again
            except ConfigError as error:
                with self._news:
                    self._refused = error
                    self._disband(str(error))
                return

    def _gather(self) -> bool:
        """Waits until all workers have come and loaded their weights; False where one of them left.
        Errors: ConfigError where a worker cannot work with its settings."""
        self._tell_state("waiting for workers")
        with self._news:
            self._news.wait_for(lambda: self._closed or len(self._peers) == self._member.workers)
            if self._closed:
                return False
            self._formed = True
            self._results = queue.SimpleQueue()
            self._issued = 0
            host = self._member.host
            host = f"[{host}]" if ":" in host else host
            coordinator = f"{host}:{self._peers[0].hello.port}"
            begin = {"coordinator": coordinator, "settings": self._settings}
            self._tell(Kind.BEGIN, json.dumps(begin).encode())
            self._news.wait_for(lambda: not self._formed or self._loaded)
            if self._refused is not None:
                raise self._refused
            return self._formed

    @property
    def _loaded(self) -> bool:
        return all(peer.facts is not None for peer in self._peers.values())

    def _prepare(self) -> None:
        """Has all compile, if that is wanted, and make a token. Errors: WorkersLost."""
        if self._warm:
            self._tell_state("compiling")
            statuses = self._ask("warm_up", variants=VARIANTS)
            for peer, status in zip(self._peers.values(), statuses):
                peer.status = status
        first_token(self.plan, self._execute, self._wait)
        self._tell_state("ready")
        with self._news:
            self._ready = self._formed
            self._news.notify_all()

    def formed(self, timeout: float | None = None) -> bool:
        """Waits until there is a group that makes tokens; False where that takes longer than
        `timeout` seconds. Errors: ConfigError where a worker cannot work with its settings."""
        with self._news:
            done = lambda: self._ready or self._refused is not None
            found = self._news.wait_for(done, timeout)
            if self._refused is not None:
                raise self._refused
            if found and self._ready:
                self._torn = False
            return found and self._ready

    # --- what an engine asks

    @property
    def platform(self) -> str:
        return self._fact("platform")

    @property
    def device_kind(self) -> str:
        """As the makers of the devices call them."""
        return self._fact("device_kind")

    def _fact(self, name: str) -> Any:
        peer = self._peers.get(0)
        if peer is None or peer.facts is None:
            raise WorkersLost(self._lost)
        return peer.facts[name]

    @property
    def uncompiled(self) -> Set[StepShape]:
        """None: all processes of a step must have its program when it comes."""
        return frozenset()

    def compile_others(self) -> None:
        """There are none."""

    @property
    def compiles(self) -> int:
        """Programs compiled, or read from the folder of compiled ones, by all workers."""
        return self._sum("compiles")

    @property
    def recompiles(self) -> int:
        """Programs compiled after the warm-up."""
        return self._sum("recompiles")

    def _sum(self, name: str) -> int:
        return sum(peer.status.get(name, 0) for peer in list(self._peers.values()))

    def check(self) -> None:
        """Errors: WorkersLost where what was computed is lost, also if there is a new group."""
        if self._torn:
            raise WorkersLost(self._lost)

    def execute(self, command: StepCommand) -> None:
        """Tells all workers of a command. Errors: WorkersLost."""
        self.check()
        self._execute(command)

    def _execute(self, command: StepCommand) -> None:
        content = self._codec.encode(command)
        self._issued += command.shape != NO_STEP
        self._tell(Kind.COMMAND, content)

    @property
    def lower_tiers(self) -> None:
        """None: workers keep no blocks (`build` refuses the settings that ask for it)."""
        return None

    def on_arrival(self, hear: Callable[[Arrival], None]) -> None:
        """Nothing is fetched, so nothing arrives."""

    def fetch(self, fetch: Fetch) -> None:
        raise NotImplementedError("workers have no tiers below their devices")

    def drop(self, arrival: Arrival) -> None:
        raise NotImplementedError("workers have no tiers below their devices")

    def keep(self, stores: PageStores) -> None:
        """Nothing is kept."""

    def ready(self) -> bool:
        """Whether something is there for `wait`: a result, or the news that none will come."""
        return not self._results.empty()

    def wait(self) -> StepResult:
        """Waits for what the oldest step left. Errors: WorkersLost."""
        self.check()
        return self._wait()

    def _wait(self) -> StepResult:
        try:
            result = self._results.get(timeout=HANGS * self._hang_timeout)
        except queue.Empty:
            with self._news:
                self._disband(f"no step ended for {HANGS * self._hang_timeout:g} s")
            result = None
        if result is None:
            raise WorkersLost(self._lost)
        return result

    def settle(self) -> None:
        """Waits until all that was issued is done; nobody wants the results. Errors:
        WorkersLost."""
        self._ask("settle")
        while self.ready():
            self.wait()

    def measure_links(self) -> dict[str, Link]:
        """How fast the lanes of the last stage talk to each other. Errors: WorkersLost."""
        answers = self._ask("links")
        return {name: Link(*link) for name, link in answers[0].items()}

    def _tell(self, kind: Kind, content: bytes) -> None:
        if not self._formed:
            raise WorkersLost(self._lost)
        try:
            for peer in list(self._peers.values()):
                peer.channel.send(kind, content)
        except ChannelError as error:
            with self._news:
                self._disband(f"a worker went away ({error})")
            raise WorkersLost(self._lost) from None

    def _ask(self, what: str, **arguments: Any) -> list[Any]:
        """Has all workers do something else, and returns their answers by number."""
        self._tell(Kind.ASK, json.dumps({"what": what, **arguments}).encode())
        peers = list(self._peers.values())
        answers = [peer.answers.get() for peer in peers]
        if not self._formed:
            raise WorkersLost(self._lost)
        order = sorted(range(len(peers)), key=lambda at: peers[at].hello.worker)
        return [answers[at] for at in order]

    def members(self) -> list[dict[str, Any]]:
        """For people: which workers are here, and how far behind. lag: commands that were sent and
        whose step is not finished."""
        peers = dict(self._peers)
        return [
            {
                "worker": number,
                "alive": number in peers,
                **(
                    {
                        "host": peers[number].host,
                        "lag": self._issued - peers[number].status.get("finished", 0),
                        "device_bytes": peers[number].status.get("device_bytes", 0),
                    }
                    if number in peers
                    else {}
                ),
            }
            for number in range(self._member.workers)
        ]

    def close(self) -> None:
        """Ends the workers."""
        with contextlib.suppress(WorkersLost):
            self._tell(Kind.END, b"{}")
        with self._news:
            self._closed = True
            self._news.notify_all()
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._listener.close()
            deadline = time.monotonic() + END_SECONDS
            self._news.wait_for(lambda: not self._peers, deadline - time.monotonic())
            self._disband("the engine was closed")


def _hello(channel: Channel) -> bytes:
    """Errors: ChannelError where nothing comes in time."""
    timer = threading.Timer(HANDSHAKE_SECONDS, channel.close)
    timer.start()
    try:
        frame = channel.receive()
    finally:
        timer.cancel()
    if frame.kind != Kind.HELLO or len(frame.content) > MAX_HELLO_BYTES:
        raise ChannelError("it does not say who it is")
    return frame.content
