"""Figure 13: two servers, eight instances, the three workloads mixed.

A pool over both servers sends queries between them; one pool in each server and a router, or hashes
within a server, do not. KV that moves between instances takes the adapters between servers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from experiments.figures import Claim, Figure, Panel, Row
from experiments.papers import main
from experiments.tokenlake import goodput
from experiments.tokenlake.figure import MIXED, TokenLakeSettings
from experiments.tokenlake.systems import (
    ADAPTIVE,
    CHUNK,
    HASHED,
    INSTANCES,
    POOL,
    ROUTER,
    STRIPED,
    SYSTEMS,
    hashed,
    routed,
    split,
    striped,
)
from jaxserve.cluster.roles import Role

SERVERS = 2
ADAPTERS = 100e9  # bytes per second: four of 200 Gbps a server
TWO_POOLS = f"{POOL}, hashed, in each server"
TWO_STRIPED = f"{POOL}, striped, in each server"
WHOLE = f"{POOL}, striped over both servers"
GROUPS = f"{POOL}, hashed within a server"
P6D2 = "6P2D"
P2D6 = "2P6D"
COUNT = SERVERS * INSTANCES
SPECS = {
    TWO_POOLS: replace(SYSTEMS[HASHED], roles=(Role.MIXED,) * SERVERS),
    TWO_STRIPED: replace(SYSTEMS[STRIPED], roles=(Role.MIXED,) * SERVERS),
    GROUPS: hashed(instances=COUNT, group=INSTANCES),
    WHOLE: striped(COUNT),
    ROUTER: routed("sglang", COUNT, CHUNK),
    ADAPTIVE: routed("sglang", COUNT),
    P6D2: split(6, 2),
    P2D6: split(2, 6),
}
PAPER = {P6D2: 5.47, P2D6: 28.49, ROUTER: 5.46}  # throughput at equal input latency (7.5)


def sweep(settings: TokenLakeSettings) -> Iterator[Row]:
    for name, spec in SPECS.items():
        yield from goodput.rows(name, replace(spec, bytes_per_s=ADAPTERS), MIXED, settings)


def _claims() -> Iterator[Claim]:
    for system in (TWO_POOLS, TWO_STRIPED, GROUPS, WHOLE):
        for other, times in PAPER.items():
            yield Claim(
                f"P90 goodput, {system} / {other}",
                times,
                lambda rows, system=system, other=other: goodput.gain(rows, MIXED, system, other),
                "7.5, at equal input latency, which it does not give",
                better="higher",
            )
        yield Claim(
            f"P90 goodput, {system} / {ADAPTIVE}",
            1.0,
            lambda rows, system=system: goodput.gain(rows, MIXED, system, ADAPTIVE),
            "7.5",
            better="higher",
            limit=True,
            remark="not in the paper",
        )


FIGURE = Figure(
    "fig13",
    "Two servers, the workloads mixed, Llama-2-7B, 16 A100",
    "simulated",
    sweep,
    claims=tuple(_claims()),
    panels=(
        Panel("ms to the first token, per token", "qps", "input_ms", "system", log="xy"),
        Panel("ms per output token", "qps", "output_ms", "system", log="x"),
        Panel("in time", "qps", "in_time", "system", log="x"),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "tokenlake")
