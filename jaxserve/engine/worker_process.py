"""A worker in a process of its own: joins the leader's group, loads its part of the weights, and
executes the leader's commands until the leader is gone.

Commands are issued to the devices as they come. A second thread waits for the steps, one after the
other: worker 0, which has the last stage, sends what they left; and in every worker that is where
it comes to light that a step failed. Whatever fails ends the process: the group shares one fate,
and its supervisor restarts it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax

from jaxserve.api.errors import RequestError
from jaxserve.engine import distributed
from jaxserve.engine.command import NO_STEP, SAMPLE_LATER, StepCommand
from jaxserve.engine.fetched_pieces import Arrival
from jaxserve.engine.loading import hello_of, make_worker
from jaxserve.engine.memory import claim
from jaxserve.engine.stages import Loader
from jaxserve.engine.tier_reports import TierReports
from jaxserve.engine.worker import Worker
from jaxserve.group.channel import Channel, connect
from jaxserve.group.connection import ChannelError
from jaxserve.group.handshake import StrangerError
from jaxserve.group.layout import devices_each
from jaxserve.group.member import LOST, REFUSED, SECRET_VARIABLE, Member, Pulse
from jaxserve.group.messages import Kind, led_by
from jaxserve.lanes.rates import links_to_json
from jaxserve.settings.schema import ConfigError, EngineConfig
from jaxserve.store.peers import PeerBlocks, WorkerPort
from jaxserve.weights import open_checkpoint

JOIN_SECONDS = 600.0  # that the leader may take to listen
RETRY_SECONDS = 0.2
STATUS_SECONDS = 1.0
BESIDE_STEPS = ("load_adapter", "read_weights")  # what is answered so
log = logging.getLogger(__name__)


OpenPort = Callable[[str], WorkerPort | None]


def work(config: EngineConfig, member: Member, open_port: OpenPort | None = None) -> NoReturn:
    """Runs this worker of the group until it ends, and the process with it. open_port: opens the
    port for other replicas' blocks, given this machine's address in the group; without it, or where
    it returns None, others have no blocks from here."""
    pulse = Pulse(member)
    try:
        channel = _join(config, member)
        with _alive(channel):
            begin = _begin(channel, pulse)
            with _reporting(channel):
                config = led_by(begin["settings"], config)
                port = None
                if open_port is not None and config.cache.host_cache_gib:
                    port = open_port(channel.own_host)
                peers = None if port is None else port.peers
                join = begin["coordinator"], channel.own_host
                worker, load = _joined(config, member, join, pulse, peers)
        _Process(member, worker, load, channel, pulse, port).run()
        code = 0
    except ConfigError as error:
        print(f"{member.name}: {error}", file=sys.stderr, flush=True)
        code = REFUSED
    except ChannelError as error:
        log.warning("%s ends: the leader is gone (%s)", member.name, error)
        code = LOST
    except Exception:
        log.exception("%s failed", member.name)
        code = LOST
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no collective that hangs, and no handler of JAX, may hold the process


def _join(config: EngineConfig, member: Member) -> Channel:
    """Finds the leader and asks to join. Errors: ConfigError where the leader refuses; ChannelError
    where no leader answers."""
    channel = _connected(member)
    channel.send(Kind.HELLO, hello_of(config, member.worker).encode())
    return channel


def _connected(member: Member) -> Channel:
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            return connect((member.host, member.port), member.secret, bool(member.tls_cert))
        except StrangerError as error:
            raise ConfigError("secret", f"{error}: see {SECRET_VARIABLE}") from None
        except ChannelError as error:
            if time.monotonic() > deadline:
                raise ChannelError(f"no leader at {member.host}:{member.port} ({error})") from None
        time.sleep(RETRY_SECONDS)


def _begin(channel: Channel, pulse: Pulse) -> dict[str, Any]:
    """Waits until all have come. Errors: ConfigError where the leader refuses this worker."""
    pulse.tell(state="joining")
    frame = channel.receive()
    content = json.loads(frame.content)
    if frame.kind == Kind.REFUSED and content["again"]:
        raise ChannelError(f"refused for now: {content['reason']}")
    if frame.kind == Kind.REFUSED:
        raise ConfigError("group", f"refused by the leader: {content['reason']}")
    return content


def _joined(
    config: EngineConfig,
    member: Member,
    join: tuple[str, str],
    pulse: Pulse,
    peers: PeerBlocks | None,
) -> tuple[Worker, Loader]:
    """Joins JAX's processes, and makes this one's worker and what reads its part of the weights.
    join: address of their coordinator, and this machine's own."""
    coordinator, own_host = join
    pulse.tell(state="loading")
    each = devices_each(config.mesh, member.workers, member.ranks_across_hosts)
    claim(config.cache.gpu_memory_utilization, config.mesh.devices)
    distributed.join(
        coordinator,
        member.worker,
        member.workers,
        each,
        member.local * each,
        own_host,
        shared_stage=each < config.mesh.kvp * config.mesh.tp,
    )
    checkpoint = open_checkpoint(config.source.model, config.source.revision)
    return make_worker(_with_own_folder(config, member), checkpoint, False, peers)


