"""What the Dockerfile copies is enough to install jaxserve with its kernels, without Docker."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.command_lines import DEPLOY

ROOT = Path(__file__).parents[2]
DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text()


def copied() -> list[str]:
    """Files and folders that are copied into the stage that builds."""
    lines = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.M)
    return [name for line in lines for name in line.split()]


def test_what_is_copied_is_let_through():
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    let_through = {rule[1:] for rule in rules if rule.startswith("!")}
    assert "*" in rules
    assert set(copied()) == let_through
    assert all((ROOT / name).exists() for name in copied())


@pytest.mark.matrix
def test_what_is_copied_installs_with_its_kernels(tmp_path):
    """It is installed as the builder does it, with this Python and the same extras."""
    source = tmp_path / "src"
    source.mkdir()
    kept_out = shutil.ignore_patterns("__pycache__", "*.so")
    for name in copied():
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=kept_out)
        else:
            shutil.copy(ROOT / name, source / name)
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", DOCKERFILE, re.M)
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str, seconds: float) -> str:
        done = subprocess.run(
            command, cwd=source, env=environment, capture_output=True, text=True, timeout=seconds
        )
        assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", str(venv), seconds=120)
    run(str(venv / "bin/pip"), "install", "--quiet", f".[{extras}]", seconds=1800)
    assert list(venv.glob("**/kernels/cpu/*.so"))
    shutil.rmtree(source / "jaxserve")  # else it would be imported from here
    assert "model:" in run(str(venv / "bin/jaxserve"), "serve", "--print_config", seconds=120)
