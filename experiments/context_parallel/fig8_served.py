"""Full prefill of one prompt, through the scheduler and the cache that serve, beside the formula.

A virtual replica of the paper's hosts, one lane each, whose steps take what `system` is calibrated
to: linear parts, attention, hops, and the issue of a step of the ring. The formula computes a
prompt in one step; so does the scheduler, with at most 65,536 tokens for each lane. `pass_kv` is
the paper's ring, `pass_q` the other one, `auto` what is predicted to be fastest in each step.
"""

from __future__ import annotations

from collections.abc import Iterator

from experiments.context_parallel.paper import HEADS, MODEL
from experiments.context_parallel.system import PaperHost, calibrated, fastest
from experiments.figures import Claim, Figure, Panel, Row, Rows, cell
from experiments.papers import main
from jaxserve.cache import CacheManager, LaneRules
from jaxserve.costs.coefficients import Costs
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.replica import VirtualReplica
from jaxserve.lab.simulate.run import execute
from jaxserve.lanes.choice import ExchangeChooser
from jaxserve.scheduling import Scheduler
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig

CASES = (
    (1, 128_000),
    (2, 128_000),
    (4, 128_000),
    (8, 128_000),
    (16, 128_000),
    (8, 1_000_000),
    (16, 1_000_000),
)
CHUNK = 65_536  # tokens of a step for each lane: the most that the scheduler takes
BLOCK = 128  # tokens of a page


def costs(host: PaperHost, hosts: int) -> Costs:
    """Returns the costs of one rank. The issue of a step of the ring is as a sum over ranks: once,
    hidden by nothing."""
    rates = host.prefill
    return Costs(
        layers=MODEL.layers,
        linear_floor=host.floor,
        linear_token=host.token,
        chunk=rates.launch,
        pair=4 * HEADS.heads * HEADS.head_dim / rates.flops_per_s,
        read=HEADS.kv_bytes / rates.read_bytes_per_s,
        tp=host.issue * (hosts - 1),
    )


def replica(hosts: int, exchange: str) -> VirtualReplica:
    """A lane per host, with room for a prompt on any of them."""
    host = calibrated()
    mesh = MeshConfig(kvp=hosts)
    chosen = fastest if exchange == "auto" else exchange
    chooser = ExchangeChooser(hosts, HEADS, host.prefill, chooser=chosen, block=BLOCK)
    lanes = dict(placement="striped", lane_tokens=BLOCK) if hosts > 1 else {}
    cache = CacheConfig(block_size=BLOCK, pages=2**11, **lanes)
    config = SchedulerConfig(
        chunk_tokens=CHUNK, max_seqs=1, exchange=exchange if hosts > 1 else "gather"
    )
    manager = CacheManager(cache, hosts, 1, rules=LaneRules(config.stripe(BLOCK)))
    scheduler = Scheduler(
        config, manager, mesh, 2**31 - 1, costs=costs(host, hosts), chooser=chooser
    )
    return VirtualReplica(scheduler, cache, mesh)


def sweep(settings: None) -> Iterator[Row]:
    for hosts, tokens in CASES:
        formula = calibrated().ttft(0, tokens, hosts)
        for exchange in ("pass_kv", "pass_q", "auto"):
            outcome = execute(replica(hosts, exchange), [Arrival(0.0, tokens, 1)], keep_steps=True)
            yield {
                "hosts": hosts,
                "tokens": tokens,
                "exchange": exchange,
                "formula_s": min(formula.values()) if exchange == "auto" else formula[exchange],
                "served_s": outcome.records[0].ttft,
                "steps": len(outcome.steps),
            }


def _served(rows: Rows, hosts: int, tokens: int, exchange: str = "auto") -> float:
    return cell(rows, "served_s", hosts=hosts, tokens=tokens, exchange=exchange)


def _over_formula(rows: Rows, hosts: int, tokens: int, exchange: str) -> float:
    where = dict(hosts=hosts, tokens=tokens, exchange=exchange)
    return cell(rows, "served_s", **where) / cell(rows, "formula_s", **where)


FIGURE = Figure(
    "fig8_served",
    "Full prefill through the scheduler and the cache",
    "simulated",
    sweep,
    claims=(
        *(
            Claim(
                f"128K on {hosts} hosts, auto",
                paper,
                lambda rows, hosts=hosts: _served(rows, hosts, 128_000),
                "table 7" if hosts < 8 else "4.2",
                "s",
            )
            for hosts, paper in ((1, 42.01), (2, 21.04), (4, 10.95), (8, 5.85), (16, 3.8))
        ),
        Claim(
            "1M on 16 hosts, auto",
            77,
            lambda rows: _served(rows, 16, 1_000_000),
            "4.2.3",
            "s",
        ),
        Claim(
            "1M on 16 hosts, pass-KV",
            77,
            lambda rows: _served(rows, 16, 1_000_000, "pass_kv"),
            "4.2.3",
            "s",
        ),
        *(
            Claim(
                f"served / formula, {tokens // 1000}K on {hosts} hosts, {exchange}",
                1,
                lambda rows, hosts=hosts, tokens=tokens, exchange=exchange: _over_formula(
                    rows, hosts, tokens, exchange
                ),
                "the formula",
            )
            for hosts, tokens in ((8, 128_000), (16, 1_000_000))
            for exchange in ("pass_kv", "pass_q", "auto")
        ),
    ),
    panels=(
        Panel("128K", "hosts", "served_s", "exchange", (("tokens", 128_000),), "xy"),
        Panel("1M", "hosts", "served_s", "exchange", (("tokens", 1_000_000),), "xy"),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "context_parallel")