def _with_own_folder(config: EngineConfig, member: Member) -> EngineConfig:
    """Settings with which this worker keeps its parts of blocks in a folder of its own, beside
    those of other workers on the same disk."""
    if config.cache.disk_folder is None:
        return config
    folder, gib = config.cache.disk_folder
    own = folder / f"worker-{member.worker}"
    own.mkdir(parents=True, exist_ok=True, mode=0o700)
    cache = dataclasses.replace(config.cache, disk_cache=f"{own}:{gib}")
    return dataclasses.replace(config, cache=cache)


@contextlib.contextmanager
def _alive(channel: Channel) -> Iterator[None]:
    """Sends the leader empty statuses inside, before there is anything to say."""
    over = threading.Event()
    threading.Thread(target=_send_signs, args=(channel, over), daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _send_signs(channel: Channel, over: threading.Event) -> None:
    with contextlib.suppress(ChannelError):  # the main thread gets it too
        while not over.wait(STATUS_SECONDS):
            channel.send(Kind.STATUS, b"{}")


@contextlib.contextmanager
def _reporting(channel: Channel) -> Iterator[None]:
    """Reports to the leader what goes wrong inside."""
    try:
        yield
    except ChannelError:
        raise
    except Exception as error:
        content: dict[str, str | None] = {
            "field": None,
            "error": f"{type(error).__name__}: {error}",
        }
        if isinstance(error, ConfigError):
            content = {"field": error.field, "error": error.message}
        with contextlib.suppress(ChannelError):
            channel.send(Kind.FAULT, json.dumps(content).encode())
        raise


class _Process:
    """A worker that has joined: starts when the leader says so, executes its commands, and answers
    its questions. load: reads the weights. port: at which it offers its parts of blocks."""

    def __init__(
        self,
        member: Member,
        worker: Worker,
        load: Loader,
        channel: Channel,
        pulse: Pulse,
        port: WorkerPort | None = None,
    ):
        self._member = member
        self._port = port
        self._worker = worker
        self._load = load
        self._channel = channel
        self._pulse = pulse
        self._codec = worker.plan.codec()
        self._steps: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._issued = 0
        self._finished = 0
        self._news = threading.Condition()

    def run(self) -> None:
        """Executes until the leader ends the group. Errors: those that `work` handles."""
        facts: dict[str, Any] = {
            "platform": self._worker.platform,
            "device_kind": self._worker.device_kind,
            "process": os.getpid(),
        }
        if self._port is not None:
            facts["place"] = self._offer_blocks(self._port)
        self._channel.send(Kind.PLANNED, json.dumps(facts).encode())
        self._start_thread(self._wait_for_steps)
        self._start_thread(self._send_status)
        self._report_blocks()
        while True:
            frame = self._channel.receive()
            if frame.kind == Kind.COMMAND:
                with _reporting(self._channel):
                    self._execute(self._codec.decode(frame.content))
            elif frame.kind == Kind.ASK:
                content = json.loads(frame.content)
                if content["what"] in BESIDE_STEPS:
                    self._start_thread(functools.partial(self._answer, **content))
                    continue
                with _reporting(self._channel):
                    self._answer(**content)
            elif frame.kind == Kind.BLOCKS:
                self._ask_for_blocks(**json.loads(frame.content))
            elif frame.kind == Kind.DROP_ADAPTER:
                self._worker.adapters.drop(json.loads(frame.content)["number"])
            elif frame.kind == Kind.COMPILE:
                self._worker.compile_others()
            elif frame.kind == Kind.END:
                if self._port is not None:
                    self._port.close()
                self._worker.close(compile_seconds=0)  # what is in host memory goes to disk
                return
            else:
                raise ChannelError(f"the leader sent a frame of kind {frame.kind}")

    # --- blocks of lower tiers

    def _offer_blocks(self, port: WorkerPort) -> dict[str, Any]:
        """Begins to offer parts of blocks to other replicas; returns which, and where."""
        exporter = self._worker.own_exporter()
        port.open(exporter)
        part = exporter.layout.part
        ranges = {"layers": part.layers, "heads": part.heads}
        named = {name: (each.start, each.stop) for name, each in ranges.items()}
        return {"part": named, "address": port.address}

    def _report_blocks(self) -> None:
        """Begins to report to the leader what happens to parts of blocks."""
        tiers = self._worker.lower_tiers
        if tiers is None:
            return
        reports = TierReports(tiers, functools.partial(self._channel.send, Kind.TIERS))
        self._worker.on_settled(reports.settled)
        self._worker.on_arrival(self._send_arrival)
        self._start_thread(reports.run)

    def _send_arrival(self, arrival: Arrival) -> None:
        self._channel.send(Kind.ARRIVED, json.dumps(arrival).encode())

    def _ask_for_blocks(self, what: str, keys: list[str], retention: int) -> None:
        tiers = self._worker.lower_tiers
        assert tiers is not None, "there are no tiers below the devices"
        named = list(map(bytes.fromhex, keys))
        if what == "keep":
            tiers.keep(named, retention)
        elif what == "prefetch":
            tiers.prefetch(named)
        else:
            change = {"lock": tiers.lock, "unlock": tiers.unlock}[what]
            for key in named:
                change(key)

    # --- for the leader

    def _execute(self, command: StepCommand) -> None:
        self._worker.execute(command)
        later = command.variant == SAMPLE_LATER
        sampled_now = command.shape == NO_STEP and command.variant >= 0
        if (command.shape != NO_STEP and not later) or sampled_now:
            self._issued += 1
            self._steps.put(command.number)

    def _answer(self, what: str, **arguments: Any) -> None:
        weights = self._worker.weights
        answers: dict[str, Callable[..., Any]] = {
            "start": self._begin,
            "settle": self._settle,
            "links": self._links,
            "load_adapter": self._load_adapter,
            "read_weights": lambda path: _or_error(lambda: weights.read(path)),
            "use_weights": lambda: _or_error(weights.use),
            "forget_weights": lambda: _or_error(weights.forget),
            "sleep": lambda level: _or_error(lambda: weights.sleep(level)),
            "wake": lambda: _or_error(weights.wake),
        }
        answer = answers[what](**arguments)
        self._channel.send(Kind.ANSWER, json.dumps(answer).encode())

    def _begin(self, shapes: list[int]) -> dict[str, Any]:
        first = [self._worker.plan.shapes[number] for number in shapes]
        self._worker.start(self._load, first, self._progress)
        self._pulse.tell(state="ready")
        return self._counts()

    def _progress(self, name: str) -> None:
        self._channel.send(Kind.PROGRESS, json.dumps({"name": name}).encode())

    def _settle(self) -> None:
        with self._news:
            self._news.wait_for(lambda: self._finished == self._issued)

    def _load_adapter(self, number: int, folder: str) -> dict[str, str]:
        try:
            return {"fingerprint": self._worker.adapters.load(number, folder)}
        except RequestError as error:
            return {"field": error.field, "error": str(error), "status": error.status}

    def _links(self) -> dict[str, Any]:
        self._settle()
        return links_to_json(self._worker.measure_links())

    # --- beside it

    def _start_thread(self, run: Callable[[], None]) -> None:
        threading.Thread(target=self._or_end, args=(run,), daemon=True).start()

    def _or_end(self, run: Callable[[], None]) -> None:
        """Runs a thread that the process cannot be without."""
        try:
            with _reporting(self._channel):
                run()
        except ChannelError:
            pass  # the main thread gets it too
        except Exception:
            log.exception("%s failed", self._member.name)
            os._exit(LOST)

    def _wait_for_steps(self) -> None:
        """Waits for each step; worker 0 sends what it left."""
        while True:
            self._steps.get()
            result = self._worker.wait()
            if self._member.worker == 0:
                self._channel.send(Kind.RESULT, self._codec.encode_result(result))
            with self._news:
                self._finished += 1
                self._news.notify_all()

    def _send_status(self) -> None:
        while True:
            self._channel.send(Kind.STATUS, json.dumps(self._counts()).encode())
            time.sleep(STATUS_SECONDS)

    def _counts(self) -> dict[str, Any]:
        """Counts how far this worker is; see `WorkerGroup.members`. uncompiled: numbers of the
        shapes that no step may have yet."""
        uncompiled = self._worker.uncompiled
        shapes = enumerate(self._worker.plan.shapes)
        memory = [device.memory_stats() or {} for device in jax.local_devices()]
        return {
            "issued": self._issued,
            "finished": self._finished,
            "compiles": self._worker.compiles,
            "recompiles": self._worker.recompiles,
            "uncompiled": [number for number, shape in shapes if shape in uncompiled],
            "device_bytes": sum(stats.get("bytes_in_use", 0) for stats in memory),
        }


def _or_error(work: Callable[[], str | None]) -> dict[str, str]:
    """Runs work of a worker, which may return a fingerprint; returns that, or the error, for the
    leader."""
    try:
        found = work()
    except RequestError as error:
        return {"field": error.field, "error": error.message, "status": error.status}
    return {} if found is None else {"fingerprint": found}
