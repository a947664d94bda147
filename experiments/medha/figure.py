"""What a sweep of Medha's figures is given, and the command line that says it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import figures
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError

RESULTS = Path(__file__).parent / "results"
SIBLING = Path(__file__).parents[3] / "shared" / "data"
LENGTHS = {
    5: "medha_mixed/merged_df_5_percent_long_context_mixed.csv.gz",
    0: "medha_mixed/merged_df_0_percent_long_context_mixed.csv.gz",
}
OPTIONS = [
    Option("out", str, str(RESULTS), "folder of the CSV and PNG"),
    Option(
        "data",
        str,
        None,
        "folder with medha_mixed; default: JAXSERVE_DATA, else ../shared/data, else generated "
        "lengths",
    ),
    Option("requests", int, None, "most requests of a simulation; default: as the figure needs", 1),
    Option("seed", int, 0, "of arrivals and lengths", 0),
]


@dataclass(frozen=True)
class MedhaSettings:
    """What a sweep is given. data: None for generated lengths; requests: None for as many as the
    figure needs."""

    data: Path | None = None
    requests: int | None = None
    seed: int = 0

    def workload(self, percent: int) -> str:
        """A workload with so many percent of long prompts, as `jaxserve simulate` takes it. Errors:
        ConfigError for a wrong folder."""
        if self.data is None:
            return f"poisson:mix=medha-{percent}"
        file = self.data / LENGTHS[percent]
        if not file.is_file():
            raise ConfigError(
                "data",
                f"{self.data} has no {LENGTHS[percent]}; give the folder that has it, or --data= "
                "to generate",
            )
        return str(file)

    @property
    def lengths(self) -> str:
        return "generated: medha mixes" if self.data is None else "medha_mixed"


def settings_of(values: dict[str, Any]) -> MedhaSettings:
    """Errors: ConfigError for a data folder that was named and is not there."""
    named = os.environ.get("JAXSERVE_DATA") if values["data"] is None else values["data"]
    data = (
        (Path(named).expanduser() if named else None)
        if named is not None
        else (SIBLING if SIBLING.is_dir() else None)
    )
    settings = MedhaSettings(data, values["requests"], values["seed"])
    for percent in LENGTHS:
        settings.workload(percent)
    return settings


def main(figure: figures.Figure, arguments: Sequence[str] | None = None) -> None:
    """The command line of one figure's file."""
    figures.main(figure, OPTIONS, settings_of, arguments)
