"""Loads a checkpoint into sharded arrays. Each process reads once, and only, the rows and columns
that its devices hold."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.specs import Declared
from jaxserve.weights.checkpoint import Checkpoint, check
from jaxserve.weights.kept import KeptParameter, arrays
from jaxserve.weights.names import build
from jaxserve.weights.shards import Shards
from jaxserve.weights.sources import Index
from jaxserve.weights.store import OrbaxFolder, restore

READERS = 8  # most parameters under way at once: each needs host memory until it is on devices


def load(
    checkpoint: Checkpoint | OrbaxFolder,
    config: ModelConfig,
    declared: Mapping[str, Declared | KeptParameter],
    shardings: Mapping[str, Any],
    dtype: jnp.dtype | str,
    progress: bool = True,
) -> dict[str, Any]:
    """Loads the declared parameters (of one stage, or of all) by path.

    config: after `with_tp`. declared: by path, as of `checkpoint.model.declare`, or as
    `weights.kept` says. shardings: of the arrays of each. dtype: to convert those to that need not
    be wide. progress: show a progress bar. Errors: CheckpointError that lists all faults of the
    checkpoint, before anything is allocated.
    """
    if isinstance(checkpoint, OrbaxFolder):
        plain = {path: d for path, d in declared.items() if isinstance(d, Declared)}
        return restore(checkpoint.folder, plain, shardings, dtype)
    check(checkpoint, config)
    dtype = np.dtype(dtype)
    owners: dict[Declared | KeptParameter, str] = {}  # a tied head may be the embedding itself
    for path, parameter in declared.items():
        if isinstance(parameter, KeptParameter):
            owners.setdefault(parameter, path)
    distinct = [path for path, parameter in declared.items() if owners.get(parameter, path) == path]
    total = sum(d.size * d.dtype(dtype).itemsize for d in arrays(declared.values()))
    loading = Loading(checkpoint, config, declared, shardings, dtype)
    params = {}
    with (
        tqdm(total=total, unit="B", unit_scale=True, desc="weights", disable=not progress) as bar,
        ThreadPoolExecutor(min(READERS, os.cpu_count() or 1)) as readers,
    ):
        for path, parameter in zip(distinct, readers.map(loading.place, distinct)):
            params[path] = parameter
            bar.update(sum(array.nbytes for array in jax.tree.leaves(parameter)))
    return {path: params[owners.get(parameter, path)] for path, parameter in declared.items()}


@dataclass(frozen=True)
class Loading:
    """Source and places of the parameters that are being loaded; see `load`."""

    checkpoint: Checkpoint
    config: ModelConfig
    declared: Mapping[str, Declared | KeptParameter]
    shardings: Mapping[str, Any]
    dtype: np.dtype

    def place(self, path: str) -> Any:
        """Builds one parameter, shard by shard."""
        parameter = self.declared[path]
        if isinstance(parameter, KeptParameter):
            placed = parameter.place(self.shardings[path], self.dtype)
        else:
            shards = Shards(parameter.shape, functools.partial(self._build, path, parameter))
            placed = jax.make_array_from_callback(parameter.shape, self.shardings[path], shards)
        # waits, so that no more host memory is held than that of the parameters under way
        jax.block_until_ready(placed)
        self.checkpoint.release()
        return placed

    def _build(self, path: str, parameter: Declared, index: Index) -> np.ndarray:
        dtype = parameter.dtype(self.dtype)
        stored = self.checkpoint.config
        # in memory of its own: the checkpoint's may be written to once it is loaded
        values = build(path, index, self.checkpoint, stored, self.config, dtype)
        return np.ascontiguousarray(values)
