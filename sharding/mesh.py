"""The device mesh of a replica and the sub-mesh of each pipeline stage. Mesh axis names are defined
here only."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxserve.group.layout import layout
from jaxserve.settings.schema import ConfigError, MeshConfig

SPP, KVP, TP = AXES = ("spp", "kvp", "tp")


def ensure_devices(count: int) -> None:
    """Gives the CPU platform at least `count` devices. Has no effect once JAX has been used."""
    if count > max(1, jax.config.jax_num_cpu_devices):  # type: ignore[attr-defined]
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)


def axis_sum(x: jax.Array, axis: str) -> jax.Array:
    """Sums x over a mesh axis, inside shard_map; adds no collective if the axis has one device."""
    if jax.lax.axis_size(axis) == 1:
        return x
    return jax.lax.psum(x, axis)


def over_lanes(compute: Callable[..., jax.Array], lanes: int, *tokens: Any) -> jax.Array:
    """Computes a part of each token's output on every lane, and sums the parts, inside shard_map
    (Helix, Bhatia et al., 2025, on feed-forward parts). compute: arrays of tokens [T, ...], or
    trees of such -> this device's part of their outputs [T, D]. lanes: that have parts; 1: each
    lane computes its own tokens alone."""
    if lanes == 1:
        return compute(*tokens)
    everyone = jax.tree.map(lambda x: jax.lax.all_gather(x, KVP, tiled=True), tokens)
    return jax.lax.psum_scatter(compute(*everyone), KVP, tiled=True)


def stage_meshes(config: MeshConfig) -> list[Mesh]:
    """Makes one mesh of lanes and ranks per stage, over the first devices of each process. Errors:
    ConfigError if there are too few devices."""
    processes = jax.process_count()
    each = -(-config.devices // processes)
    devices = [
        device
        for _, some in itertools.groupby(jax.devices(), lambda device: device.process_index)
        for device in list(some)[:each]
    ]
    if len(devices) < config.devices:
        raise ConfigError(
            "mesh",
            f"{config} needs {config.devices} devices; "
            f"there are {len(devices)} ({devices[0].platform})"
            + (f" in {processes} processes of {each}" if processes > 1 else ""),
        )
    grid = np.array(devices)[layout(config, processes)]
    return [Mesh(stage, (KVP, TP), axis_types=(AxisType.Auto, AxisType.Auto)) for stage in grid]
