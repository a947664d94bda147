"""Parts of the pool's goodput: what it would be if exchange between lanes took no time, and by the
length of a segment.

    python -m experiments.tokenlake.why
    python -m experiments.tokenlake.why --workload=scbench
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from typing import Any

from experiments.script import command_line
from experiments.tokenlake import goodput
from experiments.tokenlake.figure import OPTIONS, WORKLOADS, TokenLakeSettings
from experiments.tokenlake.systems import ADAPTIVE, BLOCK, SYSTEMS, hashed, striped
from experiments.virtual_cluster.cluster import ClusterSpec
from jaxserve.cli.display import table
from jaxserve.lab.simulate.run import System
from jaxserve.lanes.rates import Link
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option

NO_TIME = Link(0.0, 1e18)


@dataclass(frozen=True)
class FreeExchange(System):
    """A system whose lanes exchange in no time."""

    def link(self, lanes: int) -> Link:
        return NO_TIME


def free(spec: ClusterSpec) -> ClusterSpec:
    """Returns the pool without the time of its exchange."""
    system = spec.system
    given = {field.name: getattr(system, field.name) for field in fields(system)}
    return replace(spec, system=FreeExchange(**given))


CASES = {
    ADAPTIVE: SYSTEMS[ADAPTIVE],
    "striped": striped(),
    "striped, free exchange": free(striped()),
    "hashed, 512": hashed(),
    "hashed, 512, free exchange": free(hashed()),
    f"hashed, {BLOCK}": hashed(BLOCK),
    f"hashed, {BLOCK}, free exchange": free(hashed(BLOCK)),
}


def run(values: dict[str, Any]) -> int:
    settings = TokenLakeSettings.of(values)
    workload = values["workload"]
    lines = []
    for name, spec in CASES.items():
        rows = list(goodput.rows(name, spec, workload, settings))
        lines.append([name, f"{goodput.goodput(rows, workload, name):.3g}"])
    print(table([workload, "P90 goodput, 1/s"], lines))
    return 0


def main(arguments: list[str]) -> int:
    choice = Option("workload", str, "loogle", "workload", choices=tuple(WORKLOADS))
    command = Command({"what is run": [*OPTIONS, choice]}, run)
    return command_line("why", "parts of the pool's goodput", command, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
