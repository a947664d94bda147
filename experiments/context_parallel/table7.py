"""Table 7: first token and each after it by the number of hosts, 128K tokens; and how decode goes
on with gathered queries.

What the paper has, the ring: pass-KV in prefill, pass-Q in decode, over a network whose messages
take 34 us and its all-to-all 74. Ours: one all-gather and one all-to-all per layer, over the same
network, over what NCCL was measured to take between H100 nodes, and over NVLink (both are links of
jaxserve's profile of the H100)."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.context_parallel.paper import GPUS, TABLE6, TABLE7, LatencyRow
from experiments.context_parallel.system import MILLI, PaperHost, calibrated
from experiments.figures import Claim, Figure, Panel, Row, Rows, cell
from experiments.papers import main
from jaxserve.costs.profiles import devices

HOSTS = (1, 2, 4, 8)
LOADS = ((128_000, 1), (128_000, 8), (1_000_000, 1))  # tokens of context, sequences
GTT = "the paper's"
NODES = "NCCL between H100 nodes"
NVLINK = "NVLink"


def systems() -> dict[str, PaperHost]:
    """Decode by what links hosts."""
    device = devices()["h100"]
    links = {NODES: device.node, NVLINK: device.ranks[max(device.ranks)]}
    return {
        GTT: calibrated(),
        **{name: calibrated().with_links(link) for name, link in links.items()},
    }


def sweep(settings: None) -> Iterator[Row]:
    for links, system in systems().items():
        for context, batch in LOADS:
            for hosts in HOSTS:
                after = system.ttit(context, hosts, batch)
                where: Row = {"links": links, "context": context, "batch": batch, "hosts": hosts}
                printed = (links, context, batch) == (GTT, 128_000, 1)
                first = system.ttft(0, context, hosts)["pass_kv"] / MILLI if printed else ""
                yield {**where, "how": "ring", "ttft_ms": first, "ttit_ms": after["pass_q"] / MILLI}
                yield {**where, "how": "gather", "ttft_ms": "", "ttit_ms": after["gather"] / MILLI}
                if printed:
                    yield {
                        **where,
                        "how": "tp",
                        "ttft_ms": system.tp_ttft(context, hosts) / MILLI,
                        "ttit_ms": system.tp_ttit(context, hosts) / MILLI,
                    }


def _ours(rows: Rows, row: LatencyRow, column: str) -> float:
    return cell(
        rows,
        column,
        links=GTT,
        context=row.tokens,
        batch=1,
        hosts=row.hosts,
        how="tp" if row.kind == "tp" else "ring",
    )


def ttit(
    rows: Rows,
    hosts: int,
    how: str = "gather",
    links: str = GTT,
    context: int = 128_000,
    batch: int = 1,
) -> float:
    return cell(rows, "ttit_ms", links=links, context=context, batch=batch, hosts=hosts, how=how)


def falls(what: str, low: int, remark: str = "", **load) -> Claim:
    """Time per token of `low` hosts over that of 8."""
    return Claim(
        f"TTIT of gathered queries, {low} / 8 hosts, {what}",
        1,
        lambda rows: ttit(rows, low, **load) / ttit(rows, 8, **load),
        "a goal: faster with lanes",
        better="higher",
        limit=True,
        remark=remark,
    )


def _printed_before(column: str, row: LatencyRow) -> str:
    """Names table 6 where it has the same number for the same hosts and tokens."""
    same = any(
        (other.kind, other.hosts, other.tokens) == (row.kind, row.hosts, row.tokens)
        and getattr(other, column) == getattr(row, column)
        for other in TABLE6
    )
    return "table 6" if same else ""


def _name(row: LatencyRow) -> str:
    """Names a row as the paper does."""
    return f"CP{row.hosts}" if row.kind == "cp" else f"TP{GPUS * row.hosts}"


LOST = (
    "a layer saves at most 33 of its 39 us of attention, and both exchanges take 108 us: one "
    "sequence of 128K is too little work for this network"
)
FIGURE = Figure(
    "table7",
    "First token and each after it by hosts, 128K tokens",
    "computed",
    sweep,
    claims=(
        *(
            Claim(
                f"TTFT, {_name(row)}",
                row.ttft,
                lambda rows, row=row: _ours(rows, row, "ttft_ms"),
                "table 7",
                "ms",
                remark="an all-reduce at the rates of a hop; nothing is fitted"
                if row.kind == "tp"
                else "",
                counted_in=_printed_before("ttft", row),
            )
            for row in TABLE7
        ),
        *(
            Claim(
                f"TTIT, {_name(row)}",
                row.ttit,
                lambda rows, row=row: _ours(rows, row, "ttit_ms"),
                "table 7",
                "ms",
                counted_in=_printed_before("ttit", row),
            )
            for row in TABLE7
        ),
        Claim(
            "TTIT of the ring, 4 hosts / 1",
            71.31 / 46.26,
            lambda rows: ttit(rows, 4, "ring") / ttit(rows, 1, "ring"),
            "table 7",
        ),
        Claim(
            "TTIT of gathered queries, 4 hosts / 1",
            71.31 / 46.26,
            lambda rows: ttit(rows, 4) / ttit(rows, 1),
            "table 7, its ring",
            better="lower",
            remark=LOST,
        ),
        Claim(
            "TTIT of gathered queries, 4 hosts",
            71.31,
            lambda rows: ttit(rows, 4),
            "table 7, its ring",
            "ms",
            "lower",
        ),
        falls("128K", 1, LOST),
        falls("128K", 2),
        falls("128K, 8 sequences", 1, batch=8),
        falls("1M", 1, context=1_000_000),
        falls(
            "128K, NCCL between nodes",
            1,
            "an exchange of 38 us per layer, still more than is saved",
            links=NODES,
        ),
        falls("128K, NVLink", 1, links=NVLINK),
        falls("1M, NVLink", 1, links=NVLINK, context=1_000_000),
    ),
    panels=(
        Panel(
            "TTFT, 1 x 128K",
            "hosts",
            "ttft_ms",
            "how",
            (("links", GTT), ("context", 128_000), ("batch", 1)),
            "y",
        ),
        *(
            Panel(
                f"TTIT, {batch} x {context // 1000}K",
                "hosts",
                "ttit_ms",
                "how",
                (("links", GTT), ("context", context), ("batch", batch)),
            )
            for context, batch in LOADS
        ),
        Panel(
            "ring, 1 x 128K",
            "hosts",
            "ttit_ms",
            "links",
            (("how", "ring"), ("context", 128_000), ("batch", 1)),
        ),
        *(
            Panel(
                f"gather, {batch} x {context // 1000}K",
                "hosts",
                "ttit_ms",
                "links",
                (("how", "gather"), ("context", context), ("batch", batch)),
            )
            for context, batch in LOADS
        ),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "context_parallel")
