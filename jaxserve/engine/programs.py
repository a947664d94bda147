"""Compiles programs by name, also while others run, counts compiles, and keeps compiled programs on
disk for the next start."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from jaxserve.folders import cache_folder, private_folder

log = logging.getLogger(__name__)
Lower = Callable[[], Any]  # makes a lowered program: `jax.jit(f).lower(...)`


class Programs:
    """Compiled programs by name, for any thread. compiles: how many; recompiles: how many of them
    no warm-up knew of, which should be none."""

    def __init__(self) -> None:
        self.compiled: dict[str, Any] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._expected: set[str] | None = None  # None: there was no warm-up

    @property
    def compiles(self) -> int:
        return len(self.compiled)

    @property
    def recompiles(self) -> int:
        if self._expected is None:
            return 0
        return len(self.compiled.keys() - self._expected)

    def get(self, name: str, lower: Lower) -> Any:
        """The program of that name; lowered and compiled now if it was not before."""
        if name not in self.compiled:
            with self._locks.setdefault(name, threading.Lock()):
                if name not in self.compiled:
                    log.debug("compiling %s", name)
                    self.compiled[name] = lower().compile()
        return self.compiled[name]

    def expect(self, names: Iterable[str]) -> None:
        """Counts programs with these names, and those compiled so far, as part of the warm-up."""
        self._expected = {*(self._expected or self.compiled), *names}

    def warm_up(self, programs: dict[str, Lower], done: Callable[[str], None]) -> None:
        """Compiles programs in parallel on all cores, and calls `done` with the name of each."""
        self.expect(programs)

        def one(name: str) -> str:
            self.get(name, programs[name])
            return name

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for name in pool.map(one, programs):
                done(name)


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
