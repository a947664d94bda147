"""Table 6: time to the first token and per token after it by length of the context, one host and
two."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.context_parallel.paper import TABLE6, LatencyRow
from experiments.context_parallel.system import MILLI, calibrated
from experiments.figures import Claim, Figure, Panel, Row, cell
from experiments.papers import main


def sweep(settings: None) -> Iterator[Row]:
    system = calibrated()
    for row in TABLE6:
        first = system.ttft(0, row.tokens, row.hosts)
        after = system.ttit(row.tokens, row.hosts)
        yield {
            "hosts": row.hosts,
            "tokens": row.tokens,
            "ttft_ms": first["pass_kv"] / MILLI,
            "paper_ttft_ms": row.ttft,
            "ttit_ms": after["pass_q"] / MILLI,
            "paper_ttit_ms": row.ttit,
            "gather_ttit_ms": after["gather"] / MILLI,
        }


def _claim(
    what: str, row: LatencyRow, paper: float, column: str, remark: str = "", better: str = "equal"
) -> Claim:
    return Claim(
        f"{what}, {row.tokens // 1000}K, CP{row.hosts}",
        paper,
        lambda rows: cell(rows, column, hosts=row.hosts, tokens=row.tokens),
        "table 6",
        "ms",
        better,
        remark=remark,
    )


CONFLICT = (
    "66.6 ms here and 60.2 in table 7 for the same; the parts in table 8 are in favour of 60.2"
)
FIGURE = Figure(
    "table6",
    "First token and each after it, one host and two",
    "computed",
    sweep,
    claims=(
        *(_claim("TTFT", row, row.ttft, "ttft_ms") for row in TABLE6),
        *(
            _claim("TTIT of the ring", row, row.ttit, "ttit_ms", CONFLICT if row.hosts == 2 else "")
            for row in TABLE6
        ),
        *(
            _claim(
                "TTIT of gathered queries",
                row,
                row.ttit,
                "gather_ttit_ms",
                "beside the paper's ring",
                "lower",
            )
            for row in TABLE6
            if row.hosts == 2
        ),
    ),
    panels=(
        Panel("TTFT", "tokens", "ttft_ms", "hosts", (), "xy"),
        Panel("TTFT, the paper's", "tokens", "paper_ttft_ms", "hosts", (), "xy"),
        Panel("TTIT of the ring", "tokens", "ttit_ms", "hosts", (), "x"),
        Panel("TTIT, the paper's", "tokens", "paper_ttit_ms", "hosts", (), "x"),
    ),
    runs="closed form of the exchange chooser, fitted to this table",
)

if __name__ == "__main__":
    main(FIGURE, "context_parallel")
