"""Papers whose figures are made again: what all have in common, their command lines, the table, the
pictures, the summary."""

import math
from dataclasses import replace

import pytest

from experiments import figures, papers
from experiments.figures import Claim, Figure, Panel, cell, ratio
from experiments.medha.figure import LENGTHS, MedhaSettings
from experiments.papers import BUILT, paper
from tests.experiments.figure_checks import assert_one_line, check_all

# two figures of each paper, what the terminal shows of the first, and a line of the summary
MADE = {
    "medha": ("9,20", "fig9, computed", "| 20 | computed | the highest | 92 % |"),
    "mooncake": (
        "table1,22",
        "table1, computed",
        "| table1 | computed | 8xA800: least bandwidth for a prefix of 8192 tokens | 6 GB/s |",
    ),
    "tetris": (
        "table1,3",
        "table1, computed",
        "| 3 | computed | 32k, then 16k: SP16 for the first, TTFT of 32k | 1.53 s |",
    ),
    "context_parallel": ("table4,9", "table4, computed", "| 9 | computed |"),
    "tokenlake": ("3", "fig3, simulated", "| 3 | simulated | prefill behind 8192 tokens, "),
}
# the first figure, and a file of the data
KNOWN = {
    "medha": ("1, 5b", "medha_mixed/merged_df"),
    "mooncake": ("table1", "mooncake/conversation"),
    "tetris": ("table1", "mooncake/synthetic"),
}
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


@pytest.mark.parametrize("name", BUILT)
def test_there_is_a_file_for_every_figure_and_it_has_the_papers_numbers(name):
    source = paper(name)
    made = {figure.name: figure for figure in source.figures()}
    check_all(made, source.numbers, tuple(source.runs))


@pytest.mark.parametrize("name", BUILT)
def test_the_command_makes_figures_and_summary(name, tmp_path, capsys):
    numbers, shown, line = MADE[name]
    data = [f"--{option.name}=" for option in paper(name).given if option.name == "data"]
    assert paper(name).main([f"--out={tmp_path}", *data, f"--figures={numbers}"]) == 0
    made = [papers.module(number) for number in numbers.split(",")]
    files = {f"{each}.{kind}" for each in made for kind in ("csv", "png")}
    assert {file.name for file in tmp_path.iterdir()} == {*files, "summary.md"}
    assert shown in capsys.readouterr().out
    assert line in (tmp_path / "summary.md").read_text()


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize(
    "argument, message",
    [
        ("--data={folder}", "data: {folder} has no {file}"),
        ("--figures=2", "figures: 2: known are {first}"),
        ("--requests=0", "requests"),
        ("--dta=x", "unknown flag --dta; did you mean --data?"),
    ],
)
def test_what_is_wrong_is_one_line(name, argument, message, tmp_path, capsys):
    first, file = KNOWN[name]
    given = dict(folder=tmp_path, first=first, file=file)
    assert paper(name).main([f"--out={tmp_path}", argument.format(**given)]) == 2
    assert_one_line(capsys.readouterr().err, name, message.format(**given))


def test_the_data_folder_is_the_flag_then_the_environment_then_the_sibling(tmp_path, monkeypatch):
    monkeypatch.setattr(papers, "SIBLING", tmp_path / "none")
    monkeypatch.delenv("JAXSERVE_DATA", raising=False)
    values = dict(data=None, requests=None, seed=0)
    assert MedhaSettings.of(values).workload(5) == "poisson:mix=medha-5"
    for name in LENGTHS.values():
        (tmp_path / "given" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "given" / name).touch()
    monkeypatch.setenv("JAXSERVE_DATA", str(tmp_path / "given"))
    assert MedhaSettings.of(values).workload(0) == str(tmp_path / "given" / LENGTHS[0])
    assert MedhaSettings.of(values | dict(data="")).lengths == "generated: medha mixes"
    monkeypatch.delenv("JAXSERVE_DATA")
    monkeypatch.setattr(papers, "SIBLING", tmp_path / "given")
    assert MedhaSettings.of(values).data == tmp_path / "given"


def test_a_figures_file_has_a_command_line_of_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fig9", f"--out={tmp_path}", "--data="])
    with pytest.raises(SystemExit) as ended:
        papers.main(paper("medha").figure("9"), "medha")
    assert ended.value.code == 0 and "fig9, computed" in capsys.readouterr().out
    assert {file.name for file in tmp_path.iterdir()} == {"fig9.csv", "fig9.png"}


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
    assert "3x" in figures.make(TINY, None, tmp_path)
    assert (tmp_path / "tiny.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "tiny.csv").write_text("x,y,name\n1,2,a\n2,18,a\n")
    text = figures.summary([TINY, paper("medha").figure("1")], tmp_path, "Head.")
    assert (
        "| tiny | computed | gain | 4x | 1.2 | 9x | 2.25 | better | why |" in text
        and "| 1 |" not in text
    )


def test_capacity_is_where_the_line_between_two_loads_reaches_the_limit():
    points = ((1.0, 0.01), (2.0, 1.0), (3.0, 100.0))
    assert [
        figures.capacity(points, limit) for limit in (0.001, 0.1, 10.0, 200.0)
    ] == pytest.approx([1.0, 1.5, 2.5, 3.0])
