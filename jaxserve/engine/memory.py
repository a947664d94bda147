"""Estimates the device memory of a replica from its plan, without allocating anything, and how much
of a device is left for KV."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np

from jaxserve.checkpoint.delta_net import DeltaNetSpec
from jaxserve.checkpoint.model import layers_of, padded_vocab
from jaxserve.checkpoint.page_groups import pool_count
from jaxserve.engine import sampling
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.engine.stage_programs import POOL_AXES
from jaxserve.group.member import this_member
from jaxserve.models.decoder import LayerCache
from jaxserve.settings.schema import ConfigError
from jaxserve.settings.schema.cache import memory_share
from jaxserve.sharding.mesh import KVP, TP
from jaxserve.sharding.rules import devices
from jaxserve.weights.kept import arrays

F32 = 4
CPU_KV_GIB = 1.0  # for a device whose memory is not known
# of what JAX has: for what is neither weights nor KV nor in the estimate of a step
RESERVED_GIB = 2.0
SHARE_VARIABLE = "XLA_CLIENT_MEM_FRACTION"
SHARE_VARIABLES = (SHARE_VARIABLE, "XLA_PYTHON_CLIENT_MEM_FRACTION")
TOTALS = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")  # MiB
TOTALS_SECONDS = 20.0
log = logging.getLogger(__name__)


def claimed_share(share: float, devices: int) -> float:
    """Returns the share of a GPU's memory that JAX takes: what the environment says, else `share`,
    less what collectives take where a mesh has several devices."""
    given = _given_share()
    return memory_share(share, devices) if given is None else given


def claim(share: float, devices: int) -> None:
    """Has JAX take a share of each GPU's memory, see `claimed_share`, where the environment does
    not say how much. Comes before JAX is used, and has no effect afterwards."""
    if _given_share() is None:
        os.environ[SHARE_VARIABLE] = f"{memory_share(share, devices):g}"


def _given_share() -> float | None:
    """Returns the share that the environment names; None where it names none."""
    given = filter(None, map(os.environ.get, SHARE_VARIABLES))
    return next(map(float, given), None)


@dataclasses.dataclass(frozen=True)
class DeviceRoom:
    """A device: its platform, and the bytes of its memory that JAX has; None where it does not
    tell."""

    platform: str
    bytes: int | None

    @classmethod
    def here(cls) -> DeviceRoom:
        """Returns the room of this process's devices, which are of one kind. Processes of a group
        must all come to the same, and their leader has no devices: they look at the machine only,
        and workers follow the leader in what depends on memory."""
        if this_member() is not None:
            return cls(_likely_platform(), None)
        device = jax.local_devices()[0]
        stats = device.memory_stats() or {} if device.platform != "cpu" else {}
        return cls(device.platform, stats.get("bytes_limit"))

    @classmethod
    def of_machine(cls, share: float, devices: int) -> DeviceRoom:
        """Returns the room of this machine's GPU that has least, without asking JAX, which would
        take it: what a replica with this many devices has by `claim`."""
        platform = _likely_platform()
        if platform == "cpu":
            return cls(platform, None)
        try:
            found = subprocess.run(
                TOTALS, capture_output=True, text=True, timeout=TOTALS_SECONDS, check=True
            )
            least = min(map(int, found.stdout.split()))
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            log.warning(
                "the memory of GPUs is not known, so %g GiB are for KV: %s", CPU_KV_GIB, error
            )
            return cls(platform, None)
        return cls(platform, int(least * 2**20 * claimed_share(share, devices)))

    def without(self, taken: int) -> DeviceRoom:
        """Returns what is left where something else takes bytes of it."""
        return self if self.bytes is None else DeviceRoom(self.platform, self.bytes - taken)


def has_room(shapes: Iterable[jax.ShapeDtypeStruct]) -> bool:
    """Returns whether this process's devices, or the machine where they are its CPUs, have memory
    left for arrays of these shapes and shardings."""
    needed = Counter[jax.Device]()
    for shape in shapes:
        assert shape.sharding is not None
        part = math.prod(shape.sharding.shard_shape(shape.shape)) * shape.dtype.itemsize
        needed.update(dict.fromkeys(shape.sharding.addressable_devices, part))
    stats = {device: device.memory_stats() for device in needed if device.platform != "cpu"}
    if not all(stats.values()) or not stats:
        return sum(needed.values()) < _host_bytes()
    return all(
        needed[device] < each["bytes_limit"] - each["bytes_in_use"]
        for device, each in stats.items()
        if each is not None
    )


def _host_bytes() -> int:
    """Returns the bytes of host memory that can be had, those that only hold files among them."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not on Linux
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = next(line for line in lines if line.startswith("MemAvailable:"))
    return 2**10 * int(available.split()[1])


def _likely_platform() -> str:
    """Guesses the platform that JAX will find, without asking it: it would take the devices."""
    on_cpu = os.environ.get("JAX_PLATFORMS", "").startswith("cpu")
    return "cpu" if on_cpu or not Path("/dev/nvidiactl").exists() else "gpu"


