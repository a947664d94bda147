"""The leader's side of a replica with several processes: passes step commands on to all workers,
and takes what worker 0 read of the last stage.

A group forms when all workers have come, and is ready when all have started. When one of them is
gone nothing that was computed can be used: every method raises WorkersLost until `formed` is
called, the other workers are sent away, and the group forms again when all have come. The leader
itself has no device, and goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from jaxserve.api.batch import PageStores
from jaxserve.engine.block_export import BlockWishes, GroupExporter
from jaxserve.engine.command import NO_STEP, StepCommand, StepResult, WorkersLost
from jaxserve.engine.executor import CommandExecutor
from jaxserve.engine.fetched_pieces import Arrival
from jaxserve.engine.group_adapters import GroupAdapters
from jaxserve.engine.group_fetches import GroupFetches
from jaxserve.engine.group_weights import GroupWeights
from jaxserve.engine.profiling.measure import first_token
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.engine.step_shapes import StepShape, first_shapes
from jaxserve.engine.worker import KEEP_PAGES, KEEP_SECONDS
from jaxserve.engine.worker_peers import Listener, Peer, Peers
from jaxserve.group.channel import Frame
from jaxserve.group.connection import ChannelError
from jaxserve.group.handshake import Certificate
from jaxserve.group.member import Member
from jaxserve.group.messages import Hello, Kind
from jaxserve.lanes.rates import LaneLinks, links_from_json
from jaxserve.settings.schema import ConfigError
from jaxserve.store.block_part import BlockPart, PartPlace
from jaxserve.store.parts import PartIndex

HANGS = 3  # times hang_timeout that a step may take before the workers are given up
START_SECONDS = 7200.0  # that weights may take, and one program more than those before it
END_SECONDS = 5.0  # for workers to end by themselves
WRITE_SECONDS = 60.0  # where they write first what is in host memory to their disks
AskForBlocks = Callable[[str, Sequence[bytes], int], None]
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class GroupTerms:
    """Conditions that workers must accept. leader: what workers must equal. settings: by name, for
    workers to follow. warm_up: whether programs that hold every batch are compiled first.
    hang_timeout: seconds, see the setting."""

    leader: Hello
    settings: dict[str, Any]
    warm_up: bool = True
    hang_timeout: float = 60.0


class WorkerGroup(CommandExecutor):
    """Executes commands on the workers of a group. Each keeps its parts of the blocks that leave
    the devices; which blocks there are is known here.

    plan: what the stages of all workers together are made of. progress: called with the name of
    each compiled program. tell_state: called with what the group is doing. Listens for workers from
    the start, and forms groups of them by itself. tiers: makes the index of the blocks below the
    devices; None: workers keep none. Errors: ConfigError where the address cannot be had.
    """

    adapters: GroupAdapters

    def __init__(
        self,
        plan: StagePlan,
        member: Member,
        terms: GroupTerms,
        progress: Callable[[str], None] = lambda name: None,
        tell_state: Callable[[str], None] = lambda state: None,
        tls: Certificate | None = None,
        tiers: Callable[[AskForBlocks], PartIndex] | None = None,
    ):
        self.plan = plan
        self._member = member
        self._terms = terms
        self._codec = plan.codec()
        self._progress = progress
        self._tell_state = tell_state
        self._issued = 0
        self._compiles_others = False
        self._hang_seconds = HANGS * terms.hang_timeout  # after which a step is given up
        self._tiers = None if tiers is None else tiers(self._ask_for_blocks)
        self._fetches = GroupFetches(member.workers)
        self._arrived: Callable[[Arrival], None] = lambda arrival: None
        self._peers = Peers(member.workers, terms.leader)
        self.adapters = GroupAdapters(self._peers)
        self.weights = GroupWeights(self._peers)
        self._listener = Listener(member, tls, self._peers, self._hear)
        threading.Thread(target=self._keep_forming, name="group", daemon=True).start()

    def _hear(self, peer: Peer, frame: Frame) -> None:
        """Takes a frame from a worker. Errors: ChannelError for an unknown kind."""
        if frame.kind == Kind.RESULT:
            self._peers.took_result(peer, self._codec.decode_result(frame.content))
            return
        content = json.loads(frame.content)
        if frame.kind in (Kind.TIERS, Kind.ARRIVED):
            self._hear_of_blocks(peer, frame.kind, content)
            return
        if frame.kind == Kind.STATUS:
            peer.status = content
        elif frame.kind == Kind.PROGRESS:
            peer.progressed_at = time.monotonic()
            self._progress(content["name"])
        elif frame.kind == Kind.ANSWER:
            peer.answers.put(content)
        elif frame.kind == Kind.PLANNED:
            with self._peers.changed:
                peer.facts = content
                self._peers.changed.notify_all()
        elif frame.kind == Kind.FAULT:
            if content["field"] is not None:
                self._peers.refused = ConfigError(content["field"], content["error"])
            self._peers.leave(peer, f"worker {peer.hello.worker} failed: {content['error']}")
        else:
            raise ChannelError(f"it sent a frame of kind {frame.kind}")

    def _hear_of_blocks(self, peer: Peer, kind: int, content: Any) -> None:
        """Takes in what a worker says of its parts of blocks, if it is still in the group."""
        worker = peer.hello.worker
        if self._tiers is None or self._peers.get(worker) is not peer:
            return
        if kind == Kind.TIERS:
            self._tiers.report(worker, content)
            return
        arrival = self._fetches.arrived(worker, Arrival(*content))
        if arrival is not None:
            self._arrived(arrival)

    # --- forming

    def _keep_forming(self) -> None:
        """Forms a group of all workers whenever there is none."""
        peers = self._peers
        while not peers.closed:
            try:
                if self._gather():
                    self._prepare()
                    with peers.changed:
                        peers.changed.wait_for(lambda: not peers.formed)
            except WorkersLost:
                pass  # again
            except ConfigError as error:
                with peers.changed:
                    peers.refused = error
                    peers.disband(str(error))
                return

    def _gather(self) -> bool:
        """Waits until all workers have come and know their parts; False where one of them left.
        Errors: ConfigError where a worker cannot work with its settings."""
        self._tell_state("waiting for workers")
        peers = self._peers
        with peers.changed:
            peers.changed.wait_for(lambda: peers.closed or peers.complete)
            if peers.closed:
                return False
            peers.begin()
            self._issued = 0
            self._fetches.clear()
            if self._tiers is not None:
                self._tiers.reset()
            host = self._member.host
            host = f"[{host}]" if ":" in host else host
            coordinator = f"{host}:{peers.all[0].hello.port}"
            begin = {"coordinator": coordinator, "settings": self._terms.settings}
            peers.tell(Kind.BEGIN, json.dumps(begin).encode())
            peers.changed.wait_for(lambda: not peers.formed or peers.planned)
            if peers.refused is not None:
                raise peers.refused
            return peers.formed

    def _prepare(self) -> None:
        """Has all workers load their weights, compile what holds every batch, if the terms ask for
        it, and make a token. Errors: ConfigError where a worker cannot; WorkersLost."""
        peers = self._peers
        self._tell_state("loading")
        first = first_shapes(self.plan.shapes) if self._terms.warm_up else []
        shapes = [self.plan.shapes.index(shape) for shape in first]
        try:
            statuses = peers.ask("start", START_SECONDS, shapes=shapes)
        except WorkersLost:
            if peers.refused is not None:
                raise peers.refused from None
            raise
        for peer, status in zip(peers.all, statuses):
            peer.status = status
        self.adapters.load_again()
        self.weights.use_again()
        first_token(self.plan, self._execute, self._wait, self.uncompiled)
        if self._compiles_others:
            peers.tell(Kind.COMPILE, b"{}")
        self._tell_state("ready")
        with peers.changed:
            peers.ready = peers.formed
            peers.changed.notify_all()

    def formed(self, timeout: float | None = None) -> bool:
        """Waits until there is a group that makes tokens; False where that takes longer than
        `timeout` seconds. Errors: ConfigError where a worker cannot work with its settings."""
        peers = self._peers
        with peers.changed:
            peers.changed.wait_for(lambda: peers.ready or peers.refused is not None, timeout)
            if peers.refused is not None:
                raise peers.refused
            if peers.ready:
                peers.torn = False
            return peers.ready

    # --- what an engine asks

    @property
    def platform(self) -> str:
        return self._fact("platform")

    @property
    def device_kind(self) -> str:
        return self._fact("device_kind")

    def _fact(self, name: str) -> Any:
        peer = self._peers.get(0)
        if peer is None or peer.facts is None:
            raise WorkersLost(self._peers.lost)
        return peer.facts[name]

    @property
    def compiles(self) -> int:
        return sum(peer.status.get("compiles", 0) for peer in self._peers.all)

    @property
    def recompiles(self) -> int:
        return sum(peer.status.get("recompiles", 0) for peer in self._peers.all)

    @property
    def uncompiled(self) -> Set[StepShape]:
        statuses = [peer.status for peer in self._peers.all]
        return uncompiled_anywhere(self.plan.shapes, statuses)

    def compile_others(self) -> None:
        """Has all workers compile, beside steps, what the warm-up left; also those of later
        groups."""
        self._compiles_others = True
        with contextlib.suppress(WorkersLost):  # the next group begins when it forms
            self._peers.tell(Kind.COMPILE, b"{}")

    def check(self) -> None:
        """Checks that nothing was lost. Errors: WorkersLost where what was computed is lost, also
        if there is a new group."""
        if self._peers.torn:
            raise WorkersLost(self._peers.lost)

    def execute(self, command: StepCommand) -> None:
        self.check()
        self._execute(command)

    def _execute(self, command: StepCommand) -> None:
        content = self._codec.encode(command)
        self._issued += command.shape != NO_STEP
        for fetch in command.fetches:
            self._fetches.begin(fetch.ticket)
        for ticket, _, _, last in command.loads.tolist():
            if last:
                self._fetches.end(ticket)
        if self._tiers is not None:
            self._tiers.expect([*command.stores.keys, *command.computed.keys])
        self._peers.tell(Kind.COMMAND, content)

    # --- blocks of lower tiers

    @property
    def lower_tiers(self) -> PartIndex | None:
        return self._tiers

    def exporter(self, wishes: BlockWishes) -> GroupExporter | None:
        if self._tiers is None:
            return None
        return GroupExporter(wishes, self._tiers, self._tiers.layout, self._places)

    def _places(self) -> list[PartPlace]:
        """Returns where the workers offer their parts of blocks; none unless all do."""
        facts = [peer.facts or {} for peer in self._peers.all]
        if len(facts) < self._member.workers or not all("place" in each for each in facts):
            return []
        return [
            PartPlace(_part(**each["place"]["part"]), each["place"]["address"]) for each in facts
        ]

    def on_arrival(self, hear: Callable[[Arrival], None]) -> None:
        self._arrived = hear

    def _ask_for_blocks(self, what: str, keys: Sequence[bytes], retention: int) -> None:
        content = {"what": what, "keys": [key.hex() for key in keys], "retention": retention}
        with contextlib.suppress(WorkersLost):  # the next command raises it
            self._peers.tell(Kind.BLOCKS, json.dumps(content).encode())

    def keep(self, stores: PageStores) -> None:
        if self._tiers is None or not len(stores):
            return
        with contextlib.suppress(WorkersLost):
            deadline = time.monotonic() + KEEP_SECONDS
            for first in range(0, len(stores), KEEP_PAGES):
                some = stores[first : first + KEEP_PAGES]
                self.execute(StepCommand(NO_STEP, stores=some))
                while not self._tiers.settled and time.monotonic() < deadline:
                    time.sleep(0.001)
                if time.monotonic() >= deadline:
                    left = len(stores) - first
                    log.warning("%d of %d blocks were not kept in time", left, len(stores))
                    return

    # --- what comes of commands

    def ready(self) -> bool:
        """Returns whether `wait` returns at once: with a result, or because none will come."""
        return not self._peers.results.empty()

    def wait(self) -> StepResult:
        self.check()
        return self._wait()

    def _wait(self) -> StepResult:
        seconds = self._hang_seconds
        try:
            result = self._peers.results.get(timeout=seconds)
        except queue.Empty:
            self._peers.disband(f"no step ended for {seconds:g} s")
            result = None
        if result is None:
            raise WorkersLost(self._peers.lost)
        return result

    def settle(self) -> None:
        self._peers.ask("settle", self._hang_seconds)
        while self.ready():
            self.wait()

    def measure_links(self) -> dict[int, LaneLinks]:
        measured = self._peers.ask("links", self._hang_seconds)
        last_stage = filter(None, measured)  # {} where a worker has no last stage
        return links_from_json(next(last_stage, {}), self.plan.mesh.kvp)

    def members(self) -> list[dict[str, Any]]:
        return self._peers.members(self._issued)

    def close(self) -> None:
        """Ends the workers."""
        peers = self._peers
        with contextlib.suppress(WorkersLost):
            peers.tell(Kind.END, b"{}")
        with peers.changed:
            peers.closed = True
            peers.changed.notify_all()
            self._listener.close()
            outlasts = self._tiers is not None and self._tiers.outlasts
            seconds = WRITE_SECONDS if outlasts else END_SECONDS
            peers.changed.wait_for(lambda: not peers.all, seconds)
            peers.disband("the engine was closed")


def _part(layers: tuple[int, int], heads: tuple[int, int]) -> BlockPart:
    return BlockPart(range(*layers), range(*heads))


def uncompiled_anywhere(
    shapes: Sequence[StepShape], statuses: Iterable[Mapping[str, Any]]
) -> Set[StepShape]:
    """Returns the shapes of which any worker lacks a program, by what all said last: were a step
    to have one, all would wait for that worker."""
    numbers = {number for status in statuses for number in status.get("uncompiled", ())}
    return frozenset(shapes[number] for number in numbers)
