"""Figure 20: how long KV takes from node to node, by size and transport: what the paper measured,
and what the simulated network makes of it."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Panel, Row, cell
from experiments.mooncake.figure import MooncakeSettings
from experiments.mooncake.node import KV_BYTES, TRANSFER_BYTES_PER_S
from experiments.papers import main
from experiments.virtual_cluster.network import Network

SIZES = (1, 2, 5, 10, 20, 40)  # GB
CONTEXT = 128 * 1024  # tokens, whose KV is 40 GiB
# bytes per second that the paper measured for 40 GB (7.4.1), by transport and NICs
TRANSPORTS = {
    "transfer engine, 4x200 Gbps": TRANSFER_BYTES_PER_S,
    "TCP, 4x200 Gbps": TRANSFER_BYTES_PER_S / 2.4,
    "transfer engine, 8x400 Gbps": 190e9,
    "TCP, 8x400 Gbps": 190e9 / 4.6,
}


def sweep(settings: MooncakeSettings) -> Iterator[Row]:
    for transport, bytes_per_s in TRANSPORTS.items():
        for size in SIZES:
            seconds = Network(2, bytes_per_s).send(0, 1, size * 1e9, 0.0)
            yield {
                "transport": transport,
                "gb": size,
                "seconds": seconds,
                "gb_per_s": size / seconds,
            }


FIGURE = Figure(
    "fig20",
    "Transfers between nodes",
    "computed",
    sweep,
    claims=(
        Claim(
            "GB of KV of 128k tokens",
            40,
            lambda rows: CONTEXT * KV_BYTES / 2**30,
            "7.4.1",
            "GB",
        ),
        *(
            Claim(
                f"{transport}: 40 GB",
                paper,
                lambda rows, transport=transport: cell(
                    rows, "gb_per_s", transport=transport, gb=40
                ),
                "7.4.1",
                "GB/s",
                "higher",
                remark="the paper's measurement is what the simulated network is given",
                given=True,
            )
            for transport, paper in (
                ("transfer engine, 4x200 Gbps", 87),
                ("transfer engine, 8x400 Gbps", 190),
            )
        ),
    ),
    panels=(Panel("seconds", "gb", "seconds", "transport", log="xy"),),
    runs="closed form of the simulated network, with the paper's rate",
)

if __name__ == "__main__":
    main(FIGURE, "mooncake")
