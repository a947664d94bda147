"""Checkpoints of one model with different weights."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

FILE = "model.safetensors"
PROMPTS = [[5, 6, 7, 8] * 12, [9, 10, 11], list(range(20, 53)), [3, 4] * 17]


def trained(folder: Path, base: Path, seed: int) -> Path:
    """Writes a checkpoint of a base model that was trained further, as far as tokens show."""
    shutil.copytree(base, folder)
    save_file(further(base, seed), folder / FILE)
    return folder


def further(base: Path, seed: int) -> dict[str, np.ndarray]:
    """The weights of a base model with noise that changes its tokens."""
    random = np.random.default_rng(seed)
    return {
        name: (value + random.normal(size=value.shape) * value.std()).astype(value.dtype)
        for name, value in load_file(base / FILE).items()
    }


def live_bytes() -> int:
    """Bytes of all arrays on devices of this process."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def resident_bytes() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
