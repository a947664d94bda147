"""Papers whose figures are made again: what all have in common, their command lines, the table, the
pictures, the summary."""

import math
from dataclasses import replace

import pytest

from experiments import bounds, figures, papers
from experiments.bounds import Bound
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
    "medha": ("1, 1b", "medha_mixed/merged_df"),
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
        ("--figures=99", "figures: 99: known are {first}"),
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


def test_a_cause_is_read_off_the_rows_where_ours_falls_short(tmp_path):
    """Of all seeds: the middle one of three."""
    told = lambda rows: f"y was {figures.typical(rows, 'y', x=2.0):g}"
    made = replace(TINY, claims=(replace(CLAIM, cause=told),))
    rows = lambda *values: [
        {"x": x, "y": y, "seed": seed}
        for seed, value in enumerate(values)
        for x, y in ((1.0, 1.0), (2.0, value))
    ]
    assert [one.remark for one in figures.judged(made, rows(2.0, 1.5, 3.0))] == ["why; y was 2"]
    assert [one.remark for one in figures.judged(made, rows(4.0, 9.0, 9.0))] == ["why"]


# --- what no verdict may rest on


def test_a_figure_whose_mechanism_did_not_run_has_no_verdict(tmp_path):
    spread = figures.Mechanism("spread steps", figures.fewest("steps", name="kvp"))
    made = replace(TINY, mechanisms=(spread,))
    rows = lambda steps: [
        {"x": 1, "y": 2.0, "name": "a", "steps": 0},
        {"x": 2, "y": 6.0, "name": "kvp", "steps": steps},
    ]
    (ran,) = figures.judged(made, rows(7))
    assert (ran.verdict, ran.times) == ("worse", 0.75)
    (not_run,) = figures.judged(made, rows(0))
    assert (not_run.verdict, not_run.why) == ("did not run", "no spread steps")
    assert math.isnan(not_run.times)
    assert "did not run: no spread steps" in figures.compared(made, rows(0))
    (absent,) = figures.judged(made, rows(7)[:1])
    assert absent.verdict == "did not run"
    older = [{key: value for key, value in row.items() if key != "steps"} for row in rows(7)]
    (unknown,) = figures.judged(made, older)
    assert unknown.verdict == "not counted yet" and math.isnan(unknown.times)


def test_a_mechanism_must_have_run_with_every_seed():
    made = replace(TINY, mechanisms=(figures.Mechanism("steps", figures.fewest("steps")),))
    rows = [
        {"x": x, "y": 2.0 * x, "name": "a", "steps": steps, "seed": seed}
        for seed, steps in ((0, 3), (1, 0))
        for x in (1, 2)
    ]
    assert [one.verdict for one in figures.judged(made, rows)] == ["did not run"]
    assert [one.verdict for one in figures.judged(made, rows[:2])] == ["worse"]


def test_the_seed_in_the_middle_is_judged_and_the_others_are_shown():
    rows = [
        {"x": x, "y": y, "seed": seed}
        for seed, last in enumerate((9.0, 3.0, 4.0))
        for x, y in ((1, 1.0), (2, last))
    ]
    (one,) = figures.judged(TINY, rows)
    assert (one.ours, one.shown) == (4.0, "4x (3x to 9x)")
    assert (one.verdict, one.why) == ("close", "1 of 3 seeds")


def test_a_figure_with_several_seeds_has_a_column_of_them():
    made = replace(TINY, seeded=True, sweep=lambda settings: iter([{"y": float(settings.seed)}]))
    rows = list(figures.swept(made, papers.SweepSettings(seed=4, seeds=2)))
    assert rows == [{"y": 4.0, "seed": 4}, {"y": 5.0, "seed": 5}]


def test_a_limit_that_is_not_reached_is_a_bound():
    points = ((1.0, 0.01), (2.0, 1.0), (3.0, 100.0))
    found = [bounds.load_of_time(points, limit) for limit in (0.001, 0.1, 10.0, 200.0)]
    assert found == pytest.approx([1.0, 1.5, 2.5, 3.0])
    assert [bounds.sign_of(load) for load in found] == ["<", "", "", ">"]
    shares = ((1.0, 1.0), (2.0, 0.8), (3.0, 0.4))
    found = [bounds.load_of_share(shares, share) for share in (1.1, 0.9, 0.6, 0.3)]
    assert found == pytest.approx([1.0, 1.5, 2.5, 3.0])
    assert [bounds.sign_of(load) for load in found] == ["<", "", "", ">"]


def test_quotients_of_bounds_are_bounds_or_unknown():
    above = Bound(4.0, ">")
    below = Bound(2.0, "<")
    signs = [bounds.sign_of(value) for value in (above / 2, 2 / above, above / below, 8 / below)]
    assert signs == [">", "<", ">", ">"]
    assert above / below == 2.0 and math.isnan(above / above)
    assert bounds.sign_of(bounds.greatest([5.0, above])) == ">"
    assert bounds.sign_of(bounds.least([1.0, above])) == ""


def test_where_a_sweep_ended_is_no_number():
    """A bound is judged only where all that it leaves open has the same verdict."""
    verdicts = [CLAIM.verdict(Bound(value, ">")) for value in (3.0, 4.0, 5.2)]
    assert verdicts == ["limit not reached", "limit not reached", "better"]
    assert [CLAIM.verdict(Bound(value, "<")) for value in (3.0, 5.0)] == [
        "worse",
        "limit not reached",
    ]
    assert math.isnan(CLAIM.times(Bound(4.0, ">"))) and figures.number(Bound(4.0, ">"), "x") == (
        "> 4x"
    )
    bound = replace(CLAIM, limit=True)
    assert bound.verdict(Bound(4.1, ">")) == "holds"
    assert bound.verdict(Bound(3.9, ">")) == "limit not reached"


def test_numbers_that_are_the_papers_own_or_counted_before_are_named():
    given = replace(CLAIM, given=True)
    shared = replace(CLAIM, counted_in="figure 6")
    assert given.verdict(4.0) == "computed from the paper's number" and math.isnan(given.times(4.0))
    rows = [{"x": 1, "y": 1.0}, {"x": 2, "y": 4.0}]
    (one,) = figures.judged(replace(TINY, claims=(shared,)), rows)
    assert (one.verdict, one.why) == ("counted elsewhere", "figure 6")
