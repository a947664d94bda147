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
from experiments.figures import Claim, Figure, Mechanism, Panel, Row, Rows, cell, fewest
from experiments.papers import main
from experiments.step_counts import StepCounts
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
            made = replica(hosts, exchange)
            counts = StepCounts()
            made.listeners.append(counts)
            outcome = execute(made, [Arrival(0.0, tokens, 1)], keep_steps=True)
            yield {
                "hosts": hosts,
                "tokens": tokens,
                "exchange": exchange,
                "formula_s": min(formula.values()) if exchange == "auto" else formula[exchange],
                "served_s": outcome.records[0].ttft,
                "steps": len(outcome.steps),
                "spread_steps": counts.spread,
            }


def _served(rows: Rows, hosts: int, tokens: int, exchange: str = "auto") -> float:
    return cell(rows, "served_s", hosts=hosts, tokens=tokens, exchange=exchange)


def _over_formula(rows: Rows, hosts: int, tokens: int, exchange: str) -> float:
    where = dict(hosts=hosts, tokens=tokens, exchange=exchange)
    return cell(rows, "served_s", **where) / cell(rows, "formula_s", **where)


def _farthest(rows: Rows) -> float:
    found = [
        _over_formula(rows, hosts, tokens, exchange)
        for hosts, tokens in OVER
        for exchange in ("pass_kv", "pass_q", "auto")
    ]
    return max(found, key=lambda ratio: abs(ratio - 1))


# what is computed there, without a scheduler
COUNTED = {1: "table 6", 2: "table 6", 4: "table 7", 8: "figure 6", 16: "figure 8"}
OVER = [(8, 128_000), (16, 1_000_000)]
FIGURE = Figure(
    "fig8_served",
    "Full prefill through the scheduler and the cache",
    "simulated",
    sweep,
    mechanisms=(
        Mechanism("steps with a prompt on several lanes", fewest("spread_steps", hosts=8)),
    ),
    claims=(
        *(
            Claim(
                f"128K on {hosts} hosts, auto",
                paper,
                lambda rows, hosts=hosts: _served(rows, hosts, 128_000),
                "table 7" if hosts < 8 else "4.2",
                "s",
                counted_in=COUNTED[hosts],
            )
            for hosts, paper in ((1, 42.01), (2, 21.04), (4, 10.95), (8, 5.85), (16, 3.8))
        ),
        Claim(
            "1M on 16 hosts, auto",
            77,
            lambda rows: _served(rows, 16, 1_000_000),
            "4.2.3",
            "s",
            counted_in="figure 8",
        ),
        Claim(
            "1M on 16 hosts, pass-KV",
            77,
            lambda rows: _served(rows, 16, 1_000_000, "pass_kv"),
            "4.2.3",
            "s",
            counted_in="figure 8",
        ),
        Claim(
            "served / formula, farthest from 1 of 128K on 8 and 1M on 16 hosts, all exchanges",
            1,
            _farthest,
            "the formula; not in the paper",
            remark="the scheduler serves the prompt in few steps, whose costs and exchanges are "
            "the formula's: it shows that the two agree, no more",
        ),
    ),
    panels=(
        Panel("128K", "hosts", "served_s", "exchange", (("tokens", 128_000),), "xy"),
        Panel("1M", "hosts", "served_s", "exchange", (("tokens", 1_000_000),), "xy"),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "context_parallel")
