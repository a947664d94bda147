"""`jaxserve plan`, from its flags to its table and files."""

from __future__ import annotations

import json
import re
import sys

import pytest

from jaxserve.cli import main as cli
from jaxserve.lab.simulate import plan

FLAGS = (
    "--gpus=2",
    "--workload=poisson:prompt=uniform:500:4000,output=uniform:5:20",
    "--qps=2",
    "--requests=15",
    "--best=1",
)


def run(capsys: pytest.CaptureFixture, *flags: str) -> tuple[int, str, str]:
    """(exit code, what went to stdout, to stderr)"""
    code = cli.main(["plan", *flags])
    return code, *capsys.readouterr()


@pytest.fixture
def no_search(monkeypatch):
    monkeypatch.setattr(plan.PlanRunner, "answer", lambda *_: pytest.fail("a plan was simulated"))


def test_a_row_per_plan_the_best_first_with_its_capacity(capsys, tmp_path):
    path = tmp_path / "plans.json"
    code, out, err = run(capsys, *FLAGS, f"--json={path}")
    assert (code, err) == (0, "") and out.startswith(
        "simulated: llama3-8b on 2 a100; 15 requests at "
    )
    report = json.loads(path.read_text())
    rows = re.findall(r"^(spp=\S+ \S+) +(\d+) +(\d+)%", out, re.M)
    assert [row[0] for row in rows] == [row["plan"] for row in report["plans"]] and len(
        rows
    ) == 3 * 3
    assert (
        report["plans"][0]["capacity"] > 0
        and [row["capacity"] for row in report["plans"][1:]] == [None] * 8
    )
    assert {row["mesh"] for row in report["plans"]} == {
        "spp=1,kvp=2,tp=1",
        "spp=2,kvp=1,tp=1",
        "spp=1,kvp=1,tp=2",
    }
    assert [row["met"] for row in report["plans"][1:]] == sorted(
        (row["met"] for row in report["plans"][1:]), reverse=True
    )
    assert max(map(len, out.splitlines())) < 140


def test_the_seed_decides(capsys, tmp_path):
    files = [tmp_path / name for name in ("one.json", "two.json", "other.json")]
    for file, seed in zip(files, (1, 1, 2)):
        assert (
            run(capsys, *FLAGS, "--gpus=1", "--best=0", f"--seed={seed}", f"--json={file}")[0] == 0
        )
    one, two, other = (file.read_text() for file in files)
    assert one == two != other


def test_several_counts_are_compared_and_what_does_not_fit_is_named(capsys, tmp_path):
    path = tmp_path / "plans.json"
    code, out, _ = run(
        capsys, *FLAGS, "--model=llama3-70b", "--gpus=1,4", "--best=0", f"--json={path}"
    )
    report = json.loads(path.read_text())
    assert (
        code == 0 and {row["gpus"] for row in report["plans"]} == {4} and report["gpus"] == [1, 4]
    )
    left = {row["mesh"]: row["reason"] for row in report["left_out"]}
    assert (
        "spp=1,kvp=4,tp=1" in left
        and f"  {'spp=1,kvp=4,tp=1':20} 131 GiB of weights per device leave no room for KV" in out
    )
    assert report["plans"][0]["weight_bytes_per_gpu"] > 30 * 2**30


def test_objectives_are_those_that_were_given(capsys, tmp_path):
    path = tmp_path / "plans.json"
    flags = (
        "--gpus=1",
        "--best=0",
        "--ttft=0.001",
        "--ttft_stretch=1",
        "--tpot=0.0001",
        f"--json={path}",
    )
    assert run(capsys, *FLAGS, *flags)[0] == 0
    report = json.loads(path.read_text())
    assert report["objectives"]["ttft"] == 0.001 and {row["met"] for row in report["plans"]} == {0}


def test_a_picture_has_a_name_for_every_plan(capsys, tmp_path):
    path = tmp_path / "plans.svg"
    assert run(capsys, *FLAGS, "--gpus=1", "--best=0", f"--plot={path}")[0] == 0
    text = re.sub(r"<!-- (.*?) -->", r"\1", path.read_text())
    assert "spp=1,kvp=1,tp=1 adaptive:8192" in text and "TTFT p90" in text


def test_without_matplotlib_the_flag_is_named_before_anything_is_simulated(
    capsys, tmp_path, monkeypatch, no_search
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(capsys, *FLAGS, f"--plot={tmp_path / 'p.png'}")
    assert (
        code == 2
        and err == "jaxserve plan: --plot: needs matplotlib: pip install jaxserve[experiments]\n"
    )
    assert not (tmp_path / "p.png").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model=llama9"], "--model: 'llama9' is not one of "),
        (["--gpu=b200"], "--gpu=b200: 'b200' is not one of a100, h100, h200"),
        (["--gpus=0"], "--gpus: '0' is not a number of GPUs from 1 to 1024, or several as N,N"),
        (["--gpus=eight"], "--gpus: 'eight' is not a number"),
        (["--gpus="], "--gpus: '' is not a number"),
        (
            ["--gpus=1", "--model=llama3-70b"],
            "--gpus: no mesh of 1 a100 runs the model (spp=1,kvp=1,tp=1: 131 GiB of weights",
        ),
        (
            ["--workload=poison:mix=medha-5"],
            "--workload: 'poison:mix=medha-5' is neither a generator",
        ),
        (["--qps=-1"], "--qps: must be above 0"),
        (["--attainment=2"], "--attainment=2: 2.0 is above the limit 1"),
        (["--json=/no/such/plans.json"], "--json: /no/such/plans.json: No such file"),
        (["--plot=plans.doc"], "--plot: 'plans.doc' ends neither in .png nor in .svg"),
        (["--chunking=static"], "unknown flag --chunking"),
    ],
)
def test_mistakes_name_the_flag_before_anything_is_simulated(capsys, no_search, flags, said):
    names = {flag.split("=")[0] for flag in flags}
    code, out, err = run(
        capsys, *(flag for flag in FLAGS if flag.split("=")[0] not in names), *flags
    )
    assert said in err and code == 2 and len(err.splitlines()) == 1 and not out, err


def test_help_tells_every_flag_and_fits(capsys):
    assert cli.main(["plan", "--help"]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"^  --(?:\[no\])?(\w+)", shown, re.M) == list(cli.load("plan").options)
