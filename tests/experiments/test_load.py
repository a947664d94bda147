"""The benchmark of loading goes through all that it measures, on little."""

import json
import subprocess
import sys

import pytest


@pytest.mark.matrix
def test_every_way_is_measured_cold_and_warm(tmp_path):
    command = [sys.executable, "-m", "experiments.benchmarks.load", "--model=tiny", "--layers=2"]
    files = ["--rounds=1", "--tp=2", f"--folder={tmp_path}", f"--json={tmp_path / 'figures'}"]
    done = subprocess.run([*command, *files], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures").read_text())["figures"]
    assert {(each["way"], each["page_cache"]) for each in figures} == {
        (way, cache) for way in ("jaxserve", "load_file", "read") for cache in ("cold", "warm")
    }
    assert all(each["rounds"][0]["seconds"] > 0 for each in figures)
    assert [path.name for path in tmp_path.iterdir()] == ["figures"], "nothing is left behind"
