"""The mesh of a replica and its sub-meshes. Axis names have their only home here."""

from __future__ import annotations

import contextlib

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxserve.settings.schema import ConfigError, MeshConfig

SPP, KVP, TP = AXES = ("spp", "kvp", "tp")


def ensure_devices(count: int) -> None:
    """Make the CPU platform show at least `count` devices. Works only before JAX is first used;
    later it changes nothing."""
    if count > max(1, jax.config.jax_num_cpu_devices):  # type: ignore[attr-defined]
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)


def axis_sum(x: jax.Array, axis: str) -> jax.Array:
    """Sum over a mesh axis, inside shard_map; nothing at degree one."""
    return jax.lax.psum(x, axis) if jax.lax.axis_size(axis) > 1 else x


def stage_meshes(config: MeshConfig) -> list[Mesh]:
    """One mesh of lanes and ranks per stage, over the first devices. Errors: ConfigError where
    there are too few."""
    devices = jax.devices()
    if len(devices) < config.devices:
        raise ConfigError(
            "mesh",
            f"{config} needs {config.devices} devices, {len(devices)} are here ({devices[0].platform})",
        )
    grid = np.array(devices[: config.devices]).reshape(config.spp, config.kvp, config.tp)
    return [Mesh(stage, (KVP, TP), axis_types=(AxisType.Auto, AxisType.Auto)) for stage in grid]
