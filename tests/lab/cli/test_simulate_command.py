"""`jaxserve simulate`, from its flags to its table and files."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.cli import main as cli
from jaxserve.lab.simulate.run import System
from jaxserve.lab.simulate.workload import parse

FLAGS = (
    "--mesh=tp=8,spp=2",
    "--workload=poisson:mix=medha-5",
    "--qps=1",
    "--requests=15",
    "--seed=3",
)


def simulate(capsys: pytest.CaptureFixture, *flags: str) -> tuple[int, str, str]:
    """(exit code, what went to stdout, to stderr)"""
    code = cli.main(["simulate", *flags])
    return code, *capsys.readouterr()


def test_the_table_has_a_row_per_system_and_kind_and_says_that_it_is_simulated(capsys):
    code, out, err = simulate(capsys, *FLAGS, "--baseline=sarathi-512, loongserve")
    assert (code, err) == (0, "")
    assert (
        out.startswith("simulated: llama3-8b on a100, spp=2,kvp=1,tp=8, KV of ")
        and "15 requests at " in out
    )
    rows = re.findall(r"^(\S+) (all|long|short) +(\d+)/(\d+)", out, re.M)
    assert [row[0] for row in rows if row[1] == "all"] == ["jaxserve", "sarathi-512", "loongserve"]
    for name in ("jaxserve", "sarathi-512", "loongserve"):
        counts = {kind: int(count) for system, kind, _, count in rows if system == name}
        assert counts.pop("all") == sum(counts.values()) == 15
    assert max(map(len, out.splitlines()[2:])) < 120


def test_json_has_the_settings_and_the_figures_and_is_the_same_for_the_same_seed(capsys, tmp_path):
    files = [tmp_path / name for name in ("one.json", "two.json", "other.json")]
    for file, more in zip(files, ((), (), ("--seed=4",))):
        assert simulate(capsys, *FLAGS, f"--json={file}", *more)[0] == 0
    one, two, other = (file.read_text() for file in files)
    assert one == two != other
    report = json.loads(one)
    assert (report["simulated"], report["model"], report["gpu"], report["mesh"]) == (
        True,
        "llama3-8b",
        "a100",
        "spp=2,kvp=1,tp=8",
    )
    assert report["scheduler"]["policy"] == "slack" and report["workload"]["count"] == 15
    figures = report["results"]["jaxserve"]["all"]
    assert (
        figures["requests"] == figures["finished"] == 15
        and 0 < figures["ttft"]["p50"] <= figures["ttft"]["p99"]
    )


def test_csv_has_a_row_per_request_of_each_system(capsys, tmp_path):
    path = tmp_path / "requests.csv"
    assert simulate(capsys, *FLAGS, f"--csv={path}", "--baseline=fcfs-unshared")[0] == 0
    rows = list(csv.DictReader(path.open(newline="")))
    arrivals = parse("poisson:mix=medha-5", qps=1.0, requests=15, seed=3)
    for system in ("jaxserve", "fcfs-unshared"):
        mine = sorted(
            (row for row in rows if row["system"] == system), key=lambda row: int(row["id"])
        )
        assert [
            (float(row["arrival"]), int(row["prompt"]), int(row["output"]), row["kind"])
            for row in mine
        ] == [(a.time, a.prompt, a.output, a.kind) for a in arrivals]
        for row in mine:
            first = float(row["first"])
            end = float(row["end"])
            output = int(row["output"])
            assert float(row["ttft"]) == first - float(row["arrival"]) and row["reason"] == "length"
            assert float(row["tpot"]) == pytest.approx(
                (end - first) / (output - 1) if output > 1 else 0
            )
    assert len(rows) == 30


def test_static_chunks_of_so_many_tokens(capsys, tmp_path):
    path = tmp_path / "s.json"
    assert simulate(capsys, *FLAGS, "--chunking=static:512", f"--json={path}")[0] == 0
    scheduler = json.loads(path.read_text())["scheduler"]
    assert (scheduler["chunking"], scheduler["chunk_tokens"]) == ("static", 512)


def test_what_runs_beyond_the_duration_is_given_up(capsys, tmp_path):
    path = tmp_path / "s.json"
    load = (
        "--workload=poisson:prompt=1000,output=exponential:200",
        "--qps=10",
        "--requests=60",
        "--duration=4",
    )
    assert simulate(capsys, *load, f"--json={path}")[0] == 0
    result = json.loads(path.read_text())["results"]["jaxserve"]
    assert 0 < result["all"]["finished"] < result["all"]["requests"] < 60 and result["span"] <= 4


def test_a_model_has_the_same_name_however_it_is_punctuated(capsys, tmp_path):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, name in zip(files, ("llama3-70b", "Llama-3_70B")):
        assert simulate(capsys, *FLAGS, f"--model={name}", f"--json={file}")[0] == 0
    one, other = (json.loads(file.read_text()) for file in files)
    assert one["results"] == other["results"]


def test_a_picture(capsys, tmp_path):
    path = tmp_path / "picture.svg"
    assert simulate(capsys, *FLAGS, "--baseline=loongserve", f"--plot={path}")[0] == 0
    assert "loongserve (simulated)" in re.sub(r"<!-- (.*?) -->", r"\1", path.read_text())


def test_without_matplotlib_the_flag_is_named(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = simulate(capsys, *FLAGS, f"--plot={tmp_path / 'p.png'}")
    assert (
        code == 2
        and err
        == "jaxserve simulate: --plot: needs matplotlib: pip install jaxserve[experiments]\n"
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model=llama9"], "--model: 'llama9' is not one of "),
        (["--gpu=b200"], "--gpu=b200: 'b200' is not one of a100, h100, h200"),
        (["--mesh=ep=2"], "--mesh: 'ep=2' is not AXIS=DEGREE"),
        (["--mesh=tp=16"], "--mesh: spp=1,kvp=1,tp=16: more ranks than the 8 devices of a node"),
        (
            ["--model=llama3-70b", "--mesh=tp=1"],
            "--mesh: spp=1,kvp=1,tp=1: 131 GiB of weights per device leave no room for KV on a100",
        ),
        (["--chunking=dynamic"], "--chunking: 'dynamic' is not one of static, adaptive"),
        (
            ["--chunking=adaptive:512"],
            "--chunking: 'adaptive:512' is neither adaptive nor static:N",
        ),
        (["--chunking=static:0"], "--chunk_tokens: 0 is below the limit 1"),
        (
            ["--policy=lifo"],
            "--policy=lifo: 'lifo' is not one of fcfs, edf, llf, relative-slack, slack",
        ),
        (
            ["--workload=poison:mix=medha-5"],
            "--workload: 'poison:mix=medha-5' is neither a generator",
        ),
        (["--workload=/no/such.csv"], "--workload: there is no file /no/such.csv"),
        (["--requests=0"], "--requests=0: 0 is below the limit 1"),
        (["--baseline=vllm"], "--baseline: 'vllm' is not one of sarathi-512, "),
        (["--mesh=spp=3", "--baseline=loongserve"], "--mesh: 3 devices do not make instances of 2"),
        (["--sead=1"], "unknown flag --sead; did you mean --seed?"),
    ],
)
def test_mistakes_name_the_flag(capsys, flags, said):
    code, _, err = simulate(
        capsys,
        *(flag for flag in FLAGS if flag.split("=")[0] not in {f.split("=")[0] for f in flags}),
        *flags,
    )
    assert said in err and code == 2 and len(err.splitlines()) == 1, err


def test_a_generator_needs_a_rate(capsys):
    code, _, err = simulate(capsys, "--workload=poisson:mix=medha-5")
    assert code == 2 and "--qps: is missing: poisson has no times of its own" in err


@pytest.mark.parametrize(
    "flag",
    ["--baseline=vllm", "--json=/no/such/s.json", "--csv=/no/such/s.csv", "--plot=/no/such/p.png"],
)
def test_a_mistake_is_told_before_anything_is_simulated(capsys, monkeypatch, flag):
    monkeypatch.setattr(System, "replica", lambda *_: pytest.fail("it was simulated"))
    assert simulate(capsys, *FLAGS, flag)[0] == 2


def test_help_tells_every_flag(capsys):
    assert cli.main(["simulate", "--help"]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"^  --(?:\[no\])?(\w+)", shown, re.M) == list(cli.load("simulate").options)


def test_simulating_loads_no_device_library():
    code = (
        "import sys; from jaxserve.cli import main as cli\n"
        "assert cli.main(['simulate', '--qps=1', '--requests=3']) == 0\n"
        "assert not {'jax', 'flax', 'matplotlib'} & set(sys.modules), set(sys.modules) & {'jax', "
        "'flax', 'matplotlib'}"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