def kv_bytes(plan: StagePlan, given_gib: float | None, share: float, room: DeviceRoom) -> int:
    """Bytes of a device for pages and states. plan: with any number of pages. given_gib: what the
    settings say. share: of the device's memory that `room` is. Errors: ConfigError where nothing
    is left."""
    if given_gib is not None or room.bytes is None:
        return int((CPU_KV_GIB if given_gib is None else given_gib) * 2**30)
    needed = sizes(plan)
    taken = needed.total - needed.kv - needed.states + int(RESERVED_GIB * 2**30)
    room_left = room.bytes - taken
    if room_left <= 0:
        fault = (
            f"{room.bytes / 2**30:.1f} GiB, at {share:g} of the device, leave nothing for KV "
            f"beside {taken / 2**30:.1f} GiB of weights and programs: more ranks or stages in the "
            "mesh, or a larger share"
        )
        raise ConfigError("gpu_memory_utilization", fault)
    return room_left


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes on the device that needs most. weights (with places of adapters), kv (pages), states
    (of all slots): exact. tables: page tables and sampling state. work: estimate of the activations
    of the largest step."""

    weights: int
    kv: int
    tables: int
    work: int
    states: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.tables + self.work + self.states


def sizes(plan: StagePlan) -> Sizes:
    """Bytes per device of a replica with this plan."""
    stages = layers_of(plan.model, plan.mesh.spp)
    weights = [
        sum(
            _part(d.shape, d.axes, plan) * d.dtype(np.dtype(plan.dtype)).itemsize
            for d in arrays(plan.parameters(part).values())
        )
        + adapter_bytes(plan, part)
        for part in stages
    ]
    return Sizes(
        max(weights),
        max(pool_count(plan.model, plan.windows, part, plan.layer_groups) for part in stages)
        * _pool_bytes(plan.pool(), plan),
        _tables(plan),
        _work(plan),
        max(state_bytes(plan, part) for part in stages),
    )


def adapter_bytes(plan: StagePlan, layers: range) -> int:
    """Bytes on a device of the adapters in all places, in some layers."""
    if plan.adapters is None:
        return 0
    both = [d for each in plan.factors(layers).values() for d in (each.down, each.up)]
    elements = sum(_part(d.shape, d.axes, plan) for d in both)
    return plan.adapters.places * elements * np.dtype(plan.dtype).itemsize


def state_bytes(plan: StagePlan, layers: range) -> int:
    """Bytes on a device of the states of all slots, in some layers."""
    stateful = [layer for layer in layers if not plan.model.mixer(layer).has_pages]
    return sum(_pool_bytes(plan.cache(layer), plan) for layer in stateful)


def _pool_bytes(pool: LayerCache, plan: StagePlan) -> int:
    return sum(_part(x.shape, POOL_AXES, plan) * x.dtype.itemsize for x in jax.tree.leaves(pool))


def _part(shape: tuple[int, ...], axes: Iterable[str | None], plan: StagePlan) -> int:
    """Elements of an array with these logical axes that one device holds."""
    degrees = {TP: plan.mesh.tp, KVP: plan.mesh.kvp}
    return math.prod(shape) // math.prod(devices(axis, degrees) for axis in axes)


def _tables(plan: StagePlan) -> int:
    """Bytes of page table and sampling state on a device of the last stage, where tokens are
    sampled."""
    vocab = padded_vocab(plan.model, plan.mesh.tp) // plan.mesh.tp
    state = sum(
        math.prod(shape) * dtype.itemsize
        for shape, dtype in sampling.empty_state(1, plan.slots, vocab).values()
    )
    tables = plan.layer_groups * plan.page_groups
    return state + tables * 2 * plan.slots * plan.width * F32


def _work(plan: StagePlan) -> int:
    """Bytes of the largest step: four copies of its hidden states, three of what is widest in a
    layer (heads, or the MLP's inner states; or what Gated DeltaNet has), and three of the logits in
    f32; and hidden states that are captured, of a step and the one before it, once here and, as all
    lanes' are brought to one device, once for each of them."""
    model = plan.model
    tp = plan.mesh.tp
    item = np.dtype(plan.dtype).itemsize
    tokens = max(shape.tokens for shape in plan.shapes)
    heads = 3 * (model.heads + 2 * model.kv_heads) * model.head_dim // tp
    deltas = [spec.share(tp) for spec in model.mixers if isinstance(spec, DeltaNetSpec)]
    widest = max(heads, model.inner(tp), *(spec.inner(item) for spec in deltas))
    if plan.adapters is not None:  # what they add: sorted by adapter, and in its place
        widest += 2 * max(heads, 2 * model.inner(tp)) + 2 * model.d_model
    captured = 2 * len(plan.captured) * (1 + plan.mesh.kvp) * model.d_model
    logits = max(plan.samples) * padded_vocab(model, tp) // tp
    return tokens * (4 * model.d_model + widest + captured) * item + 3 * logits * F32
