"""Compiles the kernels for CPUs, once for each instruction set. Run at installation by setup.py,
which loads this file alone: it imports nothing of the project."""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE = Path(__file__).parent / "src"
UNITS = ("attention.cc", "linear.cc", "quantised.cc", "write.cc", "version.cc")
# Vectors are returned by value inside one library only, so -Wpsabi has nothing to say.
FLAGS = (
    "-std=c++20",
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-Wno-unknown-pragmas",
)
SECONDS = 300  # for one compile


@dataclasses.dataclass(frozen=True)
class InstructionSet:
    """needs: the features of a processor, as Linux names them. vendors: makers whose processors
    gain by it; empty: all."""

    name: str
    machines: tuple[str, ...]
    needs: frozenset[str]
    flags: tuple[str, ...]
    vendors: frozenset[str] = frozenset()


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")


def _x86(name: str, needs: tuple[str, ...], *flags: str, vendors: tuple[str, ...] = ()):
    machine_flags = tuple(f"-m{need.replace('_', '')}" for need in needs)
    return InstructionSet(
        name, ("x86_64", "AMD64"), frozenset(needs), machine_flags + flags, frozenset(vendors)
    )


# The best first. Products of bf16 pairs take Intel's processors longer than f32 (measured on
# Emerald Rapids: 145 GFLOP/s beside 260 on two cores), AMD's half as long.
INSTRUCTION_SETS = (
    _x86(
        "avx512_bf16",
        (*_AVX512, "avx512_bf16"),
        "-mprefer-vector-width=512",
        vendors=("AuthenticAMD",),
    ),
    _x86("avx512", _AVX512, "-mprefer-vector-width=512"),
    _x86("avx2", _AVX2),
    InstructionSet("neon", ("aarch64", "arm64"), frozenset({"asimd"}), ()),
)


def library_name(name: str) -> str:
    """File of the library for the instruction set of that name."""
    return f"libjaxserve_cpu_{name}.so"


def command(
    target: InstructionSet, compiler: str, include: Path, to: Path, extra: tuple[str, ...] = ()
) -> list[str]:
    """Returns the command that compiles the library `to`. include: the folder of XLA's headers."""
    return [
        *compiler.split(),
        *FLAGS,
        *target.flags,
        *extra,
        "-isystem",
        str(include),
        *(str(SOURCE / unit) for unit in UNITS),
        "-o",
        str(to),
    ]


def build(folder: Path, include: Path) -> list[str]:
    """Compiles the libraries for all instruction sets of this machine's architecture into `folder`,
    in parallel. Returns, for each that could not be made, a line that says why."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        return ["no C++ compiler (g++ or c++, or CXX) was found"]
    machine = platform.machine()
    targets = [target for target in INSTRUCTION_SETS if machine in target.machines]
    if not targets:
        return [f"no kernels are written for {machine}"]
    folder.mkdir(parents=True, exist_ok=True)

    def one(target: InstructionSet) -> str | None:
        to = folder / library_name(target.name)
        new = to.with_suffix(".new")  # replaced whole: a process may have the old one open
        try:
            subprocess.run(
                command(target, compiler, include, new),
                check=True,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
        except (subprocess.SubprocessError, OSError) as error:
            lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            reason = next((line for line in lines if "error" in line), lines[-1])
            return f"{target.name}: {reason[:300]}"
        new.replace(to)
        return None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [line for line in pool.map(one, targets) if line is not None]
