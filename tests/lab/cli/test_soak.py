"""Leaks that a soak finds, and a short one from end to end."""

from pathlib import Path

import pytest

from jaxserve.cli import main as cli
from jaxserve.lab.cli.soak import SoakSample, faults_of, report, slope
from tests.models.reference import random_weights
from tests.text.vocabulary import tokenizer
from tests.weights.models import TINY, write_folder


def samples(rss=lambda minute: 500.0, **last):
    found = [SoakSample(float(minute), rss(minute), 30, 15, 4, 2, 0.3) for minute in range(61)]
    return [
        *found,
        SoakSample(
            **{
                "minute": 61.0,
                "rss_mib": rss(61),
                "threads": 30,
                "descriptors": 15,
                "running": 0,
                "waiting": 0,
                "pages_held": 0.0,
                **last,
            }
        ),
    ]


def test_a_run_after_which_all_is_as_before_left_nothing():
    assert (
        faults_of(samples()) == []
        and faults_of(samples(lambda minute: 500.0 + min(minute, 10) * 20)) == []
    )
    assert "left behind: nothing" in report(samples(), {"http 200": 3}, [])


@pytest.mark.parametrize(
    "change,said",
    [
        ({"running": 1}, "1 requests run"),
        ({"waiting": 2}, "2 wait"),
        ({"pages_held": 0.01}, "1.00% of the pages"),
        ({"threads": 60}, "threads: 30 before, 60 after"),
        ({"descriptors": 40}, "descriptors: 15"),
        ({"rss": lambda minute: 500.0 + 3 * minute}, "memory grows"),
    ],
)
def test_each_thing_left_behind_is_named(change, said):
    (fault,) = faults_of(samples(**change))
    assert said in fault


def test_a_slope_is_that_of_the_line():
    assert slope([0, 1, 2, 3], [5, 7, 9, 11]) == pytest.approx(2) and slope([0, 1], [5, 7]) == 0


def soaked(model: Path, minutes: float, report: Path, capfd, *flags: str) -> str:
    arguments = [
        "soak",
        f"--model={model}",
        f"--minutes={minutes}",
        "--max_model_len=512",
        "--profile=none",
        "--callers=4",
        "--prompt_tokens=60",
        "--output_tokens=12",
        f"--json={report}",
        *flags,
    ]
    assert cli.main(arguments) == 0
    return capfd.readouterr().out


def test_a_short_soak_leaves_nothing(tmp_path, capfd):
    model = write_folder(tmp_path / "model", TINY, random_weights(TINY, 0))
    tokenizer().save(model)
    few = "--max_seqs=4", "--chunk_tokens=32", "--pages=400"  # few programs, which are tiny
    out = soaked(model, 0.1, tmp_path / "soak.json", capfd, *few)
    assert "left behind: nothing" in out and "http 200" in out


@pytest.mark.matrix
def test_a_short_soak_of_the_real_model_leaves_nothing(smollm2_gguf, tmp_path, capfd):
    out = soaked(smollm2_gguf, 1.0, tmp_path / "soak.json", capfd)
    assert "left behind: nothing" in out and "http 200" in out and "schema 5" not in out
