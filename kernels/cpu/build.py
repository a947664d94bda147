"""Compiles the kernels for CPUs, once for each instruction set. Run at installation by setup.py,
which loads this file alone: it imports nothing of the project."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

SOURCE = Path(__file__).parent / "src"
UNITS = ("quantised.cc", "linear.cc", "attention.cc", "write.cc", "version.cc")  # longest first
NATIVE = "JAXSERVE_BUILD_NATIVE"  # set: what this processor cannot run is not compiled
CPUINFO = Path("/proc/cpuinfo")
# Vectors are returned by value inside one library only, so -Wpsabi has nothing to say.
FLAGS = (
    "-std=c++20",
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
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


@dataclasses.dataclass(frozen=True)
class Processor:
    machine: str  # architecture
    vendor: str
    features: frozenset[str]

    def runs(self, target: InstructionSet) -> bool:
        return self.machine in target.machines and target.needs <= self.features


@functools.cache
def processor() -> Processor:
    """The processor of this machine. Only Linux names vendor and features; 64-bit ARM has the one
    that is needed everywhere."""
    machine = platform.machine()
    fields: dict[str, str] = {}
    if CPUINFO.exists():
        for line in CPUINFO.read_text().split("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            fields[name.strip()] = value.strip()
    features = (fields.get("flags") or fields.get("Features") or "").split()
    if machine == "arm64":
        features.append("asimd")
    return Processor(machine, fields.get("vendor_id", ""), frozenset(features))


def library_name(name: str) -> str:
    """File of the library for the instruction set of that name."""
    return f"libjaxserve_cpu_{name}.so"


@dataclasses.dataclass(frozen=True)
class Compiler:
    """command: of the C++ compiler, with arguments. include: the folder of XLA's headers. flags:
    after all others. Errors: subprocess.SubprocessError, OSError."""

    command: str
    include: Path
    flags: tuple[str, ...] = ()

    def objects(self, target: InstructionSet, folder: Path, pool: Executor) -> list[Future[Path]]:
        """Compiles all units for an instruction set into `folder`, in the threads of `pool`."""
        return [pool.submit(self.compile, target, unit, folder) for unit in UNITS]

    def compile(self, target: InstructionSet, unit: str, folder: Path) -> Path:
        made = folder / f"{unit}.{target.name}.o"
        include = ("-isystem", str(self.include))
        self._run(*FLAGS, *target.flags, *include, "-c", str(SOURCE / unit), to=made)
        return made

    def link(self, objects: list[Future[Path]], to: Path) -> None:
        self._run("-shared", *(str(made.result()) for made in objects), to=to)

    def _run(self, *arguments: str, to: Path) -> None:
        subprocess.run(
            [*self.command.split(), *arguments, *self.flags, "-o", str(to)],
            check=True,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )


def build(folder: Path, include: Path) -> list[str]:
    """Compiles the libraries for all instruction sets of this machine's architecture into `folder`,
    in parallel. Returns, for each that could not be made, a line that says why."""
    command = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if command is None:
        return ["no C++ compiler (g++ or c++, or CXX) was found"]
    machine = processor().machine
    targets = [target for target in INSTRUCTION_SETS if machine in target.machines]
    if not targets:
        return [f"no kernels are written for {machine}"]
    if os.environ.get(NATIVE):
        targets = [target for target in targets if processor().runs(target)]
    folder.mkdir(parents=True, exist_ok=True)
    compiler = Compiler(command, include)
    failed = []
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(os.cpu_count()) as pool:
        started = [(target, compiler.objects(target, Path(made), pool)) for target in targets]
        for target, objects in started:
            to = folder / library_name(target.name)
            new = to.with_suffix(".new")  # replaced whole: a process may have the old one open
            try:
                compiler.link(objects, new)
                new.replace(to)
            except (subprocess.SubprocessError, OSError) as error:
                lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
                reason = next((line for line in lines if "error" in line), lines[-1])
                failed.append(f"{target.name}: {reason[:300]}")
    return failed
