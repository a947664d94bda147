"""The measurements for a GPU, rehearsed: a broken section takes no other along, each is in the
file, and little needs to be installed."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
import types
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
LACKS = (
    "fastapi",
    "gguf",
    "grpc",
    "grpc_health",
    "grpc_reflection",
    "hypothesis",
    "jinja2",
    "safetensors",
    "tokenizers",
    "torch",
    "tqdm",
)

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason="the kernels for Hopper need jax 0.11.2"
)


def rehearsed(folder: Path, *flags: str) -> dict:
    """Returns what a rehearsal on a machine with few modules writes."""
    (folder / "sitecustomize.py").write_text(BARE.format(names=LACKS))
    command = [
        sys.executable,
        "-m",
        "experiments.benchmarks.h200",
        "--rehearse",
        f"--json={folder}/h200.json",
        *flags,
    ]
    env = os.environ | {"PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "h200.json").read_text())
    for name, section in found["sections"].items():
        assert f"[{name}: {section['status']}" in done.stdout
    return found["sections"]


def test_a_section_that_breaks_takes_no_other_along(tmp_path):
    sections = rehearsed(
        tmp_path,
        "--only=environment,kernels,ceilings,engine",
        "--most=1",
        "--inject=crash:ceilings",
    )
    from experiments.benchmarks.h200 import PLAN

    assert list(sections) == list(PLAN)
    assert {
        name: section["status"]
        for name, section in sections.items()
        if section["status"] != "left out"
    } == {"environment": "ok", "kernels": "ok", "ceilings": "1 failed", "engine": "ok"}
    (row,) = sections["ceilings"]["rows"]
    assert row["status"] == "failed" and "ended with -6" in row["why"]
    (row,) = sections["kernels"]["rows"]
    assert 0 < row["mosaic out"] < row["tolerance"] and 0 < row["xla out"] < row["tolerance"]
    assert sections["engine"]["rows"][0]["model"] == "tiny"


def test_budgets_fill_the_time_of_a_run():
    from experiments.benchmarks.h200 import OPTIONS, PLAN, SECTIONS

    (seconds,) = (option.default for option in OPTIONS["h200"] if option.name == "seconds")
    assert sum(section.seconds for section in PLAN.values()) == seconds
    assert list(PLAN) == list(SECTIONS)


def test_steps_are_measured_beside_what_is_ideal(tmp_path):
    sections = rehearsed(tmp_path, "--only=ceilings,engine,engine_1m,tp,graphs")
    used = {name: each for name, each in sections.items() if each["status"] != "left out"}
    assert {each["status"] for each in used.values()} == {"ok"}
    rows = {row["case"]: row for each in used.values() for row in each["rows"]}
    steps = [
        *("decode 4 x 32", "decode 4 x 32, sampled", "decode 4 x 32, guided", "prefill 64 by 16"),
        *("chunk 16 after 300", "decode 1 x 300", "decode 4 x 32, 2 ranks"),
    ]
    for case in steps:
        ideal = rows[case]["ideal ms by ceilings"]
        assert ideal > 0
        assert rows[case]["share of ceilings"] == pytest.approx(ideal / rows[case]["ms"]["median"])
    assert "pages hold 2,048" in rows["1M"]["why"]
    assert rows["decode 1 x 32, graphs, arrays move"]["places"] >= 4
    kinds = {case.split(", ", 1)[1] for case in rows if "graphs, " in case and "decode" in case}
    ways = ("arrays stay", "arrays move", "as served")
    assert kinds == {f"{kind}, {way}" for kind in ("graphs", "no graphs") for way in ways}


def test_a_section_whose_time_is_over_is_not_started(tmp_path):
    from experiments.benchmarks import h200

    report = h200.Report(tmp_path / "h200.json")
    h200.measure("pools", {}, time.time() - 1, report, tmp_path)
    assert report.section("pools") == {"status": "skipped: out of time", "rows": []}


VLLM = """
class SamplingParams:
    def __init__(self, max_tokens, **others):
        self.max_tokens = max_tokens

class Output:
    def __init__(self, ids):
        self.token_ids = ids

class Result:
    def __init__(self, ids):
        self.outputs = [Output(ids)]

