"""Compiles programs by name, also while others run, counts compiles, and keeps compiled programs on
disk for the next start and for other processes of this machine."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import jax

from jaxserve.folders import cache_folder, private_folder

log = logging.getLogger(__name__)
Lower = Callable[[], Any]  # makes a lowered program: `jax.jit(f).lower(...)`
TURNS = 64  # files by which processes take turns; programs that share one only wait for each other
TURN_SECONDS = 300.0  # that a process waits for another one, which may be stopped
POLL_SECONDS = 0.05
GPU_COMPILERS = 4


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
                    lowered = lower()
                    with _turn(lowered):
                        self.compiled[name] = lowered.compile()
        return self.compiled[name]

    def expect(self, names: Iterable[str]) -> None:
        """Counts programs with these names, and those compiled so far, as part of the warm-up."""
        self._expected = {*(self._expected or self.compiled), *names}

    def warm_up(self, programs: dict[str, Lower], done: Callable[[str], None]) -> None:
        """Compiles programs in parallel, and calls `done` with the name of each, in their order. An
        error of `done` ends it."""
        self.expect(programs)

        def one(name: str) -> str:
            self.get(name, programs[name])
            return name

        with ThreadPoolExecutor(_compilers()) as pool:
            try:
                for name in pool.map(one, programs):
                    done(name)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _compilers() -> int:
    """Counts the programs that are compiled at a time: on GPUs few, for each is tuned by runs that
    need device memory for what goes in and out of its largest product."""
    cores = os.cpu_count() or 1
    return cores if jax.default_backend() == "cpu" else min(cores, GPU_COMPILERS)


@contextlib.contextmanager
def _turn(lowered: Any) -> Iterator[None]:
    """Waits until no other process of this machine compiles this program: it is then found in the
    folder of compiled programs. Processes of one group compile each for itself."""
    folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if not folder or jax.process_count() > 1:
        yield
        return
    digest = hashlib.blake2b(lowered.as_text().encode(), digest_size=8).digest()
    place = Path(folder) / f"turn-{int.from_bytes(digest, 'little') % TURNS}"
    deadline = time.monotonic() + TURN_SECONDS
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(place.open("w"))
        except OSError:  # nor can programs be kept there
            log.debug("%s cannot be written", place)
        else:  # the lock ends with the file, however this process ends
            while not _locked(file) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        yield


def _locked(file: IO[str]) -> bool:
    """Locks a file; returns False where another process has it locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # this file system has no locks
        log.debug("%s cannot be locked", file.name)
    return True


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
