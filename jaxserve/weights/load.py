"""Loads a checkpoint into sharded arrays. Each process reads once, and only, the rows and columns
that its devices hold."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.specs import Declared
from jaxserve.weights.checkpoint import Checkpoint, check
from jaxserve.weights.names import build
from jaxserve.weights.sources import Index
from jaxserve.weights.store import OrbaxFolder, restore

READERS = 8  # most parameters under way at once: each needs host memory until it is on devices


def load(
    checkpoint: Checkpoint | OrbaxFolder,
    config: ModelConfig,
    declared: Mapping[str, Declared],
    shardings: Mapping[str, jax.sharding.Sharding],
    dtype: jnp.dtype | str,
    progress: bool = True,
) -> dict[str, jax.Array]:
    """Loads the declared parameters (of one stage, or of all) by path.

    config: after `with_tp`. declared, shardings: by path, as of `checkpoint.model.declare`. dtype:
    to convert those to that need not be wide. progress: show a progress bar. Errors:
    CheckpointError that lists all faults of the checkpoint, before anything is allocated.
    """
    if isinstance(checkpoint, OrbaxFolder):
        return restore(checkpoint.folder, declared, shardings, dtype)
    check(checkpoint, config)
    dtype = jnp.dtype(dtype)
    total = sum(d.size * d.dtype(dtype).itemsize for d in declared.values())
    place = lambda path: _place(
        checkpoint,
        config,
        path,
        declared[path].shape,
        declared[path].dtype(dtype),
        shardings[path],
    )
    params = {}
    with (
        tqdm(total=total, unit="B", unit_scale=True, desc="weights", disable=not progress) as bar,
        ThreadPoolExecutor(min(READERS, os.cpu_count() or 1)) as readers,
    ):
        for path, array in zip(declared, readers.map(place, declared)):
            params[path] = array
            bar.update(array.nbytes)
    return params


def _place(
    checkpoint: Checkpoint,
    config: ModelConfig,
    path: str,
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: jax.sharding.Sharding,
) -> jax.Array:
    """Builds one parameter, shard by shard."""
    slices: dict[tuple, np.ndarray] = {}  # lanes hold equal shards: read each once

    def shard(index: Index | None) -> np.ndarray:
        key = tuple(s.indices(size)[:2] for s, size in zip(index or (), shape))
        if key not in slices:
            part = tuple(slice(*k) for k in key)
            values = build(path, part, checkpoint, checkpoint.config, config, dtype)
            slices[key] = np.ascontiguousarray(values)
        return slices[key]

    # waits, so that no more host memory is held than that of the parameters under way
    return jax.make_array_from_callback(shape, sharding, shard).block_until_ready()
