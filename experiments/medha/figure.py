"""Settings of the sweeps of Medha's figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from experiments.papers import SPREAD, SweepSettings, missing, sweep_options
from jaxserve.settings.options import Option

LENGTHS = {
    5: "medha_mixed/merged_df_5_percent_long_context_mixed.csv.gz",
    1: "medha_mixed/merged_df_1_percent_long_context_mixed.csv.gz",
    0: "medha_mixed/merged_df_0_percent_long_context_mixed.csv.gz",
}
RUN = 3600.0  # seconds of a run under load (Medha 5.2)
OPTIONS = [
    *sweep_options(
        "medha_mixed",
        "generated lengths",
        Option(
            "requests", int, None, "most requests of a simulation; default: as the figure needs", 1
        ),
        "of arrivals, lengths and noise",
    ),
    *SPREAD,
    Option("seconds", float, RUN, "after which a run under load is cut off; the paper's: 3600", 1),
]


@dataclass(frozen=True)
class MedhaSettings(SweepSettings):
    """Settings of a sweep of Medha's figures. seconds: after which a run under load is cut off."""

    seconds: float = RUN

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        return replace(super().of(values), seconds=values.get("seconds", RUN))

    def check(self, data: Path) -> None:
        for percent in LENGTHS:
            self.workload(percent)

    def workload(self, percent: int) -> str:
        """Returns the workload with `percent` percent of long prompts, as `jaxserve simulate` takes
        it. Errors: ConfigError for a wrong folder."""
        if self.data is None:
            return f"poisson:mix=medha-{percent}"
        file = self.data / LENGTHS[percent]
        if not file.is_file():
            raise missing(self.data, LENGTHS[percent])
        return str(file)

    @property
    def lengths(self) -> str:
        return "generated: medha mixes" if self.data is None else "medha_mixed"
