"""Compiles for an NVIDIA H200, or another GPU, without one: `lower` needs jax alone, `compile` goes
on to machine code with the compiler that `python -m experiments.gpu_targets.compiler` fetches."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.gpu_targets.compiler import CompilerError, run, topology
from experiments.gpu_targets.sheets import TARGETS
from jaxserve.sharding.mesh import KVP, TP

COMPILE_SECONDS = 300
# HLO that moves no data
BOOKKEEPING = {"parameter", "bitcast", "tuple", "get-tuple-element", "while", "conditional", "call"}


@dataclass(frozen=True)
class Kernel:
    """Registers per thread of a Pallas kernel, and bytes of spill stores and loads in its code, as
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
    target: str = "h200",
) -> Compiled:
    """`f`, which pickles, inside shard_map on a mesh of lanes and ranks, for arguments of
    jax.ShapeDtypeStruct as each device sees them; options: of the compiler. target: a name in
    `TARGETS`. Errors: CompilerError."""
    with tempfile.TemporaryDirectory() as work:
        job = Path(work, "job")
        result = Path(work, "result")
        job.write_bytes(pickle.dumps((f, arguments, tuple(donate), mesh, options, target)))
        ended = run(
            "tests.kernels.cuda:child",
            str(job),
            str(result),
            seconds=COMPILE_SECONDS,
            variables={"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_RESOURCES": "1"},
        )
        if ended.returncode or not result.exists():
            raise CompilerError(f"exit code {ended.returncode}: {ended.stdout[-4000:]}")
        spills = re.findall(
            r"(\d+) bytes spill stores, (\d+) bytes spill loads\n.*Used (\d+) registers",
            ended.stdout,
        )
        shared = re.findall(r"smem_scratch_bytes=(\d+)", ended.stdout)
        kernels = tuple(
            Kernel(int(registers), int(stores) + int(loads)) for stores, loads, registers in spills
        )
        return Compiled(kernels, tuple(map(int, shared)), *pickle.loads(result.read_bytes()))


def child(job: str, result: str) -> None:
    """Compiles what `compile` left in the file `job`."""
    f, arguments, donate, shape, options, target = pickle.loads(Path(job).read_bytes())
    mesh = Mesh(
        np.array(topology(TARGETS[target], 1, shape[0] * shape[1])).reshape(shape),
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
    with tempfile.TemporaryDirectory() as work:
        dump = {"xla_dump_to": work, "xla_dump_emitter_re": "ptx"}
        compiled = lowered.compile(compiler_options=dump | (options or {}))
        _report_triton(Path(work))
    memory = compiled.memory_analysis()
    Path(result).write_bytes(
        pickle.dumps((memory.temp_size_in_bytes, memory.alias_size_in_bytes, compiled.as_text()))
    )


def _report_triton(folder: Path) -> None:
    """Has the assembler report the resources of Triton kernels, as it does of Mosaic's. folder: of
    the assembly that XLA wrote; Mosaic's is not there."""
    for file in sorted(folder.glob("*.ptx")):
        text = file.read_text()
        if re.search(r"\.entry (attention|combine)\(", text):
            (architecture,) = re.findall(r"^\.target (\w+)", text, re.M)
            command = ["ptxas", "-v", f"-arch={architecture}", str(file), "-o", os.devnull]
            subprocess.run(command, check=True)
