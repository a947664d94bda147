"""SIGTERM to the scripts for Slurm and mpirun reaches the first host's supervisor alone, once, and
its exit code is the script's. Launchers that pass commands on, and a supervisor that tells of
signals, stand for the real ones."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

import pytest

from tests.deploy.command_lines import DEPLOY

LAUNCHER = """#!/usr/bin/env bash
while [[ $1 != bash ]]; do shift; done
SLURM_PROCID=1 OMPI_COMM_WORLD_RANK=1 "$@" &
SLURM_PROCID=0 OMPI_COMM_WORLD_RANK=0 "$@"
code=$?
kill -KILL $!
exit $code
"""
SUPERVISOR = """#!/usr/bin/env bash
trap 'echo "drained $SLURM_PROCID"; exit 3' TERM
echo "serves $SLURM_PROCID"
for _ in {1..600}; do sleep 0.1; done
"""


@pytest.mark.parametrize(
    "script, launcher", [("slurm/jaxserve.sbatch", "srun"), ("mpi/jaxserve-mpirun", "mpirun")]
)
def test_sigterm_reaches_the_first_hosts_supervisor(script, launcher, tmp_path):
    for name, text in ((launcher, LAUNCHER), ("jaxserve", SUPERVISOR), ("hosts", "a\nb\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    hosts = [str(tmp_path / "hosts")] if launcher == "mpirun" else []
    process = subprocess.Popen(
        ["bash", str(DEPLOY / script), *hosts],
        env={
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "TMPDIR": str(tmp_path),
        },
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        serving: set[str] = set()
        while len(serving) < 2:
            line = process.stdout.readline()
            assert line, "it ended"
            serving |= {line} if line.startswith("serves") else set()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 3
        assert process.stdout.read() == "drained 0\n"
        assert not list(tmp_path.glob("tmp.*"))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
