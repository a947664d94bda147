"""The table of rules for late prompts: its arithmetic, and a run of a few requests."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from experiments.benchmarks.late_prompts import (
    COMMAND,
    PATIENCE,
    RULES,
    Case,
    check,
    shown,
    summary,
)
from experiments.script import command_line
from jaxserve.lab.simulate.recorder import RequestRecord
from jaxserve.policies import PromptView
from jaxserve.settings.schema import ConfigError


def record(kind: str, arrival: float, budget: float, ttft: float) -> RequestRecord:
    return RequestRecord(
        "0", kind, 100, 1, 0, arrival, arrival + budget, arrival + ttft, arrival + ttft, "length"
    )


def test_figures_by_hand():
    records = [
        *(record("short", number, 2.0, 1.0) for number in range(9)),
        record("short", 9.0, 2.0, 16.0),
        record("long", 0.0, 100.0, 150.0),
        dataclasses.replace(record("long", 0.0, 200.0, 150.0), output=0, reason="unfinished"),
    ]
    found = summary(records)
    assert (found["short_p50"], found["short_max"], found["short_in_time"]) == (1.0, 16.0, 0.9)
    assert (found["long_most_budgets"], found["long_in_time"]) == (1.5, 0.0)
    assert found["long_ended"] == 1 and found["short_ended"] == 10
    assert found["in_time"] == 9 / 12
    text = shown({Case("medha-5", 0.5, "shared", "behind"): found})
    assert "medha-5 0.5/s shared" in text and "75.0%" in text


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_rule_keeps_the_order_of_those_in_time_and_lets_none_wait_for_ever(rule):
    """By hand: due in 10 s, with half, a tenth and none of that to spare; the last waits since
    long ago."""
    due = np.array([10.0, 10.0, 10.0, 10.0])
    arrival = np.array([0.0, 0.0, 0.0, 9.0])
    work = np.array([5.0, 9.0, 10.0, 1 + PATIENCE * 2])
    passed = np.array([0.0, 0.0, 0.0, 100.0])
    view = PromptView(0.0, arrival, due, work, passed=passed, longest=np.full(4, 50.0))
    keys = rule.rank(view)
    assert keys[0] > keys[1] > keys[2] > keys[3]


def test_unknown_rules_are_refused():
    with pytest.raises(ConfigError, match="rules: soon: known are patient"):
        check([Case("medha-5", 0.5, "shared", "soon")])


def test_a_short_run_prints_a_line_per_rule_and_keeps_the_figures(tmp_path, capfd):
    file = tmp_path / "late.json"
    flags = "--mixes=medha-0 --rates=4 --sharing=unshared --requests=5 --seeds=1 --jobs=1"
    assert command_line("late_prompts", "", COMMAND, [*flags.split(), f"--json={file}"]) == 0
    printed = capfd.readouterr().out
    assert all(rule in printed for rule in RULES)
    assert [case["rule"] for case in json.loads(file.read_text())["cases"]] == list(RULES)
