"""Interface of what executes step commands: a `Worker` in this process, or a `WorkerGroup` that
passes them on to several."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any, Protocol

import jax

from jaxserve.api.batch import PageStores
from jaxserve.cache.tiers import LowerTiers
from jaxserve.engine.block_export import BlockWishes
from jaxserve.engine.command import StepCommand, StepResult
from jaxserve.engine.fetched_pieces import Arrival
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.engine.step_shapes import StepShape
from jaxserve.lanes.rates import LaneLinks
from jaxserve.replica.adapters import AdapterSource
from jaxserve.replica.weights import WeightsHolder
from jaxserve.store.peers import BlockExporter, PartedExporter


class CommandExecutor(Protocol):
    """Devices behind commands. Errors of any method: DeviceError, where the devices fail and can be
    used again after a reset; WorkersLost, where processes are gone. Executors are made from this
    class: what it does by itself is right where there are no tiers below the devices, no other
    process, and all programs are compiled. adapters: in host memory, from where commands bring them
    to the devices by number. goes_by_groups: whether steps may be issued group by group of their
    layers. weights: those on the devices. captured: see `HiddenStates`, of the newest step of which
    all groups are issued."""

    plan: StagePlan
    adapters: AdapterSource
    goes_by_groups: bool = False
    weights: WeightsHolder
    captured: Sequence[jax.Array] = ()

    @property
    def platform(self) -> str: ...

    @property
    def device_kind(self) -> str:
        """Name that the makers of the devices gave them."""

    @property
    def compiles(self) -> int:
        """Programs compiled, or read from the folder of compiled ones."""

    @property
    def recompiles(self) -> int:
        """Programs compiled after the warm-up."""

    @property
    def uncompiled(self) -> Set[StepShape]:
        """Shapes that no step may have yet: they are compiled beside traffic."""
        return frozenset()

    def compile_others(self) -> None:
        """Begins to compile, beside traffic, what the warm-up left."""
        return None

    def groups_ahead(self) -> int:
        """Counts groups of layers that were issued and have not run, of a step whose last group is
        not issued."""
        return 0

    def check(self) -> None:
        """Raises WorkersLost where what was computed is lost."""
        return None

    def execute(self, command: StepCommand) -> None:
        """Issues all that a command says; waits for nothing."""

    @property
    def lower_tiers(self) -> LowerTiers | None:
        """Tiers that keep blocks which leave the devices."""
        return None

    def exporter(self, wishes: BlockWishes) -> BlockExporter | PartedExporter | None:
        """Offers the blocks of lower tiers to other replicas; None without any. wishes: takes what
        these want."""
        return None

    def on_arrival(self, hear: Callable[[Arrival], None]) -> None:
        """Calls `hear` from now on, on another thread, for blocks that a fetch has brought; a later
        command loads them."""
        return None

    def keep(self, stores: PageStores) -> None:
        """Has blocks on the devices kept in lower tiers, and waits for that for a while."""
        return None

    def ready(self) -> bool:
        """Returns whether `wait` returns at once."""

    def wait(self) -> StepResult:
        """Waits for the oldest step and fetches what it left."""

    def settle(self) -> None:
        """Waits until all that was issued is done, and drops the results."""

    def measure_links(self) -> dict[int, LaneLinks]:
        """Measures how fast the lanes of the last stage talk to each other in groups of each size;
        {} for one lane."""

    def members(self) -> list[dict[str, Any]]:
        """Describes for people the processes that have the devices, if there are several."""
        return []

    def close(self) -> None:
        """Ends the processes that have the devices, if they are others."""

    def formed(self, timeout: float | None = None) -> bool:
        """Waits, after WorkersLost, until there are devices again; False where that takes longer
        than `timeout` seconds."""
        return True
