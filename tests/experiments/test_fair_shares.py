"""The table of a flooding tenant: its verdict, and a short run."""

from __future__ import annotations

import json

from experiments.benchmarks.fair_shares import COMMAND, WAYS, verdict
from experiments.script import command_line


def ways(fair: float, one: float, refused: float = 0.0) -> dict[str, dict[str, float]]:
    return {
        "alone": {"p99": 1.0, "refused": 0.01},
        "fair shares": {"p99": fair, "refused": 0.01 + refused},
        "one tenant": {"p99": one, "refused": 0.01},
    }


def test_the_verdict_asks_for_a_small_move_and_for_a_flood():
    assert verdict(ways(1.09, 3.0)) == []
    assert "+11.0%" in verdict(ways(1.11, 3.0))[0]
    assert "refused" in verdict(ways(1.0, 3.0, 0.02))[0]
    assert "it is none" in verdict(ways(1.0, 1.05))[0]


def test_a_short_run_shows_that_a_flood_does_harm_without_shares(tmp_path, capfd):
    file = tmp_path / "shares.json"
    flags = f"--seconds=25 --seeds=1 --flood=4 --json={file}"
    command_line("fair_shares", "", COMMAND, flags.split())
    printed = capfd.readouterr().out
    assert all(way in printed for way in WAYS)
    found = json.loads(file.read_text())["ways"]
    assert found["fair shares"]["p50"] < 2 * found["alone"]["p50"]
    assert found["one tenant"]["p50"] > 4 * found["alone"]["p50"]
