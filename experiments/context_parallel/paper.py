"""Numbers that the paper prints: "Context Parallelism for Scalable Million-Token Inference" (Yang
et al., MLSys 2025), its tables as they stand.

Llama 3 405B with FP8 feed-forward weights, hosts of 8 H100 (96 GB HBM2e, 500 W), TP8 in a host and
one rank of context parallelism per host, on GTT (RDMA, 400 Gb/s per GPU) unless said otherwise;
section 4.1. A K is 1000 tokens: table 4's 128K are 128000.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxserve.checkpoint.zoo import MODELS
from jaxserve.lanes.work import Heads

# Table 9, and the model's vocabulary.
MODEL = MODELS["llama3.1-405b"]
PARAMETERS = 405e9
GPUS = 8  # of a host
# of one GPU; BF16, section 4.1 and appendix A
HEADS = Heads(*MODEL.rank_heads(GPUS), MODEL.head_dim, item=2, partial=2)
PEAK = 800e12  # FLOP/s of one GPU in BF16; appendix A


class Partial(NamedTuple):
    """A row of table 4: TTFT in ms after `cached` tokens on 4 ranks."""

    cached: int
    new: int
    pass_kv: float
    pass_q: float


TABLE4 = (
    Partial(126720, 1280, 1023.39, 898.71),
    Partial(124800, 3200, 1110.18, 1046.43),
    Partial(123840, 4160, 1298.92, 1280.1),
    Partial(121600, 6400, 1305.56, 1302.01),
    Partial(115200, 12800, 2080.67, 2205.27),
    Partial(102400, 25600, 3353.02, 3617.02),
    Partial(89600, 38400, 4629.23, 4922.52),
    Partial(76800, 51200, 5745.08, 6217.83),
    Partial(64000, 64000, 6845.21, 7367.99),
    Partial(51200, 76800, 7890.35, 8468.66),
    Partial(38400, 89600, 8697.27, 9666.62),
    Partial(25600, 102400, 10105.78, 10652.39),
    Partial(12800, 115200, 11136.4, 11571.62),
    Partial(0, 128000, 11462.15, 12360.57),
)


class Step(NamedTuple):
    """A row of table 5: us of one step of the ring on 4 ranks, and of the all-to-all, if
    any."""

    cached: int
    new: int
    strategy: str
    hop: float
    attention: float
    exchange: float | None


TABLE5 = (
    Step(124800, 3200, "pass_kv", 627, 414, None),
    Step(124800, 3200, "pass_q", 166, 414, 424),
    Step(115200, 12800, "pass_kv", 631, 1608, None),
    Step(115200, 12800, "pass_q", 544, 1608, 1023),
)


class LatencyRow(NamedTuple):
    """A row of tables 6 and 7: ms to the first token and per token after it, one sequence. kind:
    'cp' or 'tp', over `hosts` hosts."""

    kind: str
    hosts: int
    tokens: int
    ttft: float
    ttit: float


TABLE6 = (
    LatencyRow("cp", 1, 8000, 1740, 44.51),
    LatencyRow("cp", 1, 32000, 7658, 44.64),
    LatencyRow("cp", 1, 128000, 42010, 46.26),
    LatencyRow("cp", 2, 8000, 999, 65.61),
    LatencyRow("cp", 2, 32000, 4015, 65.66),
    LatencyRow("cp", 2, 128000, 21042, 66.63),
)
TABLE7 = (
    LatencyRow("cp", 1, 128000, 42010, 46.26),
    LatencyRow("cp", 2, 128000, 21042, 60.23),
    LatencyRow("tp", 2, 128000, 29917, 39.52),
    LatencyRow("cp", 4, 128000, 10950, 71.31),
    LatencyRow("tp", 4, 128000, 19841, 47.3),
)


class Decode(NamedTuple):
    """A column of table 8: us of pass-Q decode. op: one attention; loop: all of them; hops: all
    SendRecv."""

    batch: int
    tokens: int
    hosts: int
    op: float
    loop: float
    hops: float
    exchange: float
    whole: float


TABLE8 = (
    Decode(1, 128000, 1, 38.9, 38.9, 0, 0, 38.9),
    Decode(1, 128000, 2, 22.0, 43.2, 32.3, 81.1, 157.7),
    Decode(1, 128000, 4, 14.7, 60.8, 105.7, 79.9, 238.6),
    Decode(4, 32000, 1, 60.1, 60.1, 0, 0, 60.1),
    Decode(4, 32000, 2, 13.9, 24.5, 33.3, 66.8, 136.6),
    Decode(4, 32000, 4, 9.6, 41.3, 104.9, 72.2, 180.6),
)

FIT = (-1.059, 1.145, 12.112)  # appendix D: of log(T), of log(T / (T+P)), constant
