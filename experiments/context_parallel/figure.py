"""The command line of this paper's figures. All are computed: a sweep is given nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import figures
from jaxserve.settings.options import Option

RESULTS = Path(__file__).parent / "results"
OPTIONS = [Option("out", str, str(RESULTS), "folder of the CSV and PNG")]


def settings_of(values: dict[str, Any]) -> None:
    return None


def main(figure: figures.Figure, arguments: Sequence[str] | None = None) -> None:
    """The command line of one figure's file."""
    figures.main(figure, OPTIONS, settings_of, arguments)
