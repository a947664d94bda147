"""The benchmark of stores goes through all that it measures, on little."""

import json
import subprocess
import sys

import pytest


@pytest.mark.matrix
def test_every_point_is_measured(tmp_path):
    command = [sys.executable, "-m", "experiments.benchmarks.store", "--mib=4", "--rounds=1"]
    files = [f"--folder={tmp_path}", f"--json={tmp_path / 'figures'}", "--records=32"]
    done = subprocess.run([*command, *files], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures").read_text())["figures"]
    assert len(figures) == 3 * 2 + 3 * 2 * 4
    assert all(each["mb_s"] > 0 for figure in figures for each in figure["rounds"])
    assert [path.name for path in tmp_path.iterdir()] == ["figures"], "nothing is left behind"
