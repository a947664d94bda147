"""The measurements for a GPU, rehearsed: a broken section takes no other along, each is in the file, and little needs to be installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
BARE = """
import importlib.abc, sys
class Bare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names}:
            raise ModuleNotFoundError(f"no {{name}} on a bare machine", name=name)
sys.meta_path.insert(0, Bare())
"""
LACKS = ("fastapi", "gguf", "grpc", "grpc_health", "grpc_reflection", "hypothesis", "jinja2", "safetensors", "tokenizers", "torch", "tqdm")

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="the kernels for Hopper need jax 0.11.2")


def rehearsed(folder: Path, *flags: str) -> dict:
    """What a rehearsal on a machine with few modules writes."""
    (folder / "sitecustomize.py").write_text(BARE.format(names=LACKS))
    command = [sys.executable, "-m", "experiments.benchmarks.h200", "--rehearse", f"--json={folder}/h200.json", *flags]
    env = os.environ | {"PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "h200.json").read_text())
    for name, section in found["sections"].items():
        assert f"[{name}: {section['status']}" in done.stdout
    return found["sections"]


def test_a_section_that_breaks_takes_no_other_along(tmp_path):
    sections = rehearsed(tmp_path, "--only=environment,kernels,ceilings,engine", "--most=1", "--inject=crash:ceilings")
    from experiments.benchmarks.h200 import PLAN

    assert list(sections) == list(PLAN)
    assert {name: section["status"] for name, section in sections.items() if section["status"] != "left out"} == {
        "environment": "ok", "kernels": "ok", "ceilings": "1 failed", "engine": "ok"}
    (row,) = sections["ceilings"]["rows"]
    assert row["status"] == "failed" and "ended with -6" in row["why"]
    (row,) = sections["kernels"]["rows"]
    assert 0 < row["mosaic out"] < row["tolerance"] and 0 < row["xla out"] < row["tolerance"]
    assert sections["engine"]["rows"][0]["model"] == "tiny"


def test_what_is_called_the_truth_is_attention(tmp_path):
    from experiments.benchmarks.gpu import cases, checks

    shape = checks.Shape(3, G=2, H=64, C=16, W=4, window=20)
    inputs = checks.make(shape, np.random.default_rng(0))
    out, lse = cases.truth(inputs, 0.1, shape.window)
    pages, blocks = inputs.table[:, inputs.rows[0], : inputs.count[0]]
    position = inputs.q_pos[0, 2]
    weights, values = [], []
    for page, block in zip(pages, blocks):
        for offset in range(16):
            if position - 20 < block * 16 + offset <= position:
                k, v = inputs.pages[page, 1, :, offset].astype(np.float64)
                weights.append(np.exp(0.1 * (inputs.q[0, 2, 1, 0].astype(np.float64) @ k)))
                values.append(v)
    assert len(weights) == 20
    np.testing.assert_allclose(lse[0, 2, 1, 0], np.log(sum(weights)))
    np.testing.assert_allclose(out[0, 2, 1, 0], np.array(weights) @ np.array(values) / sum(weights), atol=1e-12)
    assert (out[-1] == 0).all() and np.isneginf(lse[-1]).all()


def test_a_stand_in_takes_the_place_of_what_is_absent():
    code = """
from experiments.benchmarks.gpu import worker
worker.OPTIONAL = ("absent_thing", "json")
assert worker.stand_in() == ["absent_thing"]
from absent_thing.inner import anything
import absent_thing.inner.deeper
with anything(1) as it:
    it.update()
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
