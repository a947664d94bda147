"""Loads the kernels for CPUs: the library for the best instruction set that this processor has."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxserve.kernels.cpu.build import INSTRUCTION_SETS, Processor, library_name, processor

CHOICE = "JAXSERVE_CPU_KERNELS"  # the name of an instruction set, or "off"
TARGETS = (
    "jaxserve_attention",
    "jaxserve_linear",
    "jaxserve_grouped",
    "jaxserve_quantised",
    "jaxserve_write",
    "jaxserve_write_pages",
)
FOLDER = Path(__file__).parent  # of the libraries
FLOATS = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))  # of queries, activations and weights


def best_instruction_set(cpu: Processor, choice: str = "") -> str | None:
    """Returns the name of the best instruction set that a processor has, or of the chosen one if it
    has that; None if there is none."""
    for candidate in INSTRUCTION_SETS:
        gains = not candidate.vendors or cpu.vendor in candidate.vendors
        if cpu.runs(candidate) and (candidate.name == choice if choice else gains):
            return candidate.name
    return None


@functools.cache
def unsupported() -> str | None:
    """Returns why the kernels for CPUs cannot run in this process; None if they can. Loads them at
    the first call."""
    if jax.default_backend() != "cpu":
        return "it needs a CPU"
    return unavailable()


@functools.cache
def unavailable() -> str | None:
    """Returns why the kernels cannot run on the CPU of this machine; None if they can. Loads them,
    without asking JAX for its devices."""
    choice = os.environ.get(CHOICE, "")
    if choice == "off":
        return f"{CHOICE}=off"
    name = best_instruction_set(processor(), choice)
    if name is None:
        return f"this processor has no {choice or 'instruction set that it is compiled for'}"
    return _load(FOLDER / library_name(name))


def _load(path: Path) -> str | None:
    """Loads a library and registers its kernels; says why, where it cannot."""
    if not path.exists():
        return f"it was not compiled at installation ({path.name} is missing)"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"{path.name} cannot be loaded: {error}"
    built = library.jaxserve_ffi_major(), library.jaxserve_ffi_minor()
    installed = _ffi_version()
    if built[0] != installed[0] or built > installed:
        return f"{path.name} was compiled for another jaxlib: install jaxserve again"
    if not all(hasattr(library, target) for target in TARGETS):
        return f"{path.name} was compiled for another jaxserve: install jaxserve again"
    for target in TARGETS:
        jax.ffi.register_ffi_target(
            target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu"
        )
    return None


def _ffi_version() -> tuple[int, int]:
    """Version of XLA's foreign functions in the installed jaxlib. A library for a later one must
    not be registered: JAX would not start."""
    header = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    numbers = dict(re.findall(r"define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header))
    return int(numbers["MAJOR"]), int(numbers["MINOR"])


def instruction_set() -> str | None:
    """Name of the instruction set of the loaded kernels; None if they cannot run."""
    if unsupported() is not None:
        return None
    return best_instruction_set(processor(), os.environ.get(CHOICE, ""))
