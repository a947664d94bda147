"""Figure 14 (e) and (f): what it costs to send a prompt's KV to where it is decoded, with a receive
backend for each prefill instance and with half as many.

Every instance of the largest group asks for a backend as the prefill begins (4.2) and sends each
layer's KV when it is made; one that has none waits until another's is free, and then sends all of
its KV. The line is the one that serves (`jaxserve.transfer.buffers`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from experiments.figures import Claim, Figure, Panel, Row, Rows, matching
from experiments.papers import main
from experiments.tetris.figure import TetrisSettings
from experiments.tetris.model import LENGTHS, TP, latencies
from experiments.tetris.systems import MODELS, prefill_instances
from jaxserve.costs.profiles import devices
from jaxserve.lab.simulate.run import shape_of
from jaxserve.transfer.buffers import ReceiveBuffers

DEDICATED, HALVED = "dedicated", "halved"
LEASE = 1000.0  # seconds: longer than any transfer here
ELEMENT = 2  # bytes of an element of KV


def sweep(settings: TetrisSettings) -> Iterator[Row]:
    """overhead: of the prefill, by which KV is there later. waited: instances without a backend at
    first."""
    for model in MODELS:
        size = prefill_instances(model)
        for tokens in LENGTHS[:6]:
            for backends, count in ((DEDICATED, size), (HALVED, size // 2)):
                prefill = latencies(model)[size](0, tokens)
                end, waited = transferred(model, size, tokens, count, prefill)
                yield {
                    "model": model,
                    "backends": backends,
                    "case": f"{model}, {backends}",
                    "tokens": tokens,
                    "prefill_s": prefill,
                    "overhead": end / prefill - 1,
                    "waited": waited,
                }


def transferred(
    model: str, size: int, tokens: int, backends: int, prefill: float
) -> tuple[float, int]:
    """Seconds from the begin of a prefill until all KV is there, and how many instances waited for
    a backend."""
    shape = shape_of(model)
    ranks = TP[model]
    layer = 2 * ELEMENT * shape.kv_heads * shape.head_dim * tokens / size / ranks
    link = devices()["a100"].node  # an adapter for each GPU
    whole = shape.layers * link(layer)
    buffers = ReceiveBuffers(backends, LEASE, LEASE)
    names = [str(number) for number in range(size)]
    granted = [buffers.ask(name, 1, 1, LEASE, 0.0) for name in names]
    # the last layer's KV leaves when the prefill ends, or the others' have left
    first = max(prefill, whole - link(layer)) + link(layer)
    running = [(first, name) for name, grant in zip(names, granted) if grant]
    end = 0.0
    while running:
        end, name = heapq.heappop(running)
        buffers.arrived(name, 0, end)
        for grant in buffers.release(name, end):
            heapq.heappush(running, (end + whole, grant.transfer))
    assert not buffers.waiting and buffers.free == backends
    return end, granted.count(None)


def _overheads(rows: Rows, backends: str) -> np.ndarray:
    return np.array([float(row["overhead"]) for row in matching(rows, backends=backends)])


def _more(rows: Rows) -> np.ndarray:
    """Overheads that halving adds."""
    return _overheads(rows, HALVED) - _overheads(rows, DEDICATED)


FIGURE = Figure(
    "fig14e",
    "Transfers to decode instances, and half the receive backends",
    "computed",
    sweep,
    claims=(
        Claim(
            "overhead of transfers, average",
            0.021,
            lambda rows: float(_overheads(rows, DEDICATED).mean()),
            "7.4",
            "%",
            "lower",
            remark="the last layer's KV alone is not hidden, at the rate of one 200 Gbit/s adapter "
            "for each GPU; the time of a remote call is not modelled",
        ),
        Claim(
            "overhead of transfers, greatest",
            0.118,
            lambda rows: float(_overheads(rows, DEDICATED).max()),
            "7.4",
            "%",
            "lower",
        ),
        Claim(
            "overhead that half the backends add, average",
            0.038,
            lambda rows: float(_more(rows).mean()),
            "7.4",
            "%",
            "lower",
            remark="half of the instances send all their KV after the prefill",
        ),
        Claim(
            "overhead that half the backends add, greatest",
            0.054,
            lambda rows: float(_more(rows).max()),
            "7.4",
            "%",
            "lower",
        ),
    ),
    panels=(Panel("overhead", "tokens", "overhead", "case", (), "xy"),),
    runs="real receive buffers, latencies of Table 1 and of the adapters",
)

if __name__ == "__main__":
    main(FIGURE, "tetris")
