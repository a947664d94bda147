"""Compiles programs by name, counts compiles, and keeps compiled programs on disk for the next
start."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from jaxserve.folders import cache_folder, private_folder

log = logging.getLogger(__name__)
Lower = Callable[[], Any]  # makes a lowered program: `jax.jit(f).lower(...)`


class Programs:
    """Compiled programs by name. compiles: how many; recompiles: how many of them after warm-up,
    which should be none."""

    def __init__(self) -> None:
        self.compiled: dict[str, Any] = {}
        self._warm: int | None = None

    @property
    def compiles(self) -> int:
        return len(self.compiled)

    @property
    def recompiles(self) -> int:
        return 0 if self._warm is None else self.compiles - self._warm

    def get(self, name: str, lower: Lower) -> Any:
        """The program of that name; lowered and compiled now if it was not before."""
        if name not in self.compiled:
            log.info("compiling %s", name)
            self.compiled[name] = lower().compile()
        return self.compiled[name]

    def warm_up(self, programs: dict[str, Lower], done: Callable[[str], None]) -> None:
        """Compiles programs in parallel on all cores, and calls `done` with the name of each."""

        def one(name: str) -> str:
            self.get(name, programs[name])
            return name

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for name in pool.map(one, programs):
                done(name)
        self._warm = self.compiles


def keep_compiled(folder: str | None) -> None:
    """Makes JAX keep compiled programs in `folder` (None: in the cache folder; '': nowhere).

    They are native code. Errors: ConfigError if other users own the folder or can write to it.
    """
    if folder == "":
        return
    root = private_folder(Path(folder) if folder else cache_folder() / "xla", "compile_cache")
    jax.config.update("jax_compilation_cache_dir", str(root))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
