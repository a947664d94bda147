"""What is asked of the figures of every paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import figures
from experiments.figures import Figure, Row, matching


def check_all(found: Mapping[str, Figure], numbers: Sequence[str], kinds: Sequence[str]) -> None:
    """Checks that each figure has a file, and the paper's numbers."""
    assert list(found) == [
        number if number.startswith("table") else f"fig{number}" for number in numbers
    ]
    for made in found.values():
        assert made.claims and made.panels and made.kind in kinds
        assert all(
            claim.paper > 0 and claim.source and claim.better in ("higher", "lower", "equal")
            for claim in made.claims
        )
        assert all(claim.better != "equal" for claim in made.claims if claim.limit)


def made_small(made: Figure, settings: Any, folder: Path, monkeypatch: Any) -> list[Row]:
    """The rows of the CSV that the figure makes with these settings; its table and panels are of
    them."""
    monkeypatch.setattr(figures, "draw", lambda *_: None)
    monkeypatch.setattr(figures, "canvas", lambda: None)
    shown = figures.make(made, settings, folder)
    rows = figures.read_csv(folder / f"{made.name}.csv")
    assert made.kind in shown and all(claim.what in shown for claim in made.claims)
    for panel in made.panels:
        assert {panel.x, panel.y, panel.by} <= set(rows[0]) and matching(
            rows, **dict(panel.where)
        ), panel
    return rows


def assert_one_line(told: str, command: str, said: str) -> None:
    """`told`, of a command, is one line that begins with its name and has `said` in it."""
    assert told.startswith(f"{command}: ") and said in told and told.count("\n") == 1
