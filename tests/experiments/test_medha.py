"""Medha's figures in miniature: each one's rows, claims and panels; the table, the pictures, the
summary; what is wrong, in one line."""

import math
import sys
from dataclasses import replace

import pytest

from experiments import figures
from experiments.figures import Claim, Figure, Panel, cell, ratio
from experiments.medha import __main__ as every
from experiments.medha import figure, systems
from experiments.medha.figure import MedhaSettings
from tests.experiments.figure_checks import assert_one_line, check_all, made_small

FIGURES = {made.name: made for made in every.PAPER.figures()}
SMALL = MedhaSettings(
    requests=5
)  # generated lengths: the third prompt of seed 0 may be long, or none
CLAIM = Claim(
    "gain",
    4.0,
    lambda rows: ratio(rows, "y", dict(x=2.0), dict(x=1.0)),
    "1.2",
    better="higher",
    remark="why",
)
TINY = Figure(
    "tiny",
    "Tiny",
    "computed",
    lambda settings: iter([{"x": 1, "y": 2.0, "name": "a"}, {"x": 2, "y": 6.0, "name": "a"}]),
    (CLAIM,),
    (Panel("panel", "x", "y", "name", log="y"),),
)


def test_there_is_a_file_for_every_figure_and_it_has_the_papers_numbers():
    check_all(FIGURES, every.NUMBERS, ("simulated", "computed"))


@pytest.mark.parametrize("made", FIGURES.values(), ids=FIGURES)
def test_a_figure_in_miniature_gives_csv_and_table(made, tmp_path, monkeypatch):
    rows = made_small(made, SMALL, tmp_path, monkeypatch)
    if made.kind == "computed":
        assert all(math.isfinite(claim.ours(rows)) for claim in made.claims)
    elif made.name != "fig6":
        assert {row["lengths"] for row in rows} == {"generated: medha mixes"}


def test_verdicts():
    assert [CLAIM.verdict(value) for value in (3.3, 4.9, 3.1, 6.0, math.nan)] == [
        "close",
        "close",
        "worse",
        "better",
        "nothing to compare",
    ]
    lower = replace(CLAIM, better="lower")
    bound = replace(CLAIM, limit=True)
    assert [lower.verdict(value) for value in (3.1, 6.0)] == ["better", "worse"]
    assert [bound.verdict(value) for value in (4.1, 3.9)] == ["holds", "does not hold"]
    assert [replace(CLAIM, better="equal").verdict(value) for value in (9, 1)] == [
        "higher",
        "lower",
    ]


def test_cells_and_ratios():
    rows = [{"x": 1.0, "y": 2.0}, {"x": 2.0, "y": 6.0}, {"x": 3.0, "y": ""}, {"x": 4.0, "y": 0.0}]
    assert cell(rows, "y", x=2.0) == 6 and ratio(rows, "y", dict(x=2.0), dict(x=1.0)) == 3
    assert all(
        math.isnan(value)
        for value in (
            cell(rows, "y", x=3.0),
            cell(rows, "y", x=9.0),
            ratio(rows, "y", dict(x=1.0), dict(x=4.0)),
        )
    )
    with pytest.raises(ValueError, match="4 rows"):
        cell(rows, "y")


def test_csv_comes_back_as_it_was(tmp_path):
    rows = [
        {"name": "medha", "ttft_s": 0.25, "capacity": ""},
        {"name": "fcfs", "ttft_s": 3.0, "capacity": 2.0},
    ]
    figures.write_csv(tmp_path / "a.csv", rows)
    assert figures.read_csv(tmp_path / "a.csv") == rows


def test_a_picture_is_drawn_and_the_summary_is_made_of_the_csv(tmp_path):
    assert "3x" in figures.make(TINY, SMALL, tmp_path)
    assert (tmp_path / "tiny.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "tiny.csv").write_text("x,y,name\n1,2,a\n2,18,a\n")
    text = figures.summary([TINY, FIGURES["fig1"]], tmp_path, "Head.")
    assert (
        "| tiny | computed | gain | 4x | 1.2 | 9x | 2.25 | better | why |" in text
        and "| 1 |" not in text
    )


def test_the_command_makes_figures_and_summary(tmp_path, capsys):
    arguments = [f"--out={tmp_path}", "--data=", "--figures=9,20"]
    assert every.main(arguments) == 0
    assert {file.name for file in tmp_path.iterdir()} == {
        "fig9.csv",
        "fig9.png",
        "fig20.csv",
        "fig20.png",
        "summary.md",
    }
    assert "fig9, computed" in capsys.readouterr().out
    assert "| 20 | computed | the highest | 92 % |" in (tmp_path / "summary.md").read_text()


def test_without_matplotlib_it_says_so_before_it_simulates(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(systems, "run", lambda *_: pytest.fail("simulated"))
    assert every.main([f"--out={tmp_path}", "--data=", "--figures=15"]) == 2
    assert (
        capsys.readouterr().err
        == "medha: out: pictures need matplotlib: pip install jaxserve[experiments]\n"
    )


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--data={folder}"], "data: {folder} has no medha_mixed/merged_df"),
        (["--figures=2"], "figures: 2: known are 1, 5b"),
        (["--requests=0"], "requests"),
        (["--dta=x"], "unknown flag --dta; did you mean --data?"),
    ],
)
def test_what_is_wrong_is_one_line(arguments, said, tmp_path, capsys):
    arguments = [argument.format(folder=tmp_path) for argument in arguments]
    assert every.main([f"--out={tmp_path}", *arguments]) == 2
    assert_one_line(capsys.readouterr().err, "medha", said.format(folder=tmp_path))


def test_the_data_folder_is_the_flag_then_the_environment_then_the_sibling(tmp_path, monkeypatch):
    monkeypatch.setattr(figure, "SIBLING", tmp_path / "none")
    monkeypatch.delenv("JAXSERVE_DATA", raising=False)
    values = dict(data=None, requests=None, seed=0)
    assert figure.settings_of(values).workload(5) == "poisson:mix=medha-5"
    for name in figure.LENGTHS.values():
        (tmp_path / "given" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "given" / name).touch()
    monkeypatch.setenv("JAXSERVE_DATA", str(tmp_path / "given"))
    assert figure.settings_of(values).workload(0) == str(tmp_path / "given" / figure.LENGTHS[0])
    assert figure.settings_of(values | dict(data="")).lengths == "generated: medha mixes"


def test_capacity_is_where_the_line_between_two_loads_reaches_the_limit():
    points = ((1.0, 0.01), (2.0, 1.0), (3.0, 100.0))
    assert [
        figures.capacity(points, limit) for limit in (0.001, 0.1, 10.0, 200.0)
    ] == pytest.approx([1.0, 1.5, 2.5, 3.0])


def test_a_run_is_cut_off_and_those_that_wait_count_as_long_as_they_waited():
    result = systems.run(
        "fcfs", systems.LoadCase(4.0, seconds=5.0, stretch=3.0), MedhaSettings(requests=60)
    )
    waiting = [record for record in result.records if not record.output]
    assert all(record.reason == "unfinished" and record.arrival <= 5 for record in waiting)
    assert (
        len(result.ttft()) == len(result.records)
        and result.ttft().max() <= 5
        and 0 <= result.in_time() <= 1
    )
