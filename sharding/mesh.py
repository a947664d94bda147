"""The mesh of a replica and its sub-meshes. Axis names have their only home here."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxserve.config import ConfigError, MeshConfig

SPP, KVP, TP = AXES = ("spp", "kvp", "tp")


def ensure_devices(count: int) -> None:
    """Make the CPU platform show at least `count` devices. Has an effect only before JAX is first used."""
    if count > 1 and not jax._src.xla_bridge.backends_are_initialized():
        jax.config.update("jax_num_cpu_devices", max(count, jax.config.jax_num_cpu_devices))


def stage_meshes(config: MeshConfig) -> list[Mesh]:
    """One mesh of lanes and ranks per stage, over the first devices. Errors: ConfigError where there are too few."""
    devices = jax.devices()
    if len(devices) < config.devices:
        raise ConfigError("mesh", f"{config} needs {config.devices} devices, {len(devices)} are here ({devices[0].platform})")
    grid = np.array(devices[: config.devices]).reshape(config.spp, config.kvp, config.tp)
    return [Mesh(stage, (KVP, TP), axis_types=(AxisType.Auto, AxisType.Auto)) for stage in grid]
