"""`jaxserve profile`: measures what steps cost on the engine at hand, for its scheduler and for
simulations."""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxserve.cli.display import table
from jaxserve.cli.engine_flags import engine_config, engine_groups
from jaxserve.lanes.choice import MoveTimes
from jaxserve.lanes.rates import GroupLinks
from jaxserve.observe.machine import described, machine
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import EngineConfig

ABOUT = """\
Runs steps of every compiled shape, with contexts up to --longest, on an engine with the flags
below, and fits the costs that scheduling predicts with. `jaxserve serve` with the same flags
finds them; another place is named by --out here and --profile there.

  jaxserve profile --model=smollm2-135m
"""
SAMPLE = 300  # requests of a simulation that tries an improvement rate
STEPS = 8  # loads at which rates are tried
PROFILE = [
    Option(
        "longest",
        int,
        65536,
        "tokens of the longest sequence that is measured, if the model and the cache hold it",
        2,
    ),
    Option("repeats", int, 3, "rounds in which each point is measured; the median counts", 1),
    Option(
        "workload",
        str,
        "poisson:mix=tetris-short",
        "lengths for which plans of lanes (--planner) are tuned, as `jaxserve simulate` takes them",
    ),
    Option("out", str, None, "file for the profile; default: where `jaxserve serve` looks"),
]


def run(values: dict[str, Any]) -> int:
    from jaxserve.engine.build import open_worker
    from jaxserve.engine.command_builder import GREEDY
    from jaxserve.engine.profiling import profile_file
    from jaxserve.engine.sampling_rows import VARIANTS
    from jaxserve.engine.sizing import for_this_machine, max_length

    config = for_this_machine(engine_config(values, profile="auto"))
    progress = sys.stderr.isatty()
    # all that is measured samples greedily
    worker, _ = open_worker(config, progress, variants=(VARIANTS[GREEDY],))
    max_len = max_length(config, worker.plan.model)
    longest = min(values["longest"], max_len)
    measured = profile_file.measure_costs(worker, longest, values["repeats"], progress)
    identity = profile_file.identity_of(worker, max_len)
    file = Path(values["out"]) if values["out"] else profile_file.safe_file(identity)
    searched = worker.plan.moves and config.scheduler.planner in ("single", "cdsp")
    search = improvement(values, config, worker.plan, max_len) if searched else None
    profile_file.write(file, identity, measured, search)
    rows = [
        [
            str(one.shape),
            str(one.point.decodes),
            f"{one.point.chunks} x {one.point.new}",
            str(max(one.point.context, one.point.cached)),
            "yes" if one.point.sample else "no",
            f"{one.seconds * 1e3:.2f}",
        ]
        for one in measured.points
    ]
    print(described(machine()))
    print()
    print(table(["shape", "decodes", "chunks", "tokens before", "sampled", "ms per step"], rows))
    print(
        f"\nmean error of the fit {measured.fitted:.1%}, of points left out of it "
        f"{measured.held_out:.1%}; written to {file}"
    )
    if measured.profile.doubt:
        print(f"these times cannot be trusted: {measured.profile.doubt}; measure again")
    spread = {
        "chunks": measured.spread_held_out,
        "decodes": measured.decode_held_out,
        "moves of pages": measured.move_held_out,
    }
    for what, held_out in spread.items():
        if held_out:
            errors = [
                [exchange, str(size), f"{error:.1%}"]
                for (exchange, size), error in held_out.items()
            ]
            print(f"\nsteps with {what} on several lanes, of points left out of the fit:")
            print(table(["exchange", "lanes", "mean error"], errors))
    if measured.profile.links:
        print("\nlinks between lanes of a group:")
        print(table(["lanes", "link", "us", "GB/s"], link_rows(measured.profile.links)))
    moves = move_rows(measured.points)
    if moves:
        print("\nsteps that move pages from each lane of a group to each, and the same without:")
        columns = ["lanes", "decodes", "chunks", "pages", "ms per step", "ms without"]
        print(table(columns, moves))
        print(moves_said(measured.profile.move_times))
    return 0


def move_rows(points: Iterable[Any]) -> list[list[str]]:
    """Describes those of the `MeasuredStep`s that moved pages, and what the same take without."""
    return [
        [
            str(one.point.group_size),
            str(one.point.decodes),
            f"{one.point.chunks} x {one.point.new}",
            str(one.point.moves),
            f"{one.seconds * 1e3:.2f}",
            f"{one.unmoved * 1e3:.2f}",
        ]
        for one in points
        if one.point.moves
    ]


def moves_said(times: MoveTimes | None) -> str:
    """Says what moves of pages take beside an all-to-all of as many bytes."""
    if times is None:
        return "moves are predicted by the links alone: no correction lowers the errors"
    return (
        f"a layer's moves take {times.correction.factor:.2f} times an all-to-all of as many bytes, "
        f"and {times.correction.seconds * 1e6:.1f} us; linear parts hide {times.hidden:.0%}"
    )


def link_rows(links: GroupLinks) -> list[list[str]]:
    """Describes links: the lanes of a group, name, microseconds of a message, and rate."""
    return [
        [str(size), name, f"{link.seconds * 1e6:.1f}", f"{link.bytes_per_s / 1e9:.2f}"]
        for size, each in links.items()
        for name, link in each.by_name().items()
    ]


def improvement(values: dict[str, Any], config: EngineConfig, plan: Any, max_len: int) -> Any:
    """Returns a search for the improvement rates with the least mean TTFT, by simulation, at loads
    up to where all lanes are busy (Tetris, 5.1)."""
    from jaxserve.engine.profiling.profile_file import replica_sizes
    from jaxserve.lab.simulate import workload
    from jaxserve.lanes.cdsp import PLANNERS
    from jaxserve.lanes.improvement_search import best_rates

    planner = config.scheduler.planner
    sample = lambda qps: [
        dataclasses.replace(one, prompt=min(one.prompt, max_len - 1))
        for one in workload.parse(values["workload"], qps=qps, requests=SAMPLE)
    ]

    def search(profile: Any) -> dict[str, dict[float, float]]:
        sizes = replica_sizes(plan, config.cache, config.scheduler, max_len)
        instances = sizes.instances(profile)
        lanes = config.mesh.kvp
        one = min(instances.latencies)
        seconds = statistics.fmean(
            instances.latencies[one](0, arrival.prompt) for arrival in sample(1.0)
        )
        loads = [lanes / seconds * step / STEPS for step in range(1, STEPS + 1)]
        return {planner: best_rates(instances, lanes, PLANNERS[planner], sample, loads)}

    return search


GROUPS = {
    title: [option for option in group if option.name != "profile"]
    for title, group in engine_groups().items()
}
COMMAND = Command({"measuring": PROFILE, **GROUPS}, run, ABOUT)
