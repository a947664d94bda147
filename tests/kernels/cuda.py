"""Compiles for an NVIDIA H200 without one: `lower` needs jax alone, `compile` goes on to machine
code.

`python -m tests.kernels.cuda` fetches what `compile` needs, jax's CUDA plugin and NVIDIA's
assembler, some 270 MB, and unpacks it under the cache folder, where neither touches the
environment. Compiling is done in a process of its own, which a failure may abort.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxserve.folders import cache_folder
from jaxserve.sharding.mesh import KVP, TP

ROOT = Path(__file__).parents[2]
TARGET = Path(__file__).with_name("h200.txtpb")
COMMAND = "python -m tests.kernels.cuda"
WHEELS = (
    f"jax-cuda13-plugin=={jax.__version__}",
    f"jax-cuda13-pjrt=={jax.__version__}",
    # of one version: spills differ between assemblers
    "nvidia-cuda-nvcc==13.5.37",
    "nvidia-nvvm==13.5.37",
)
# files of the wheels that are needed
PARTS = re.compile(
    r"jax_plugins/|jax_cuda13_plugin/|.*\.dist-info/|.*/bin/ptxas$|.*/libdevice\.10\.bc$"
)
FETCH_SECONDS = 1800
COMPILE_SECONDS = 300
# HLO that moves no data
BOOKKEEPING = {"parameter", "bitcast", "tuple", "get-tuple-element", "while", "conditional", "call"}


class CompilerError(Exception):
    """The compiler could not be downloaded, or it refused a program; with its message."""


@dataclass(frozen=True)
class Kernel:
    """Registers per thread of a Mosaic kernel, and bytes of spill stores and loads in its code, as
    the assembler reports them."""

    registers: int
    spilled: int


@dataclass(frozen=True)
class Compiled:
    """A program in machine code. `shared`: bytes per Mosaic kernel, without barriers; `temp`,
    `aliased`: bytes, as of memory_analysis."""

    kernels: tuple[Kernel, ...]
    shared: tuple[int, ...]
    temp: int
    aliased: int
    hlo: str

    @property
    def launches(self) -> int:
        """Number of kernels and copies that the program launches."""
        entry = self.hlo[self.hlo.index("\nENTRY") :]
        return sum(
            operation not in BOOKKEEPING | {"constant"}
            for operation in re.findall(r"^  .*? = .*? ([a-z][\w-]*)\(", entry, re.M)
        )

    def made(self, elements: int) -> set[str]:
        """The HLO operations, also inside fusions, that produce an array of this many elements."""
        out = set()
        for type_, operation in re.findall(r"^.*? = (.*?) ([a-z][\w-]*)\(", self.hlo, re.M):
            if any(
                np.prod([int(n) for n in shape.split(",")]) == elements
                for shape in re.findall(r"\w\[([\d,]+)\]", type_)
            ):
                out.add(operation)
        return out - BOOKKEEPING


def lower(f: Callable, *arguments: Any, donate: Sequence[int] = ()) -> Any:
    """`f`, jitted, lowered as for one H200. Mosaic checks types, layouts and shared memory here."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        return (
            jax.jit(f, donate_argnums=donate).trace(*arguments).lower(lowering_platforms=("cuda",))
        )


