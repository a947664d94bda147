"""Chunks of growing groups under load, through the planner, scheduler and cache that serve.

Eight lanes of one A100 each, as the instances of figure 8. `instances_s` simulates the same plans
as the other figures do, on instances that work apart from each other, with the latencies that the
planner itself has; `served_s` is what a virtual replica makes of the same requests. There all lanes
take each step together, and pages that change lanes are sent. A step has at most 8,192 tokens of a
lane: with 65,536, plans on few lanes hold up the others for longer (fixed-4 at 1.5/s: 2.6 s in
place of 2.0). A hop costs what Table 1 implies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from experiments.figures import Claim, Figure, Mechanism, Panel, Row, Rows, cell, fewest
from experiments.papers import main
from experiments.step_counts import StepCounts
from experiments.tetris.figure import TetrisSettings
from experiments.tetris.model import hop
from jaxserve.lab.simulate.noise import Noise
from jaxserve.lab.simulate.replica import VirtualReplica
from jaxserve.lab.simulate.run import System, execute, shape_of
from jaxserve.lab.simulate.tetris import PrefillInstances, constant
from jaxserve.lanes import cdsp
from jaxserve.lanes.planner import LanePlanner
from jaxserve.lanes.rates import Link
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig

LANES = 8
PLANNERS = ("cdsp", "single", "fixed-2", "fixed-4", "fixed-8")
LOADS = (0.5, 1.0, 1.5)  # requests per second
REQUESTS = 100  # of a run, at most
BLOCK = 64  # tokens of a page
SCHEDULER = SchedulerConfig(
    chunk_tokens=8_192, max_seqs=256, max_queue=10**6, exchange="pass_q", planner="fixed-8"
)
IMPROVEMENT = 0.1  # share of a prompt's time that more lanes must save, in both


class RingSystem(System):
    """Lanes whose hops cost what Table 1 implies, whatever they carry."""

    def link(self, lanes: int) -> Link:
        return Link(hop(LANES), super().link(lanes).bytes_per_s)


def replica(planner: str, noise: Noise) -> VirtualReplica:
    system = RingSystem(shape_of("llama3-8b"), "a100", MeshConfig(kvp=LANES), noise=noise)
    rate = IMPROVEMENT if planner in ("single", "cdsp") else None
    return system.replica(
        dataclasses.replace(SCHEDULER, planner=planner, improvement=rate),
        CacheConfig(block_size=BLOCK, placement="striped"),
    )


def sweep(settings: TetrisSettings) -> Iterator[Row]:
    for load in LOADS:
        yield from rows_at(load, settings, PLANNERS)


def rows_at(load: float, settings: TetrisSettings, planners: Sequence[str]) -> Iterator[Row]:
    """A row for each planner at a load."""
    few = dataclasses.replace(settings, requests=min(settings.requests, REQUESTS))
    arrivals = [dataclasses.replace(arrival, output=1) for arrival in few.arrivals("short", load)]
    for planner in planners:
        made = replica(planner, few.step_noise)
        counts = StepCounts()
        made.listeners.append(counts)
        plans = made.scheduler.packer.prefill.chunks.planner
        assert isinstance(plans, LanePlanner)
        outcome = execute(made, arrivals)
        policy = cdsp.PLANNERS[planner]
        rate = constant(IMPROVEMENT)
        apart = PrefillInstances(plans.instances, LANES, policy, rate, noise=few.step_noise).run(
            arrivals
        )
        yield {
            "lengths": "generated: tetris mixes",
            "planner": planner,
            "load": load,
            "served_s": float(np.mean([record.ttft for record in outcome.records])),
            "served_busy": outcome.busy,
            "instances_s": float(apart.ttft.mean()),
            "several": apart.several,
            "grown": counts.grown,
        }


def _against(rows: Rows, column: str, load: float, other: str) -> float:
    """Mean TTFT of another planner over that of cdsp."""
    return cell(rows, column, load=load, planner=other) / cell(
        rows, column, load=load, planner="cdsp"
    )


STEPS = (
    "with eight instances and these latencies one group of all is nearly as good as any plan, also "
    "where groups work apart (figure 8 has 16, and groups of 8 and 16). Served, all lanes take "
    "each step together, so that a prompt on a small group holds up the others for as long as its "
    "chunk takes: plans that give prompts few lanes lose more by it"
)
FIGURE = Figure(
    "fig8_served",
    "TTFT by load, through the scheduler and the cache",
    "simulated",
    sweep,
    mechanisms=(
        Mechanism("plans of several chunks", fewest("several", planner="cdsp", load=LOADS[-1])),
        Mechanism("groups of lanes that grew", fewest("grown", planner="cdsp", load=LOADS[-1])),
    ),
    seeded=True,
    claims=tuple(
        Claim(
            f"mean TTFT, {other} / cdsp, {load:g}/s, {where}",
            1,
            lambda rows, column=column, load=load, other=other: _against(rows, column, load, other),
            "7.2, 7.3: Tetris is faster",
            better="higher",
            limit=True,
            remark=STEPS if (column, load, other) == ("served_s", 1.5, "fixed-8") else "",
        )
        for load in (LOADS[0], LOADS[-1])
        for other in ("single", "fixed-4", "fixed-8")
        for column, where in (("instances_s", "instances apart"), ("served_s", "served"))
    ),
    panels=(
        Panel("served", "load", "served_s", "planner", (), "y"),
        Panel("instances apart", "load", "instances_s", "planner", (), "y"),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "tetris")
