"""Figure 11: hit rates over the tokens of KV that an instance caches, LooGLE-like questions about
documents, by the exponent of Zipf's law; at a rate that every system but 1P3D bears."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from experiments.figures import Claim, Figure, Panel, Row, Rows, ratio
from experiments.papers import main
from experiments.tokenlake.figure import TokenLakeSettings
from experiments.tokenlake.systems import (
    ADAPTIVE,
    BY_LOAD,
    HASHED,
    LEAST_TTFT,
    P1D3,
    P3D1,
    ROUTER,
    STRIPED,
    SYSTEMS,
    TWO_HASHES,
    check_pooled,
    simulated,
)

QPS = 1.5
TOKENS = (120_000, 160_000, 200_000, 240_000)  # of an instance; 269K fit
ZIPFS = (0.0, 0.6, 0.9, 1.2)
ZIPF = 0.9  # the workload's own
FEW = (120_000, 240_000)  # at other exponents
WORKLOAD = "loogle"
# TokenLake over each, least and most over the sizes (7.3)
PAPER = {P1D3: (1.67, 2.14), P3D1: (1.78, 2.70), ROUTER: (1.72, 2.04)}
OTHERS = (ROUTER, ADAPTIVE, LEAST_TTFT, TWO_HASHES, BY_LOAD, P1D3, P3D1)
ALWAYS = (HASHED, ROUTER, BY_LOAD, P1D3)
REMARKS = {
    P3D1: "three quarters of all memory cache for prefill here; the paper has less than half as "
    "many hits, of a cause that it does not name",
    ROUTER: "an even number of equal caches that are routed to by prefix hold as many documents as "
    "one of their size: the paper's ratio is that of a router by load",
}


def sweep(settings: TokenLakeSettings) -> Iterator[Row]:
    pools = []
    for zipf in ZIPFS:
        for tokens in sizes(zipf):
            for name in names(zipf):
                spec = SYSTEMS[name]
                result = simulated(spec, WORKLOAD, QPS, settings, tokens, zipf)
                if name == HASHED:
                    pools.append(result)
                yield {
                    "lengths": settings.lengths,
                    "zipf": zipf,
                    "tokens": tokens,
                    "system": name,
                    "hit": result.hit,
                    "in_time": result.in_time,
                    "copies": result.copies,
                }
    check_pooled(pools, settings, copies=True)


def sizes(zipf: float) -> tuple[int, ...]:
    """Returns the tokens of an instance that are tried at an exponent."""
    return TOKENS if zipf == ZIPF else FEW


def names(zipf: float) -> list[str]:
    """Returns the systems that are tried at an exponent: all at the workload's own."""
    return [name for name in (HASHED, STRIPED, *OTHERS) if zipf == ZIPF or name in ALWAYS]


def gains(rows: Rows, other: str, zipf: float = ZIPF) -> list[float]:
    """Returns the hit rate of the pool over another's, by size."""
    return [
        ratio(
            rows,
            "hit",
            dict(system=HASHED, zipf=zipf, tokens=float(tokens)),
            dict(system=other, zipf=zipf, tokens=float(tokens)),
        )
        for tokens in sizes(zipf)
    ]


def _claim(
    what: str,
    other: str,
    of: Callable[[list[float]], float],
    times: float,
    source: str,
    zipf: float = ZIPF,
    remark: str = "",
) -> Claim:
    return Claim(
        f"hit rate, pool / {other}, {what}",
        times,
        lambda rows: of(gains(rows, other, zipf)),
        source,
        better="higher",
        limit=not source.startswith("7.3, "),
        remark=remark,
    )


def _claims() -> Iterator[Claim]:
    for other, (least, most) in PAPER.items():
        remark = REMARKS.get(other, "")
        yield _claim("least", other, min, least, "7.3, least", remark=remark)
        yield _claim("most", other, max, most, "7.3, most", remark=remark)
    for other in OTHERS:
        if other not in PAPER:
            note = "not in the paper: a stronger baseline" if other != BY_LOAD else "sees no cache"
            yield _claim("least over sizes", other, min, 1.0, "7.3", remark=note)
    for zipf in ZIPFS:
        for other in (P1D3, BY_LOAD):
            yield _claim(f"least at Zipf {zipf:g}", other, min, 1.67, "7.3", zipf)


FIGURE = Figure(
    "fig11",
    "Hit rate by the size of caches, LooGLE-like, 8 A100",
    "simulated",
    sweep,
    claims=tuple(_claims()),
    panels=tuple(
        Panel(f"Zipf {zipf:g}", "tokens", "hit", "system", (("zipf", zipf),)) for zipf in ZIPFS
    ),
)

if __name__ == "__main__":
    main(FIGURE, "tokenlake")
