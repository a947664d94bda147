"""Executes step commands on the devices: the other side of border B.

A worker owns the stages of a replica. It runs the commands it is given, in their order, and never
waits for the devices while it issues them; results are fetched one step behind. It knows nothing of
requests: a worker in another process does the same with the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxserve.api.batch import PageStores
from jaxserve.engine.block_export import BlockWishes, TierExporter, WorkerExporter
from jaxserve.engine.block_layout import BlockLayout
from jaxserve.engine.block_mover import BlockMover
from jaxserve.engine.command import (
    NO_SAMPLING,
    NO_STEP,
    SAMPLE_LATER,
    DeviceError,
    StepCommand,
    StepResult,
)
from jaxserve.engine.executor import CommandExecutor
from jaxserve.engine.fetched_pieces import Arrival
from jaxserve.engine.host_adapters import HostAdapters, OpenAdapter
from jaxserve.engine.new_weights import OpenWeights
from jaxserve.engine.page_io import PageIo
from jaxserve.engine.profiling.links import measure_links
from jaxserve.engine.programs import Lower
from jaxserve.engine.sampling_rows import VARIANTS
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.engine.stage_weights import StageWeights
from jaxserve.engine.stages import (
    HiddenStates,
    Loader,
    SampledTokens,
    Stage,
    Stages,
    hidden_states,
)
from jaxserve.engine.step_shapes import StepShape
from jaxserve.lanes.rates import LaneLinks
from jaxserve.store.peers import PeerBlocks
from jaxserve.store.tiered import TieredBlocks

KEEP_SECONDS = 20.0  # for what is on the devices at the end
KEEP_PAGES = 32  # at a time
COMPILE_SECONDS = 120.0  # most for one program, at the end: compiling cannot be interrupted
log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Pending:
    """A step that was issued and not yet fetched. done: ready when it has left the last stage that
    has devices here."""

    number: int
    done: jax.Array
    unsampled: HiddenStates | None
    sampled: SampledTokens | None = None
    scores: list[tuple[jax.Array, ...]] = dataclasses.field(default_factory=list)
    # embeddings, and how many of each lane's are wanted at most
    pooled: list[tuple[jax.Array, int]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Partial:
    """A step of which some groups of layers are not issued. x: what the last group that was issued
    returns; ahead: the same of all that were not known to have run; captured: see `HiddenStates`;
    next: the group to be issued next."""

    command: StepCommand
    x: Any
    ahead: deque[Any]
    captured: list[jax.Array]
    next: int = 0


class Worker(CommandExecutor):
    """The devices of a replica, behind commands.

    plan: what the stages are made of. tiers: makes the tiers below the devices for the parts of
    blocks that are here; None: without. kv_heads: the model's own. peers: other replicas that are
    asked for blocks. open_adapter: see `HostAdapters`. open_weights: opens other weights; None:
    they stay. It can be used after `start`. Errors of the devices come as DeviceError from every
    method.
    """

    adapters: HostAdapters
    goes_by_groups = True

    def __init__(
        self,
        plan: StagePlan,
        tiers: Callable[[BlockLayout], TieredBlocks] | None = None,
        kv_heads: int | None = None,
        peers: PeerBlocks | None = None,
        open_adapter: OpenAdapter | None = None,
        open_weights: OpenWeights | None = None,
    ):
        self.plan = plan
        self.stages = Stages(plan)
        layers = [stage.layers for stage in self.stages.stages]
        self.adapters = HostAdapters(plan, layers, open_adapter)
        self.weights = StageWeights(self.stages, open_weights)
        self._uncompiled: Set[StepShape] = frozenset()
        self._compiler: threading.Thread | None = None
        self._closed = False
        self._pending: deque[_Pending] = deque()
        self._partial: _Partial | None = None
        self._arrived: Callable[[Arrival], None] = lambda arrival: None
        self._settled: Callable[[Sequence[bytes]], None] = lambda keys: None
        self.mover: BlockMover | None = None
        if tiers is not None:
            io = PageIo(self.stages, kv_heads or plan.model.kv_heads)
            self.mover = BlockMover(
                io,
                tiers(io.layout),
                lambda arrival: self._arrived(arrival),
                lambda keys: self._settled(keys),
                peers,
            )

    # --- what it is

    @property
    def device(self) -> jax.Device:
        """One of the devices; all are of its kind."""
        return self.stages.last_mesh.devices.flat[0]

    @property
    def platform(self) -> str:
        return self.device.platform

    @property
    def device_kind(self) -> str:
        return self.device.device_kind

    @property
    def compiles(self) -> int:
        return self.stages.programs.compiles

    @property
    def recompiles(self) -> int:
        return self.stages.programs.recompiles

    @property
    def uncompiled(self) -> Set[StepShape]:
        return self._uncompiled

    @property
    def lower_tiers(self) -> TieredBlocks | None:
        return None if self.mover is None else self.mover.tiers

    def start(
        self,
        load: Loader,
        shapes: Collection[StepShape],
        done: Callable[[str], None],
        variants: tuple[str, ...] = VARIANTS,
    ) -> None:
        """Reads the weights, and compiles meanwhile what steps of these shapes that sample in these
        variants can need, if there are any shapes; `done` is called with the name of each program.
        Pools are made last: what is tried while programs are tuned then has the memory that pools
        will fill. Errors: those of `load`, as soon as a program is compiled."""
        with ThreadPoolExecutor(1, "weights") as reader:
            loading = reader.submit(self.stages.load, load)

            def compiled(name: str) -> None:
                done(name)
                if loading.done():
                    loading.result()

            if shapes:
                self.warm_up(compiled, variants, shapes)
            loading.result()
        self.stages.reset()

    def warm_up(
        self,
        done: Callable[[str], None],
        variants: tuple[str, ...] = VARIANTS,
        shapes: Collection[StepShape] | None = None,
    ) -> None:
        """Compiles all programs that steps of these shapes can need (None: of all); `done` is
        called with the name of each."""
        self._uncompiled = {*self.plan.shapes}.difference(shapes or self.plan.shapes)
        programs = self.programs(self.plan.shapes, variants)
        first = self.programs(shapes or self.plan.shapes, variants)
        self.stages.programs.expect(programs)
        self.stages.programs.warm_up(first, done)

    def programs(
        self, shapes: Iterable[StepShape], variants: tuple[str, ...] = VARIANTS
    ) -> dict[str, Lower]:
        """Returns all programs that steps of these shapes can need, what every step needs first."""
        programs = dict(self.stages.programs.of_shapes(shapes, variants))
        programs |= dict(self.stages.programs.of_all_shapes())
        if self.mover is not None:
            programs |= dict(self.mover.io.programs())
        return programs

    def compile_others(self) -> None:
        """Compiles in a thread, beside traffic, what `warm_up` left, the cheapest steps first."""
        if self._uncompiled and self._compiler is None:
            self._compiler = threading.Thread(
                target=self._compile_others, name="compiler", daemon=True
            )
            self._compiler.start()

    def _compile_others(self) -> None:
        began = time.monotonic()
        for shape in self.plan.shapes:
            if shape not in self._uncompiled:
                continue
            for name, lower in self.stages.programs.of_shapes([shape]):
                if self._closed:
                    return
                self.stages.programs.get(name, lower)
            self._uncompiled = self._uncompiled - {shape}  # a new set: others read the old one
        log.info("all programs are compiled, the last ones in %.1f s", time.monotonic() - began)

    # --- what it does

    def execute(self, command: StepCommand) -> None:
        with _device_errors():
            if command.reset:
                self._pending.clear()
                self._partial = None
                self.stages.reset()
            for admission in command.admissions:
                self.stages.admit(admission)
            for place, number in command.adapter_loads.tolist():
                self.stages.set_adapter(place, self.adapters[number])
            if len(command.stores):
                self._mover.store(command.stores)
            for row in command.loads.tolist():
                self._mover.load(Arrival(*row))
            for fetch in command.fetches:
                self._mover.fetch(fetch)
            self.stages.set_table(command.table_updates)
            self.stages.restore_states(command.restores)
            if command.shape != NO_STEP and command.groups:
                assert self._partial is None, "one step is issued in part already"
                self._partial = _Partial(command, self.stages.feed(command.reads), deque(), [])
                self._run_groups(command.groups)
            elif command.shape != NO_STEP:
                self._run_layers(command)
            elif command.groups:
                self._run_groups(command.groups)
            elif command.variant >= 0:
                self._sample(self._pending[-1], command)

    def _run_layers(self, command: StepCommand) -> None:
        shape = self.plan.shapes[command.shape]
        with contextlib.ExitStack() as stack:
            store: Callable[[Stage], None] = lambda stage: None
            if len(command.computed):
                store = stack.enter_context(self._mover.storing(command.computed))

            def after(stage: Stage) -> None:
                self.stages.save_states(stage, command.saves)  # on pages that are stored too
                store(stage)

            hidden = self.stages.step(shape, command.rows, command.reads, after)
        self._leave(command, hidden)

    def _run_groups(self, count: int) -> None:
        """Runs the next groups of layers of the step that is issued in part, and after the last one
        what follows the layers."""
        step = self._partial
        assert step is not None, "no step is issued in part"
        shape = self.plan.shapes[step.command.shape]
        stop = step.next + count
        save = lambda stage: self.stages.save_states(stage, step.command.saves)
        rows = step.command.rows
        x = self.stages.run(range(step.next, stop), shape, rows, step.x, step.captured, save)
        if stop == len(self.stages.meshes):
            self._partial = None
            self._leave(step.command, hidden_states(x, step.captured))
            return
        step.x = x
        step.next = stop
        step.ahead.append(x)

    def groups_ahead(self) -> int:
        step = self._partial
        if step is None:
            return 0
        while step.ahead and step.ahead[0].is_ready():
            step.ahead.popleft()
        return len(step.ahead)

    def _leave(self, command: StepCommand, hidden: HiddenStates | None) -> None:
        """Issues what follows the layers of a step."""
        done = self.stages.newest if hidden is None else hidden.ints
        unsampled = None if command.variant == NO_SAMPLING else hidden
        step = _Pending(command.number, done, unsampled)
        self._pending.append(step)
        if command.variant not in (NO_SAMPLING, SAMPLE_LATER):
            self._sample(step, command)
        if hidden is not None:
            self.captured = hidden.captured
            for token, target in command.scores:
                step.scores.append(self.stages.score(hidden, token, target))
            for token in command.pools:
                wanted = int((token >= 0).sum(1).max())
                step.pooled.append((self.stages.pool(hidden, token), wanted))

    def _sample(self, step: _Pending, command: StepCommand) -> None:
        has_last = self.stages.has_last
        assert step.unsampled is not None or not has_last, f"step {step.number} is sampled already"
        variant = VARIANTS[command.variant]
        step.sampled = self.stages.sample(step.unsampled, variant, command.masks)
        step.unsampled = None
        if step.sampled is not None and self.platform != "cpu":  # there tokens are read in place
            step.sampled.tokens.copy_to_host_async()

    # --- blocks of lower tiers

    @property
    def _mover(self) -> BlockMover:
        assert self.mover is not None, "there are no tiers below the devices"
        return self.mover

    def exporter(self, wishes: BlockWishes) -> TierExporter:
        io = self._mover.io
        return TierExporter(wishes, self._mover.tiers, io.layout.by_part, io.layer_groups)

    def own_exporter(self) -> WorkerExporter:
        """Offers the parts of blocks that are here, where this is one of several workers."""
        return WorkerExporter(self._mover.tiers, self._mover.io.layout.by_part)

    def on_arrival(self, hear: Callable[[Arrival], None]) -> None:
        self._arrived = hear

    def on_settled(self, hear: Callable[[Sequence[bytes]], None]) -> None:
        """Calls `hear` from now on, on any thread, for blocks that commands had stored, or that
        could not be stored after all."""
        self._settled = hear

    def keep(self, stores: PageStores) -> None:
        deadline = time.monotonic() + KEEP_SECONDS
        for at in range(0, len(stores), KEEP_PAGES):
            with _device_errors():
                self._mover.store(stores[at : at + KEEP_PAGES])
            while not self._mover.stored and time.monotonic() < deadline:
                time.sleep(0.001)
            if time.monotonic() >= deadline:
                log.warning("%d of %d blocks were not kept in time", len(stores) - at, len(stores))
                return

    # --- what comes of it

    def ready(self) -> bool:
        """Returns whether the oldest step has left the last stage."""
        if not self._pending:
            return False
        return self._pending[0].done.is_ready()  # type: ignore[attr-defined]

    def wait(self) -> StepResult:
        step = self._pending.popleft()
        with _device_errors():
            # without tokens too: what runs ahead, arrivals wait behind
            step.done.block_until_ready()
            tokens = None
            logprobs: tuple[np.ndarray, ...] = ()
            if step.sampled is not None:
                tokens = np.asarray(step.sampled.tokens)
                logprobs = tuple(np.asarray(part) for part in step.sampled.logprobs)
            scores = tuple(tuple(np.asarray(part) for part in parts) for parts in step.scores)
            pooled = tuple(np.asarray(part)[:, :wanted] for part, wanted in step.pooled)
        return StepResult(step.number, tokens, logprobs, scores, pooled)

    def close(self, compile_seconds: float = COMPILE_SECONDS) -> None:
        """Ends what moves blocks, and compiles no more; the devices are this process's.
        compile_seconds: that a program which is being compiled is waited for; 0 for a process that
        ends at once."""
        self._closed = True
        if self._compiler is not None:
            self._compiler.join(compile_seconds)
        if self.mover is not None:
            self.mover.close()

    def measure_links(self) -> dict[int, LaneLinks]:
        """Measures how fast the lanes of the last stage talk to each other in groups of each size;
        {} for one lane, or where another process has them all."""
        return measure_links(self.stages.last_mesh) if self.stages.has_last else {}

    def settle(self) -> None:
        with _device_errors():
            if self._pending:
                last = self._pending[-1]
                last.done.block_until_ready()
                if last.sampled is not None:
                    last.sampled.tokens.block_until_ready()
            self._pending.clear()


@contextlib.contextmanager
def _device_errors() -> Iterator[None]:
    """Raises what JAX raises where a device fails as DeviceError."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise DeviceError(str(error)) from error
