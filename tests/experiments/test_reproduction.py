"""The page of all figures and the summaries are those of the kept results; what runs many figures
keeps what is made, and goes on where one fails."""

from __future__ import annotations

import re

import pytest

from experiments import all as everything
from experiments import figures, reproduction, runner
from experiments.figures import summary
from experiments.papers import BUILT, paper
from experiments.runner import Done
from jaxserve.settings.schema import ConfigError
from tests.experiments.runner_tasks import task

# figures and tables that the papers have
HAVE = {
    "medha": (23, 2),
    "context_parallel": (10, 9),
    "tetris": (14, 2),
    "mooncake": (25, 5),
    "tokenlake": (13, 0),
}


@pytest.mark.parametrize("name", BUILT)
def test_a_kept_summary_is_of_the_kept_results(name):
    one = paper(name)
    told = (one.results / "summary.md").read_text()
    assert told == summary(one.figures(), one.results, one.head), (
        f"run: python -m experiments.{name} --figures="
    )


def test_the_page_is_of_the_kept_results():
    assert reproduction.PAGE.read_text() == reproduction.page(reproduction.kept), (
        "run: python -m experiments.reproduction"
    )


@pytest.mark.parametrize("name", BUILT)
def test_every_figure_and_table_of_a_paper_is_told_of(name):
    one = paper(name)
    assert not set(one.numbers) & set(one.others)
    numbers = [re.fullmatch(r"(table)?(\d+)[a-z]?", each) for each in (*one.numbers, *one.others)]
    found = {(bool(number[1]), int(number[2])) for number in numbers if number}
    figures, tables = HAVE[name]
    wanted = {(False, n + 1) for n in range(figures)} | {(True, n + 1) for n in range(tables)}
    assert found == wanted


def test_rows_say_how_far_ours_is_from_the_papers_and_what_ran():
    page = reproduction.PAGE.read_text()
    row = next(line for line in page.splitlines() if "speed-up of 16 stages, 8B" in line)
    assert re.search(r"\| close, ×[\d.]+ \| computed \| closed form of the step predictor", row)


# --- the runner


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_fails_is_told_and_the_others_are_made(jobs, tmp_path, capfd):
    tasks = [task("a", tmp_path), task("b", tmp_path, "fails"), task("c", tmp_path, group="a")]
    assert [(one.name, one.state) for one in runner.run(tasks, jobs)] == [
        ("a", "made"),
        ("b", "failed"),
        ("c", "made"),
    ]
    told = capfd.readouterr()
    assert told.out.count("made it") == 2 and "b is broken" in told.err


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_mistake_in_the_settings_ends_all(jobs, tmp_path):
    with pytest.raises(ConfigError, match=r"^out: cannot be used"):
        runner.run([task("a", tmp_path, "refused"), task("b", tmp_path)], jobs)


def test_what_was_made_of_the_same_is_kept(tmp_path):
    stamps = tmp_path / "stamps"
    make = lambda stamp: runner.run([task("a b", tmp_path, stamp=stamp)], stamps=stamps)[0].state
    assert [make("x"), make("x"), make("y"), make("y")] == ["made", "kept", "made", "kept"]
    assert [make(""), make("")] == ["made", "made"]  # nobody knows of what
    assert len(list(tmp_path.glob("a b-*"))) == 4


def test_what_failed_is_made_again(tmp_path):
    tasks = [task("a", tmp_path, "fails", stamp="x")]
    states = [runner.run(tasks, stamps=tmp_path / "stamps")[0].state for _ in range(2)]
    assert states == ["failed", "failed"]


# --- all of it


def test_all_makes_what_is_asked_for_with_a_summary_and_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(figures, "draw", lambda *_: None)
    arguments = [f"--out={tmp_path}", "--data=", "--jobs=1", "--only=tetris.table1,tetris.fig3"]
    assert everything.main(arguments) == 0
    made = capsys.readouterr().out
    assert re.search(r"tetris table1 +made +\d+ +4 of 4", made)
    assert (tmp_path / "tetris" / "fig3.csv").exists()
    assert "| 3 | computed |" in (tmp_path / "tetris" / "summary.md").read_text()
    assert "real planner, latencies of Table 1" in (tmp_path / "reproduction.md").read_text()
    assert everything.main(arguments) == 0
    assert re.search(r"tetris table1 +kept", capsys.readouterr().out)


def test_a_figure_that_failed_has_no_verdicts(tmp_path):
    assert everything._same(Done("tetris fig3", "failed", 1.0), tmp_path) == ""


def test_figures_are_made_with_the_requests_of_the_kept_ones():
    assert paper("mooncake").kept_requests("1") == 120
    assert paper("mooncake").kept_requests("5") is None
    assert paper("medha").kept_requests("9") is None


@pytest.mark.parametrize(
    "only, said",
    [
        (
            "medusa",
            "only: 'medusa': known are medha, context_parallel, tetris, mooncake, tokenlake, "
            "profiles",
        ),
        ("tetris.fig1", "only: 'tetris.fig1': tetris has table1, table2, fig3"),
    ],
)
def test_what_there_is_not_is_one_line(only, said, tmp_path, capsys):
    assert everything.main([f"--out={tmp_path}", f"--only={only}"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"all: {said}") and told.count("\n") == 1
