"""Figure 12: what the pool brings by itself, and what elastic scheduling adds, in the latency of
inputs over the size of caches.

A pool with roles is not how jaxserve serves: its lanes share both phases. `roles` simulates steps
by plan. Apart: the same roles where only the instances that prefill cache, together as one, which
is in their favour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from experiments.figures import Claim, Figure, Panel, Row, Rows, ratio
from experiments.papers import main
from experiments.tokenlake.figure import TokenLakeSettings
from experiments.tokenlake.roles import POLICIES, input_seconds
from experiments.tokenlake.systems import INSTANCES

QPS = 1.0
TOKENS = (60_000, 120_000, 180_000, 240_000)  # of an instance
TOGETHER = "both phases on all lanes"
PREFILL = {"1P3D": 1, "3P1D": 3}
APART = {role: f"{role}, caches apart" for role in PREFILL}
# latency of the pool of MoonCake over that of roles over TokenLake's, least and most; most over
# elastic (7.4)
POOLING = {"1P3D": (26.62, 86.05), "3P1D": (2.18, 39.48)}
ELASTIC = {"1P3D": 5.22, "3P1D": 2.82}


def sweep(settings: TokenLakeSettings) -> Iterator[Row]:
    arrivals = settings.arrivals("loogle", QPS)
    for tokens in TOKENS:
        for name, policy in POLICIES.items():
            seconds = input_seconds(arrivals, policy, INSTANCES * tokens)
            yield {"system": name, "tokens": tokens, "input_ms": 1e3 * seconds}
        for role, instances in PREFILL.items():
            seconds = input_seconds(arrivals, POLICIES[role], instances * tokens)
            yield {"system": APART[role], "tokens": tokens, "input_ms": 1e3 * seconds}


def _gains(rows: Rows, other: str, system: str) -> list[float]:
    return [
        ratio(
            rows,
            "input_ms",
            dict(system=other, tokens=float(tokens)),
            dict(system=system, tokens=float(tokens)),
        )
        for tokens in TOKENS
    ]


def _claim(
    what: str,
    of: Callable[[list[float]], float],
    other: str,
    system: str,
    times: float,
    remark: str,
) -> Claim:
    return Claim(
        f"input latency, {other} / {system}, {what}",
        times,
        lambda rows: of(_gains(rows, other, system)),
        "7.4, at a rate that it does not give",
        better="higher",
        limit=times == 1.0,
        remark=remark,
    )


def _claims() -> Iterator[Claim]:
    for role, (least, most) in POOLING.items():
        for what, of, times in (("least", min, least), ("most", max, most)):
            yield _claim(what, of, APART[role], role, times, "by how near the rate is to the limit")
    for role, times in ELASTIC.items():
        yield _claim("most", max, role, "elastic", times, "")
    yield _claim("least", min, TOGETHER, "elastic", 1.0, "not in the paper: how jaxserve serves")


FIGURE = Figure(
    "fig12",
    "Pooling and elasticity, LooGLE-like, Llama-2-7B, 8 A100",
    "simulated",
    sweep,
    claims=tuple(_claims()),
    panels=(Panel("ms to the first token, per token", "tokens", "input_ms", "system", log="y"),),
    runs="real plans and cache, a loop of its own",
)

if __name__ == "__main__":
    main(FIGURE, "tokenlake")
