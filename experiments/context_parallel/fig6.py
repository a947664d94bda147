"""Figure 6: full prefill with pass-KV by length and hosts, over RDMA (GTT) and over TCP at the 3
GB/s that were reached (GTI)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from experiments.context_parallel.system import PaperHost, calibrated
from experiments.figures import Claim, Figure, Panel, Row, Rows, cell, ratio
from experiments.papers import main
from jaxserve.lanes.rates import Link

LENGTHS = tuple(2000 * 2**n for n in range(7))  # 2K to 128K
HOSTS = (1, 2, 4, 8)
TCP = 3e9  # bytes per second and GPU, section 4.2.1


def systems() -> dict[str, PaperHost]:
    fast = calibrated()
    slow = dataclasses.replace(fast.prefill, hop=Link(fast.prefill.hop.seconds, TCP))
    return {"GTT": fast, "GTI": dataclasses.replace(fast, prefill=slow)}


def sweep(settings: None) -> Iterator[Row]:
    for network, system in systems().items():
        for hosts in HOSTS:
            for tokens in LENGTHS:
                yield {
                    "network": network,
                    "hosts": hosts,
                    "tokens": tokens,
                    "ttft_s": system.ttft(0, tokens, hosts)["pass_kv"],
                }


def _at(hosts: int, network: str = "GTT") -> Row:
    return dict(hosts=hosts, network=network, tokens=128000)


def _faster(rows: Rows, network: str, hosts: int) -> float:
    return ratio(rows, "ttft_s", _at(1, network), _at(hosts, network))


FIGURE = Figure(
    "fig6",
    "Full prefill with pass-KV",
    "computed",
    sweep,
    claims=(
        Claim(
            "128K on 8 hosts",
            5.85,
            lambda rows: cell(rows, "ttft_s", **_at(8)),
            "4.2.1",
            "s",
            remark="the time to issue a step is fitted to two hosts and taken to grow with "
            "every further one",
        ),
        *(
            Claim(
                f"speed-up of {hosts} hosts, 128K, GTT",
                hosts,
                lambda rows, hosts=hosts: _faster(rows, "GTT", hosts),
                "4.2.1: 'proportional'",
            )
            for hosts in (2, 4, 8)
        ),
        Claim(
            "speed-up of 4 hosts, 128K, GTI",
            4,
            lambda rows: _faster(rows, "GTI", 4),
            "4.2.1: 'the same scalability'",
            remark="every hop is shorter than the attention beside it (Eq. 2); what is missing "
            "is the part of a hop that is not hidden in table 8, which is of decode",
        ),
    ),
    panels=(
        Panel("GTT", "tokens", "ttft_s", "hosts", (("network", "GTT"),), "xy"),
        Panel("GTI", "tokens", "ttft_s", "hosts", (("network", "GTI"),), "xy"),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "context_parallel")