class LLM:
    def __init__(self, model, **others):
        assert others["load_format"] == "dummy" and others["enable_prefix_caching"]
        if {broken}:
            raise ValueError("no room for the model")

    def generate(self, prompts, sampling, use_tqdm):
        return [Result([7] * sampling.max_tokens) for _ in prompts]
"""


def vllm_python(folder: Path, broken: bool) -> str:
    """Makes a Python in which vLLM is what stands above."""
    folder.mkdir()
    (folder / "vllm.py").write_text(VLLM.replace("{broken}", str(broken)))
    (folder / "torch.py").write_text("__version__ = '0'")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


@pytest.mark.parametrize(
    "broken, status, row",
    [
        (None, "ok", dict(status="absent", why="no module vllm")),
        (True, "1 failed", dict(status="failed", why="ValueError: no room for the model")),
        (False, "ok", dict(status="ok", why="")),
    ],
)
def test_a_vllm_that_is_absent_or_broken_is_a_row_that_says_so(tmp_path, broken, status, row):
    flags = ["--only=vllm"]
    if broken is not None:
        flags.append(f"--vllm_python={vllm_python(tmp_path / 'peer', broken)}")
    section = rehearsed(tmp_path, *flags)["vllm"]
    start, *loads = section["rows"]
    assert section["status"] == status
    assert start["status"] == row["status"] and row["why"] in start.get("why", "")
    # ours was not measured
    assert {each["status"] for each in loads} == ({"alone"} if broken is False else set())


def test_the_ratio_to_vllm_spans_what_rounds_allow():
    from experiments.benchmarks.gpu import served
    from experiments.benchmarks.gpu.worker import Run

    load = served.Load(2, 30, 10)
    asked = []

    def seconds(sequences, prompt, tokens, seed):
        asked.append((sequences, prompt, tokens))
        return 0.5 + 0.010 * (tokens - 1)

    ours = {"case": str(load), "ms": {"median": 5.0, "low": 4.0, "high": 8.0}}
    run = Run("vllm", True, 0, np.inf, "", "", "", {"served": [ours]})
    row = served.beside(load, seconds, run)
    assert row["ms"]["median"] == pytest.approx(10) and set(asked) == {(2, 30, 1), (2, 30, 11)}
    ratio = row["time of vLLM / ours"]
    assert ratio == pytest.approx({"median": 2, "low": 10 / 8, "high": 10 / 4})


def test_a_card_with_a_sheet_is_beside_that_too(monkeypatch):
    from experiments.benchmarks.gpu import ideal
    from experiments.benchmarks.gpu.worker import Run
    from experiments.benchmarks.gpu_programs import Needs

    device = types.SimpleNamespace(device_kind="NVIDIA H200")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    run = Run("engine", True, 0, np.inf, "", "", "", {})
    row = ideal.beside_ideal(run, [Needs(4.7e12, 0.1e12, 0, 0)], 2.0)
    assert row["ideal ms by data sheet"] == pytest.approx(1000)
    assert row["share of data sheet"] == pytest.approx(0.5)


def test_a_card_without_a_sheet_is_beside_its_measured_ceilings():
    from experiments.benchmarks.gpu.ideal import beside_ideal
    from experiments.benchmarks.gpu.worker import Run
    from experiments.benchmarks.gpu_programs import Needs

    rows = [{"case": "copy", "GB/s": 100.0}, {"case": "product", "TF/s": 2.0}]
    run = Run("engine", True, 0, np.inf, "", "", "", {"ceilings": rows})
    row = beside_ideal(run, [Needs(4e8, 1e8, 1e9, 0), Needs(0, 0, 2e10, 0)], 0.030)
    assert row["ideal ms by ceilings"] == pytest.approx(5 + 10)
    assert row["share of ceilings"] == pytest.approx(0.5)
    assert not [column for column in row if "data sheet" in column]
    alone = dataclasses.replace(run, found={})
    assert set(beside_ideal(alone, [Needs(4e8, 1e8, 1e9, 0)], 0.1)) == {"TF/s", "GB/s"}


def test_the_block_shape_that_is_kept_is_the_best_over_all_cases_of_its_rows(tmp_path, monkeypatch):
    from experiments.benchmarks import h200
    from jaxserve.kernels import mosaic
    from jaxserve.kernels.mosaic import tiles

    shapes = {
        "default": dict(keys=128, warpgroups=1, stages=3, blocks=132, narrow=0),
        "few": dict(keys=64, warpgroups=1, stages=2, blocks=264, narrow=0),
    }
    case = lambda name, rows, **times: {
        "case": name,
        "status": "ok",
        "shape": [dict(rows=rows, head_dim=128, dtype="bfloat16")],
        "tiles": [shapes],
        "every": [{name: {"median": time} for name, time in times.items()}],
    }
    report = h200.Report(tmp_path / "h200.json")
    report.section("environment")["rows"] = [
        {"case": "device", "value": "NVIDIA H200", "status": "ok"}
    ]
    report.section("tiles")["rows"] = [
        case("1 x 1M", 4, default=100.0, few=90.0),
        case("64 x 8K", 4, default=50.0, few=60.0),
        case("8K", 32768, default=70.0, few=40.0),
        {"case": "broken", "status": "failed"},
    ]
    report.found["tiles"] = h200.best_tiles(report)
    decode, prefill = report.found["tiles"]["NVIDIA H200"]
    assert (decode["keys"], decode["blocks_per_core"], decode["slower"]) == (
        128,
        1,
        pytest.approx(100 / 90),
    )
    assert (prefill["keys"], prefill["blocks_per_core"], prefill["slower"]) == (64, 2, 1.0)

    file = tmp_path / "tuned.json"
    file.write_text('{"another": []}')
    monkeypatch.setattr(h200, "TUNED", file)
    h200.keep_tiles(report)
    monkeypatch.setattr(tiles, "tuned", lambda: json.loads(file.read_text()))
    found = functools.partial(mosaic.tiles_for, "NVIDIA H200", 132)
    assert set(tiles.tuned()) == {"another", "NVIDIA H200"}
    assert found(8, 128, "bfloat16") == mosaic.Tiles(128, 1, 3, 132) and found(
        100_000, 128, "bfloat16"
    ) == mosaic.Tiles(64, 1, 2, 264)
    for rows, head_dim, dtype in ((8, 64, "bfloat16"), (8, 128, "float16")):  # nothing was measured
        assert found(rows, head_dim, dtype) == mosaic.default_tiles(rows, head_dim, dtype)


def test_every_block_shape_that_is_kept_is_one_that_the_kernel_has():
    from jaxserve.kernels import mosaic
    from jaxserve.kernels.mosaic.tiles import SHARED_BYTES, tuned

    for kind, rows in tuned().items():
        for row in rows:
            chosen = mosaic.tiles_for(kind, 132, row["rows"], row["head_dim"], row["dtype"])
            assert chosen.shared_bytes(row["head_dim"]) <= SHARED_BYTES
            kv = jax.ShapeDtypeStruct((8, 2, 2, 64, row["head_dim"]), row["dtype"])
            mosaic.check(kv, tiles=chosen)


def test_what_is_called_the_truth_is_attention(tmp_path):
    from experiments.benchmarks.gpu import cases, checks

    shape = checks.Shape(3, G=2, H=64, C=16, W=4, window=20)
    inputs = checks.make(shape, np.random.default_rng(0))
    out, lse = cases.truth(inputs, 0.1, shape.window)
    pages, blocks = inputs.table[:, inputs.slot[0], : inputs.entries[0]]
    position = inputs.q_pos[0, 2]
    weights = []
    values = []
    for page, block in zip(pages, blocks):
        for offset in range(16):
            if position - 20 < block * 16 + offset <= position:
                k, v = inputs.pages[page, 1, :, offset].astype(np.float64)
                weights.append(np.exp(0.1 * (inputs.q[0, 2, 1, 0].astype(np.float64) @ k)))
                values.append(v)
    assert len(weights) == 20
    np.testing.assert_allclose(lse[0, 2, 1, 0], np.log(sum(weights)))
    np.testing.assert_allclose(
        out[0, 2, 1, 0], np.array(weights) @ np.array(values) / sum(weights), atol=1e-12
    )
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
