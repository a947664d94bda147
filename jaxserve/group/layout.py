"""Places of the processes' devices in the mesh.

Ranks (tp) stay within a process, lanes (kvp) where they fit, and stages (spp) go across: what
crosses hosts most often is least. The last stage, which samples, begins on worker 0, which sends
the leader the tokens.
"""

from __future__ import annotations

import numpy as np

from jaxserve.settings.schema import ConfigError, EngineConfig, MeshConfig


def check_processes(config: EngineConfig, processes: int, ranks_across: bool = False) -> None:
    """Refuses settings of a replica that cannot be on several processes, or not on that many.
    Errors: ConfigError."""
    if config.cache.kv_store is not None:
        raise ConfigError("kv_store", "is for a replica in one process, without launch")
    devices_each(config.mesh, processes, ranks_across)


def devices_each(mesh: MeshConfig, processes: int, ranks_across: bool = False) -> int:
    """Returns the number of devices of the mesh for each process. ranks_across: let the ranks of a
    lane be on several processes. Errors: ConfigError, with the processes that would do, where
    stages, lanes or ranks cannot be dealt out evenly."""
    fault = _fault(mesh, processes, ranks_across)
    if fault is not None:
        counts = range(1, mesh.devices + 1)
        fits = [count for count in counts if _fault(mesh, count, ranks_across) is None]
        raise ConfigError(
            "mesh",
            f"{mesh} cannot be dealt out to {processes} processes: {fault}; it can to "
            + ", ".join(map(str, fits)),
        )
    return mesh.devices // processes


def _fault(mesh: MeshConfig, processes: int, ranks_across: bool) -> str | None:
    each, remainder = divmod(mesh.devices, processes)
    if remainder:
        return f"{mesh.devices} devices are not a multiple of them"
    if each % mesh.tp and not ranks_across:
        return (
            f"each would have {each} devices, so the {mesh.tp} ranks of a lane would be on several "
            "hosts, whose links are slow; --ranks_across_hosts permits that"
        )
    if each % mesh.tp and mesh.tp % each:
        return (
            f"each would have {each} devices, neither whole lanes of {mesh.tp} nor a share of one"
        )
    stage = mesh.kvp * mesh.tp
    if each % stage and stage % each:
        return f"each would have {each} devices, neither whole stages of {stage} nor a share of one"
    return None


def layout(mesh: MeshConfig, processes: int) -> np.ndarray:
    """Numbers of the devices [spp, kvp, tp], counted process by process; for `processes` that
    `devices_each` accepts. With one process they are in the order of the mesh."""
    numbers = np.arange(mesh.devices).reshape(mesh.spp, mesh.kvp, mesh.tp)
    return numbers if processes == 1 else numbers[::-1]


def described(mesh: MeshConfig, processes: int) -> list[str]:
    """A line for each process: the stages, lanes and ranks that it has."""
    each = devices_each(mesh, processes, ranks_across=True)
    owner = layout(mesh, processes) // each
    lines = []
    for process in range(processes):
        stages, lanes, ranks = (sorted(set(axis.tolist())) for axis in np.nonzero(owner == process))
        lines.append(
            f"worker {process}: {each} devices, stages {_span(stages)} of {mesh.spp}, "
            f"lanes {_span(lanes)} of {mesh.kvp}, ranks {_span(ranks)} of {mesh.tp}"
        )
    return lines


def _span(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