def compile(
    f: Callable,
    *arguments: Any,
    donate: Sequence[int] = (),
    mesh: tuple[int, int] = (1, 1),
    options: dict[str, Any] | None = None,
) -> Compiled:
    """`f`, which pickles, inside shard_map on a mesh of lanes and ranks, for arguments of
    jax.ShapeDtypeStruct as each device sees them; options: of the compiler. Errors:
    CompilerError."""
    if reason := lacking():
        raise CompilerError(reason)
    with tempfile.TemporaryDirectory() as work:
        job = Path(work, "job")
        result = Path(work, "result")
        job.write_bytes(pickle.dumps((f, arguments, tuple(donate), mesh, options)))
        command = [
            sys.executable,
            "-c",
            "import sys; from tests.kernels import cuda; cuda._child(*sys.argv[1:])",
            str(job),
            str(result),
        ]
        try:
            run = subprocess.run(
                command,
                cwd=working_folder(),
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=COMPILE_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise CompilerError(f"the compiler took longer than {COMPILE_SECONDS} s") from None
        if run.returncode or not result.exists():
            raise CompilerError(f"exit code {run.returncode}: {run.stdout[-4000:]}")
        spills = re.findall(
            r"(\d+) bytes spill stores, (\d+) bytes spill loads\n.*Used (\d+) registers", run.stdout
        )
        shared = re.findall(r"smem_scratch_bytes=(\d+)", run.stdout)
        kernels = tuple(
            Kernel(int(registers), int(stores) + int(loads)) for stores, loads, registers in spills
        )
        return Compiled(kernels, tuple(map(int, shared)), *pickle.loads(result.read_bytes()))


def folder() -> Path:
    return (
        cache_folder() / "compilers" / f"cuda13-jax{jax.__version__}-{sys.implementation.cache_tag}"
    )


def working_folder() -> Path:
    """Returns the folder in which a process that compiles must run: Mosaic looks for libdevice in
    it."""
    (libdevice,) = folder().glob("**/libdevice.10.bc")
    return libdevice.parent


def topology(hosts: int, devices: int) -> list[Any]:
    """Describes absent H200s: a number of `devices` on each host. Needs the variables of
    `environment`."""
    described = topologies.get_topology_desc(
        "h200", "cuda", topology=f"1x{hosts}x{devices}", target_config=TARGET.read_text()
    )
    return list(described.devices)


def lacking() -> str | None:
    """Returns why programs cannot be compiled here, and what to do; None if they can."""
    return (
        None
        if folder().is_dir()
        else f"no CUDA compiler for jax {jax.__version__} in {folder()}; `{COMMAND}` fetches it"
    )


def fetch() -> Path:
    """The folder of the compiler; downloads it first if needed. Errors: CompilerError."""
    if not lacking():
        return folder()
    folder().parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + FETCH_SECONDS
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder().parent) as work:
        wheels = Path(work, "wheels")
        unpacked = Path(work, "unpacked")
        for wheel in WHEELS:
            _download(wheel, wheels, end - time.monotonic())
        for path in sorted(wheels.glob("*.whl")):
            _unpack(path, unpacked)
        try:
            os.rename(unpacked, folder())
        except OSError:  # another process was first
            if lacking():
                raise
    return folder()


def _download(wheel: str, to: Path, seconds: float) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
        "--dest",
        str(to),
        wheel,
    ]
    try:
        failed = subprocess.run(
            command, stdin=subprocess.DEVNULL, timeout=max(seconds, 1)
        ).returncode
    except subprocess.TimeoutExpired:
        raise CompilerError(f"{wheel} had not arrived after {FETCH_SECONDS} s") from None
    if failed:
        raise CompilerError(
            f"pip could not download {wheel}, see above. It is a wheel for Linux, "
            "of the Python package registry; without one, only the lowering is tested"
        )


def _unpack(wheel: Path, to: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = [
            member
            for member in archive.infolist()
            if PARTS.match(member.filename) and not member.is_dir()
        ]
        print(
            f"unpack {wheel.name}: {sum(member.file_size for member in members) / 1e6:.0f} MB",
            flush=True,
        )
        for member in members:
            os.chmod(archive.extract(member, to), (member.external_attr >> 16) & 0o777 or 0o644)


def environment() -> dict[str, str]:
    """Variables for a process that compiles."""
    (assembler,) = folder().glob("**/bin/ptxas")
    # jax finds plugins on the module path
    path = [str(ROOT), str(folder()), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONPATH": os.pathsep.join(path),
        "PATH": f"{assembler.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={assembler.parents[1]}",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_RESOURCES": "1",
    }


def _child(job: str, result: str) -> None:
    f, arguments, donate, shape, options = pickle.loads(Path(job).read_bytes())
    mesh = Mesh(
        np.array(topology(1, shape[0] * shape[1])).reshape(shape),
        (KVP, TP),
        axis_types=(AxisType.Auto, AxisType.Auto),
    )
    alike = PartitionSpec()
    local = jax.shard_map(f, mesh=mesh, in_specs=alike, out_specs=alike, check_vma=False)
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, alike)),
        arguments,
    )
    lowered = (
        jax.jit(local, donate_argnums=donate).trace(*placed).lower(lowering_platforms=("cuda",))
    )
    compiled = lowered.compile(compiler_options=options)
    memory = compiled.memory_analysis()
    Path(result).write_bytes(
        pickle.dumps((memory.temp_size_in_bytes, memory.alias_size_in_bytes, compiled.as_text()))
    )


def _main() -> int:
    try:
        print(fetch())
    except CompilerError as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
