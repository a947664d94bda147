"""Figure 7: how much faster 128K tokens are on several hosts, by context parallelism and by tensor
parallelism over all GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.context_parallel.system import calibrated
from experiments.figures import Claim, Figure, Panel, Row, Rows, cell, ratio
from experiments.papers import main

TOKENS = 128_000


def sweep(settings: None) -> Iterator[Row]:
    system = calibrated()
    one = system.ttft(0, TOKENS, 1)["pass_kv"]
    for hosts in (1, 2, 4, 8):
        for kind, seconds in (
            ("context", system.ttft(0, TOKENS, hosts)["pass_kv"]),
            ("tensor", system.tp_ttft(TOKENS, hosts)),
        ):
            yield {"parallelism": kind, "hosts": hosts, "ttft_s": seconds, "scaling": one / seconds}


def _longer(rows: Rows, hosts: int) -> float:
    """By how much tensor parallelism takes longer."""
    return (
        ratio(
            rows,
            "ttft_s",
            dict(parallelism="tensor", hosts=hosts),
            dict(parallelism="context", hosts=hosts),
        )
        - 1
    )


def _scaling(kind: str, hosts: int, paper_ms: float, source: str = "table 7") -> Claim:
    return Claim(
        f"scaling of {kind} parallelism, {hosts} hosts",
        42010 / paper_ms,
        lambda rows: cell(rows, "scaling", parallelism=kind, hosts=hosts),
        source,
    )


FIGURE = Figure(
    "fig7",
    "Scaling of 128K tokens over hosts",
    "computed",
    sweep,
    claims=(
        _scaling("context", 2, 21042),
        _scaling("context", 4, 10950),
        _scaling("context", 8, 5850, "table 7 and 4.2.1"),
        _scaling("tensor", 2, 29917),
        _scaling("tensor", 4, 19841),
        Claim(
            "tensor parallelism takes longer, 2 hosts",
            0.15,
            lambda rows: _longer(rows, 2),
            "4.2.2: 'roughly 15%'",
            "%",
            remark="table 7 says 42 %: 29917 and 21042 ms",
        ),
        Claim(
            "tensor parallelism takes longer, 2 hosts, by table 7",
            29917 / 21042 - 1,
            lambda rows: _longer(rows, 2),
            "table 7",
            "%",
            remark="an all-reduce is taken at the full rate of a hop",
        ),
        Claim(
            "tensor parallelism takes longer, 4 hosts, by table 7",
            19841 / 10950 - 1,
            lambda rows: _longer(rows, 4),
            "table 7",
            "%",
            remark="an all-reduce is taken at the full rate of a hop",
        ),
        Claim(
            "tensor parallelism takes longer, 8 hosts",
            1.0,
            lambda rows: _longer(rows, 8),
            "4.2.2: '100%'",
            "%",
        ),
    ),
    panels=(Panel("latency of one host / of so many", "hosts", "scaling", "parallelism"),),
)

if __name__ == "__main__":
    main(FIGURE, "context_parallel")
