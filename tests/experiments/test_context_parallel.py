"""The context parallel paper's figures: each one's rows, claims and panels; what the calibration
fits and what it then predicts."""

import math
from pathlib import Path

import pytest

from experiments import figures
from experiments.context_parallel import __main__ as every
from experiments.context_parallel import decodes, fig9, paper, table4, table7, table8
from experiments.context_parallel.boundary import Boundary
from experiments.context_parallel.system import RANKS, RINGS, calibrated
from experiments.context_parallel.work import choose
from experiments.script import command_line
from tests.experiments.figure_checks import made_small

FIGURES = {made.name: made for made in every.PAPER.figures()}
FOLDER = Path(every.__file__).parent


@pytest.fixture(scope="module")
def rows() -> dict[str, list[figures.Row]]:
    return {name: list(made.sweep(None)) for name, made in FIGURES.items()}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_has_csv_and_table(name, tmp_path, monkeypatch):
    found = made_small(FIGURES[name], None, tmp_path, monkeypatch)
    assert all(math.isfinite(claim.ours(found)) for claim in FIGURES[name].claims)


def test_kept_results_are_those_of_the_code(rows):
    for name in FIGURES:
        kept = figures.read_csv(FOLDER / "results" / f"{name}.csv")
        assert len(kept) == len(rows[name])
        for old, new in zip(kept, rows[name]):
            assert all(
                old[key]
                == (
                    pytest.approx(value, rel=1e-3, abs=1e-6)
                    if isinstance(value, float | int)
                    else value
                )
                for key, value in new.items()
            ), (name, old, new)


# --- the paper's numbers, as printed


def test_the_paper_is_quoted_without_slips():
    assert all(row.cached + row.new == 128_000 for row in paper.TABLE4) and len(paper.TABLE4) == 14
    assert (paper.HEADS.heads, paper.HEADS.kv_heads, paper.HEADS.head_dim) == (16, 1, 128)
    assert 0.97 < paper.MODEL.layers * paper.MODEL.layer_weights() / paper.PARAMETERS < 1


# --- what is fitted, and what is predicted


def test_fitted_rates_are_those_of_the_machines():
    system = calibrated()
    assert 480e12 < system.prefill.flops_per_s < 540e12  # alone, attention reaches 540 (appendix A)
    # peak of the memory: 2.4 TB/s (section 4.1)
    assert 1.9e12 < system.decode.read_bytes_per_s < 2.4e12
    assert 45e9 < system.prefill.all_to_all.bytes_per_s < 50e9  # line rate: 400 Gb/s
    assert (
        20e9 < system.prefill.hop.bytes_per_s < 50e9 and 30e-6 < system.prefill.hop.seconds < 36e-6
    )
    linear = 2 * paper.PARAMETERS / paper.GPUS / paper.MODEL.layers / system.token
    assert 0.5 * paper.PEAK < linear < paper.PEAK


def test_table4_is_predicted(rows):
    found = rows["table4"]
    assert (
        table4.error(found, "pass_kv") < 0.06
        and table4.error(found, "pass_q") < 0.105
        and table4.error(found, *RINGS) < 0.08
    )
    assert (
        table4.error(found, "pass_kv", hidden=table4.ALL) < 0.1
        and table4.error(found, "pass_q", hidden=table4.ALL) < 0.1
    )
    assert table4.right(found, table4.FITTED) == 14 and table4.right(found, table4.ALL) >= 12
    assert 0.0325 < table4.crossover(found, table4.FITTED) < 0.1


def test_tables_5_to_8_are_within_what_is_said():
    system = calibrated()
    for row in paper.TABLE6:
        assert system.ttft(0, row.tokens, row.hosts)["pass_kv"] * 1e3 == pytest.approx(
            row.ttft, rel=0.05
        )
        assert system.ttit(row.tokens, row.hosts)["pass_q"] * 1e3 == pytest.approx(
            row.ttit, rel=0.13
        )
    for row in paper.TABLE7:
        first, after = (
            (system.tp_ttft(row.tokens, row.hosts), system.tp_ttit(row.tokens, row.hosts))
            if row.kind == "tp"
            else (
                system.ttft(0, row.tokens, row.hosts)["pass_kv"],
                system.ttit(row.tokens, row.hosts)["pass_q"],
            )
        )
        assert first * 1e3 == pytest.approx(row.ttft, rel=0.12) and after * 1e3 == pytest.approx(
            row.ttit, rel=0.04
        )


def test_every_part_of_table8_is_within_20_percent_on_average(rows):
    assert all(
        claim.ours(rows["table8"]) < claim.paper for claim in table8.FIGURE.claims if claim.limit
    )


@pytest.mark.parametrize(
    "new, strategy",
    [
        (1280, "pass_q"),
        (3200, "pass_q"),
        (4160, "pass_q"),
        (12_800, "pass_kv"),
        (128_000, "pass_kv"),
    ],
)
def test_the_chooser_on_table4(new, strategy):
    decision = choose(calibrated().chooser(RANKS), [(128_000 - new, new)])
    assert decision.strategy == strategy
    assert choose(fig9.rules()["alg1"], [(128_000 - new, new)]).strategy == strategy


def test_the_papers_line_does_not_tell_its_own_table():
    assert not any(Boundary(*paper.FIT)(row.cached, row.new) > 0 for row in paper.TABLE4)


@pytest.mark.parametrize(
    "load", [dict(batch=8), dict(context=1_000_000), dict(links=table7.NVLINK)]
)
def test_decode_with_gathered_queries_falls_with_hosts(rows, load):
    times = [table7.ttit(rows["table7"], hosts, **load) for hosts in table7.HOSTS]
    assert times == sorted(times, reverse=True)


def test_one_sequence_of_128k_is_too_little_for_the_papers_network(rows):
    times = [table7.ttit(rows["table7"], hosts) for hosts in table7.HOSTS]
    assert times[0] < times[1] > times[2] > times[3]
    ring = [table7.ttit(rows["table7"], hosts, "ring") for hosts in table7.HOSTS]
    assert ring == sorted(ring) and all(ours < theirs for ours, theirs in zip(times[1:], ring[1:]))


def test_the_page_has_the_table_of_decodes_that_the_command_prints(capsys):
    command = decodes.COMMAND
    page = (FOLDER.parents[1] / "docs" / "sequence_parallelism.md").read_text()
    assert command_line("decodes", "", command, ["--lanes=16"]) == 0
    table = capsys.readouterr().out
    assert f"\n{table}" in page
    assert "`pass_q`" in table and "`gather`" in table
    assert command_line("decodes", "", command, ["--lanes=8"]) == 0
    assert "`pass_q`" not in capsys.readouterr().out  # as the page says


def test_decodes_that_do_not_fit_are_left_out_and_lists_are_checked(capsys):
    command = decodes.COMMAND
    assert command_line("decodes", "", command, ["--batches=1,2048", "--contexts=1000000"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 1
    assert command_line("decodes", "", command, ["--batches=0"]) == 2
    assert "batches: '0' is not a list of numbers above 0" in capsys.readouterr().err
