"""Medha's figures in miniature: each one's rows, claims and panels; the table, the pictures, the
summary; what is wrong, in one line."""

import functools
import math
import sys
from dataclasses import replace

import pytest

from experiments import bounds
from experiments.medha import __main__ as every
from experiments.medha import apart, systems
from experiments.medha.figure import MedhaSettings
from jaxserve.lab.cli.simulate import configs, scheduling_options
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.baselines import compare
from tests.experiments.figure_checks import made_small

FIGURES = {made.name: made for made in every.PAPER.figures()}
SMALL = MedhaSettings(
    requests=5
)  # generated lengths: the third prompt of seed 0 may be long, or none


def in_suite(name: str):
    """A figure's parameter; those that simulate what another one does, and take longer, are in the
    matrix."""
    slow = ("fig1b", "fig6", "fig15", "fig15b", "fig16", "fig17", "fig22")
    marks = pytest.mark.matrix if name in slow else ()
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
    monkeypatch.setattr(systems, "make_ahead", lambda *_: pytest.fail("simulated"))
    monkeypatch.setattr(every, "make_ahead", lambda *_: pytest.fail("simulated"))
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


# --- runs


def test_runs_that_cannot_differ_are_simulated_once():
    """LoongServe and Sarathi do not look at the objective per token; it only says what is met."""
    settings = MedhaSettings(requests=20, seconds=30.0, seeds=2)
    runs = [
        (name, systems.paced(1.0, ms=ms), systems.SMALL)
        for name in ("medha", "loongserve", "sarathi-512")
        for ms in systems.OBJECTIVES_MS
    ]
    assert len(systems.distinct(runs, settings)) == 2 * 4
    ours, theirs = (
        systems.run("sarathi-512", systems.paced(1.0, ms=ms), settings)
        for ms in systems.OBJECTIVES_MS
    )
    assert ours.records is theirs.records
    assert (ours.tpot_objective, theirs.tpot_objective) == (0.1, 0.02)


def test_what_does_not_look_at_an_objective_is_the_same_with_another():
    """As if it were simulated again."""
    case = systems.LoadCase(2.0, seconds=20.0)
    settings = MedhaSettings()
    plain = systems.run("sarathi-512, PP", case, settings)
    tight = systems.simulated("sarathi-512, PP", replace(case, tpot=0.02), settings, systems.SMALL)
    assert [record.first for record in plain.records] == [record.first for record in tight.records]


def test_runs_made_ahead_in_other_processes_are_those_that_figures_read(monkeypatch, capfd):
    settings = MedhaSettings(requests=4, seconds=20.0, seed=91)
    case = systems.LoadCase(1.0, seconds=20.0)
    systems.make_ahead([("loongserve-costs", case, systems.SMALL)], settings, 2)
    assert "1 of 1: loongserve-costs" in capfd.readouterr().err
    monkeypatch.setattr(systems, "simulated", lambda *_: pytest.fail("simulated again"))
    assert len(systems.run("loongserve-costs", case, settings).records) == 4


def test_every_figure_under_load_makes_its_runs_ahead(monkeypatch, tmp_path):
    """What a sweep reads is among `runs`, so that no figure simulates by itself."""
    settings = MedhaSettings(requests=3)
    read = []
    monkeypatch.setattr(systems, "made", lambda key: read.append(key) or made(key))
    made = functools.cache(lambda key: systems.simulated(*key))
    for name in ("21", "23"):
        read.clear()
        list(every.UNDER_LOAD[name].sweep(settings))
        assert set(read) == set(systems.distinct(every.UNDER_LOAD[name].runs(), settings))


# --- a pipeline in which a prompt is in one stage at a time


def test_a_prompt_alone_takes_twice_as_long_without_our_pipeline():
    """Two stages, of which one at a time computes it."""
    arrivals = [Arrival(0.0, 400_000, 2, "long")]
    scheduler, cache = configs({option.name: option.default for option in scheduling_options()})
    ours = compare("sarathi-512", systems.SMALL, scheduler, cache, arrivals)
    theirs = apart.execute("sarathi-512", systems.SMALL, scheduler, cache, arrivals, math.inf)
    assert theirs.records[0].ttft == pytest.approx(2 * ours.records[0].ttft, rel=0.1)
    assert theirs.records[0].due == ours.records[0].due


def test_a_long_prompt_without_our_pipeline_holds_up_half_of_the_others():
    """Each of two streams has the requests that were dealt to it."""
    arrivals = [Arrival(0.0, 400_000, 2, "long")]
    arrivals += [Arrival(1.0 + n, 500, 1, "short") for n in range(6)]
    scheduler, cache = configs({option.name: option.default for option in scheduling_options()})
    found = apart.execute("fcfs-unshared", systems.SMALL, scheduler, cache, arrivals, math.inf)
    assert max(record.ttft for record in found.records if record.kind == "short") < 1.0


# --- capacity


def test_capacity_by_medians_is_one_of_the_loads():
    points = list(zip(systems.LOADS, (0.1, 0.2, 30.0, 700.0)))
    assert bounds.load_within(points, 2.0) == 0.75
    assert bounds.sign_of(bounds.load_within(points, 1000.0)) == ">"
    assert bounds.sign_of(bounds.load_within(points, 0.01)) == "<"
    assert math.isnan(bounds.load_within([(0.25, math.nan)], 2.0))


def test_long_prompts_ask_for_more_than_there_is_at_high_loads():
    """Arithmetic, which no schedule can change."""
    settings = MedhaSettings(seconds=3600.0)
    asked = [
        systems.offered(systems.paced(qps), settings, systems.SMALL, "long")
        for qps in systems.LOADS
    ]
    assert asked[0] < 0.5 < 1 < asked[2] < asked[3]
    short = systems.offered(systems.paced(1.75), settings, systems.SMALL, "short")
    assert short < 0.1
