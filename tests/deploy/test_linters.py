"""The linters of the trade find nothing in Dockerfile, scripts and unit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.helm import SCRIPTS

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
UNIT = DEPLOY / "systemd" / "jaxserve.service"
PROGRAM = "/opt/jaxserve/bin/jaxserve"
EXPOSURE = 25  # tenths, as `systemd-analyze security` counts; 100: nothing is restricted


def tool(name: str, source: str) -> str:
    found = shutil.which(name, path=os.pathsep.join([SCRIPTS, os.environ.get("PATH", "")]))
    if found is None:
        pytest.skip(f"no {name}: {source}")
    return found


def run(*command: str) -> None:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


def test_shellcheck():
    scripts = [*DEPLOY.glob("slurm/*"), *DEPLOY.glob("mpi/*")]
    assert scripts
    run(tool("shellcheck", "the extra `deploy`"), *map(str, scripts))


def test_hadolint():
    run(tool("hadolint", "the extra `deploy`"), str(DEPLOY / "docker" / "Dockerfile"))


@pytest.fixture
def unit(tmp_path: Path) -> str:
    """The unit, with a program that is there."""
    text = UNIT.read_text()
    assert PROGRAM in text
    copy = tmp_path / UNIT.name
    copy.write_text(text.replace(PROGRAM, sys.executable))
    return str(copy)


def test_systemd_takes_the_unit(unit):
    run(tool("systemd-analyze", "Debian's systemd"), "verify", "--man=no", unit)


def test_the_unit_is_restricted(unit):
    analyze = tool("systemd-analyze", "Debian's systemd")
    run(analyze, "security", "--offline=true", f"--threshold={EXPOSURE}", "--no-pager", unit)
