"""Medha's figures in miniature: each one's rows, claims and panels; the table, the pictures, the
summary; what is wrong, in one line."""

import math
import sys

import pytest

from experiments.medha import __main__ as every
from experiments.medha import systems
from experiments.medha.figure import MedhaSettings
from tests.experiments.figure_checks import made_small

FIGURES = {made.name: made for made in every.PAPER.figures()}
SMALL = MedhaSettings(
    requests=5
)  # generated lengths: the third prompt of seed 0 may be long, or none


def in_suite(name: str):
    """A figure's parameter; those that simulate what another one does, and take longer, are in the
    matrix."""
    marks = pytest.mark.matrix if name in ("fig6", "fig15", "fig17", "fig22") else ()
    return pytest.param(FIGURES[name], id=name, marks=marks)


@pytest.mark.parametrize("made", map(in_suite, FIGURES))
def test_a_figure_in_miniature_gives_csv_and_table(made, tmp_path, monkeypatch):
    rows = made_small(made, SMALL, tmp_path, monkeypatch)
    if made.kind == "computed":
        assert all(math.isfinite(claim.ours(rows)) for claim in made.claims)
    elif made.name != "fig6":
        assert {row["lengths"] for row in rows} == {"generated: medha mixes"}


def test_without_matplotlib_it_says_so_before_it_simulates(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(systems, "run", lambda *_: pytest.fail("simulated"))
    assert every.PAPER.main([f"--out={tmp_path}", "--data=", "--figures=15"]) == 2
    assert (
        capsys.readouterr().err
        == "medha: out: pictures need matplotlib: pip install jaxserve[experiments]\n"
    )


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
