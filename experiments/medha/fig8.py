"""Figure 8: prefill of 1M tokens with pipelined chunks (SPP and TP) and with context parallelism (a
ring, and TP)."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Panel, Row, cell
from experiments.medha.closed import Node
from experiments.medha.figure import MedhaSettings
from experiments.papers import main
from jaxserve.costs.profiles import devices
from jaxserve.lab.simulate.loongserve import LoongPool
from jaxserve.lanes.work import ITEM
from jaxserve.settings.schema import MeshConfig

PROMPT = 1_000_000
CHUNK = 4096
TP = 8
NODES = (1, 2, 4, 8, 16)


def sweep(settings: MedhaSettings) -> Iterator[Row]:
    for nodes in NODES:
        spp = Node("llama3-8b", MeshConfig(spp=nodes, tp=TP)).first_token(PROMPT, CHUNK)
        for name, seconds in (("spp", spp), ("cp", ring(nodes))):
            yield {"parallelism": name, "gpus": nodes * TP, "prompt": PROMPT, "ttft_s": seconds}


def ring(nodes: int) -> float:
    """Seconds of a prefill over a ring of nodes, evenly split: KV goes round while attention
    lasts."""
    node = Node("llama3-8b", MeshConfig(tp=TP))
    kv_bytes = 2 * ITEM * node.shape.rank_heads(TP)[1] * node.shape.head_dim
    pool = LoongPool(
        nodes, node.system.costs, node.system.kv_tokens(), kv_bytes, devices()[node.device].node
    )
    return pool.prefill([PROMPT], nodes)


FIGURE = Figure(
    "fig8",
    "Prefill of 1M tokens, Llama-3 8B, H100",
    "computed",
    sweep,
    claims=(
        Claim(
            "TTFT on 128 GPUs",
            15,
            lambda rows: cell(rows, "ttft_s", parallelism="spp", gpus=128),
            "3.3: under 15 s",
            "s",
            better="lower",
            limit=True,
            remark="15 s are 14.5 % of the GPUs' peak; our steps have no overhead of scheduling "
            "or workers",
        ),
        Claim(
            "TTFT, CP / SPP, 128 GPUs",
            1.64,
            lambda rows: (
                cell(rows, "ttft_s", parallelism="cp", gpus=128)
                / cell(rows, "ttft_s", parallelism="spp", gpus=128)
            ),
            "caption: 'up to 1.64X lower'",
            better="higher",
            remark="the text says '64% lower', which would be 2.8x; our ring is ideal: an even "
            "split, hops hidden behind attention, one pass without chunks; the 4 % that SPP "
            "loses are the filling of its stages",
        ),
    ),
    panels=(Panel("1M tokens", "gpus", "ttft_s", "parallelism", log="xy"),),
)

if __name__ == "__main__":
    main(FIGURE, "medha")
