"""Sweeps: points of grids, lines that are kept over kills, figures of both sources on one page."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxserve.cli.main import main
from jaxserve.lab.research import runner
from jaxserve.lab.research.drive import virtual
from jaxserve.lab.research.points import Point, grid, parsed_axes, parsed_base, read_grid
from jaxserve.lab.research.prompts import prompt_ids
from jaxserve.lab.research.runner import Runner
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.run import System, execute, shape_of
from jaxserve.settings.schema import ConfigError, MeshConfig

SIMULATED = Runner("simulated", "h100")
BASE = {"model": "llama3-8b", "prompt": "512", "output": "8", "requests": 5, "qps": 2.0}
TINY = (
    "model=random:tiny;max_model_len=512;pages=64;max_seqs=2;chunk_tokens=64;prompt=100;output=4;"
    "requests=4;concurrency=2"
)


def test_a_grid_has_every_combination_and_says_the_same_in_flags_and_in_a_file(tmp_path):
    file = tmp_path / "grid.yaml"
    file.write_text(
        "base: {qps: 1, pages: 512, output: 8}\naxes: {policy: [fcfs, slack], mesh: [tp=1, kvp=2]}"
    )
    read = grid(*read_grid(str(file)))
    typed = grid(
        parsed_base("qps=1;pages=512;output=8"), parsed_axes("policy=fcfs|slack; mesh=tp=1|kvp=2")
    )
    assert [point.key for point in read] == [point.key for point in typed]
    assert len({point.key for point in read}) == 4
    assert {(p.config().scheduler.policy, p.config().mesh.kvp) for p in read} == {
        ("fcfs", 1), ("fcfs", 2), ("slack", 1), ("slack", 2),
    }  # fmt: skip


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--axes=mehs=tp=1"], "mehs: unknown setting; did you mean mesh?"),
        (["--axes=policy"], "--axes: 'policy' is not NAME=VALUE"),
        (["--axes=policy=first"], "policy: 'first' is not one of"),
        (["--base=requests=0"], "requests: 0 is below the limit 1"),
        (["--base=pages=many"], "pages: must be a whole number"),
        (["--run=simulated"], "gpu: goes with run=simulated"),
        (["--gpu=h100"], "gpu: goes with run=simulated"),
        (["--grid=/nowhere.yaml"], "--grid: /nowhere.yaml: No such file"),
        (["--out=/nowhere/x.jsonl"], "--out: /nowhere/x.jsonl: No such file"),
    ],
)
def test_a_mistake_is_told_before_anything_runs(flags, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "sweep", *flags]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and "\n" not in error


def test_a_point_that_cannot_be_run_is_a_line_with_the_reason(tmp_path):
    points = grid(
        BASE, {"mesh": ["tp=8", "tp=99", "spp=64", "spp=2,kvp=2"], "gpu_memory_utilization": [0.9]}
    )
    rows = runner.sweep(points, SIMULATED, tmp_path / "out.jsonl")
    assert [bool(row["simulated"]) for row in rows] == [True, False, False, True]
    assert "tp" in rows[1]["reason"] and "more stages than 32 layers" in rows[2]["reason"]
    assert rows[0]["simulated"]["all"]["finished"] == 5
    without = runner.sweep([Point.of({"prompt": "8"})], SIMULATED, tmp_path / "out.jsonl")
    assert "qps" in without[0]["reason"]


def test_finished_points_are_not_run_again(tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    points = grid(BASE, {"seed": list(range(6))})
    first = runner.sweep(points[:4], SIMULATED, out)
    whole = out.read_bytes()
    out.write_bytes(whole[:-20])  # killed while it wrote the fourth line
    ran = []
    monkeypatch.setattr(Runner, "__call__", _noting(Runner.__call__, ran))
    rows = runner.sweep(points, SIMULATED, out)
    assert [point.load.seed for point in ran] == [3, 4, 5]
    assert rows[:3] == first[:3] and runner.read(out) == rows
    out.write_text("{}\n" + out.read_text())
    with pytest.raises(ConfigError, match=r"out\.jsonl:1"):
        runner.read(out)


def _noting(call, ran):
    def noted(self, point):
        ran.append(point)
        return call(self, point)

    return noted


def test_a_sweep_that_is_killed_goes_on_where_it_was(tmp_path):
    out = tmp_path / "out.jsonl"
    axes = "seed=" + "|".join(map(str, range(300)))
    base = "model=llama3-8b;qps=5;requests=50;prompt=4096;output=64"
    command = [
        *(sys.executable, "-m", "jaxserve", "bench", "sweep", "--run=simulated", "--gpu=h100"),
        *(f"--base={base}", f"--axes={axes}", f"--out={out}"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 200
    while not (out.exists() and out.read_text().count("\n") >= 2):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = runner.read(out)
    points = grid(parsed_base(base), {"seed": list(range(len(kept) + 2))})
    rows = runner.sweep(points, SIMULATED, out)
    assert rows[: len(kept)] == kept
    assert len({row["key"] for row in runner.read(out)}) == len(kept) + 2


def test_a_live_point_comes_with_its_prediction_and_a_page(tmp_path, capsys):
    out, page = tmp_path / "out.jsonl", tmp_path / "page.html"
    flags = [f"--base={TINY}", "--axes=mesh=tp=1|tp=64", f"--out={out}"]
    assert main(["bench", "sweep", *flags]) == 0
    shown = capsys.readouterr().out
    assert "mesh=tp=64: mesh: tp=64 cannot split" in shown
    row, bad = runner.read(out)
    assert bad["live"] is None and not row["reason"]
    for source in ("live", "simulated"):
        figures = row[source]["all"]
        assert figures["finished"] == figures["requests"] == 4
        assert 0 < figures["ttft"]["p50"] < 30
    assert row["compiled"] == 0 and row["machine"]["jax"] and row["load"]["seed"] == 0
    assert main(["bench", "sweep", *flags, f"--html={page}"]) == 0
    text = page.read_text()
    assert "<svg" in text and "tp=64 cannot split" in text and "http" not in _without_svg(text)


def _without_svg(text: str) -> str:
    return "".join(part.split("</svg>")[-1] for part in text.split("<svg"))


def test_a_point_that_takes_too_long_is_ended():
    row = Runner("live", limit=0.1)(Point.of(BASE))
    assert row["reason"] == "took longer than 0.1 s" and row["live"] is None


def test_virtual_time_is_that_of_simulate():
    system = System(shape_of("llama3-8b"), "h100", MeshConfig(tp=8))
    point = Point.of({**BASE, "requests": 30, "prompt": "lognormal:2000:1", "qps": 5.0})
    config, arrivals = point.config(), point.load.schedule()
    made = [system.replica(config.scheduler, config.cache) for _ in range(2)]
    assert virtual(made[0], arrivals, None).records == execute(made[1], arrivals).records


def test_in_a_closed_loop_so_many_run_at_once():
    system = System(shape_of("llama3-8b"), "h100", MeshConfig(tp=8))
    config = Point.of(BASE).config()
    replica = system.replica(config.scheduler, config.cache)
    records = virtual(replica, [Arrival(0.0, 1000, 20)] * 9, 3).records
    moments = sorted(record.arrival for record in records)
    for moment in moments:
        at_once = [each for each in records if each.arrival <= moment < each.end]
        assert len(at_once) <= 3
    assert moments[2] == 0.0 and moments[3] == min(record.end for record in records)


def test_equal_blocks_are_equal_tokens_and_all_else_differs():
    one = prompt_ids(Arrival(0, 1100, 1, blocks=(7, 8)), 0, 50_000)
    other = prompt_ids(Arrival(0, 1300, 1, blocks=(7, 9)), 1, 50_000)
    assert (len(one), len(other)) == (1100, 1300)
    assert np.array_equal(one[:512], other[:512])
    assert np.mean(one[512:1024] == other[512:1024]) < 0.01
    assert np.mean(one[1024:] == other[1024:1100]) < 0.1
    assert np.array_equal(one, prompt_ids(Arrival(9, 1100, 1, blocks=(7, 8)), 0, 50_000))
    assert one.min() >= 0 and one.max() < 50_000


def test_scaling_is_a_sweep_over_one_axis(tmp_path, capsys):
    out = Path(tmp_path, "out.jsonl")
    flags = ["--run=simulated", "--gpu=h100", "--base=model=llama3-8b", f"--out={out}"]
    scaling = ["--axis=tp", "--devices=1,2,8", "--prompt=16000"]
    assert main(["bench", "scaling", *flags, *scaling]) == 0
    strong = [row["simulated"]["all"]["ttft"]["p50"] for row in runner.read(out)]
    assert strong == sorted(strong, reverse=True)
    assert main(["bench", "scaling", *flags, *scaling, "--kind=weak"]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["load"]["prompt"] for row in lines[3:]] == ["32000", "128000"]  # one was known
    assert "mesh=tp=8 prompt=128000" in capsys.readouterr().out
