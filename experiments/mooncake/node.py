"""A node of Mooncake's evaluation (7.1), and what its prefill, its KV and its links cost: Llama-3
70B on eight A100, which stand for A800 (the same chip with slower links between GPUs)."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.costs.predictor import Predictor
from jaxserve.lab.simulate.run import System, shape_of
from jaxserve.settings.schema import MeshConfig

SYSTEM = System(shape_of("llama3-70b"), "a100", MeshConfig(tp=8))
KV_BYTES = SYSTEM.shape.kv_bytes_per_token()  # the paper's 320 KB
CHUNK = 8192  # tokens of a prefill step
GBPS = 1e9 / 8  # bytes per second of one Gbps
NIC_BYTES_PER_S = 800 * GBPS  # Table 1
LOAD_BYTES_PER_S = 128e9  # host to device, Table 1
TRANSFER_BYTES_PER_S = 87e9  # that the transfer engine gets out of 4x200 Gbps (7.4.1)


@dataclass(frozen=True)
class Equations:
    """The paper's Equations 1 and 2 with the notation of its Table 1."""

    flops_per_s: float  # G, of a node
    layers: int = 80
    width: int = 8192  # d
    attention: int = 4  # a
    products: int = 22  # b
    heads_per_kv_head: int = 8  # gqa
    element: int = 2  # s, bytes

    def flops(self, tokens: float) -> float:
        """Operations of prefilling `tokens` tokens (Eq. 1)."""
        d = self.width
        return self.layers * (self.attention * tokens**2 * d + self.products * tokens * d**2)

    def bandwidth(self, prefix: int) -> float:
        """Bytes per second from which loading a prefix of `prefix` tokens takes less time than
        computing it (Eq. 2)."""
        d = self.width
        loaded = 2 * d * self.element
        computed = self.heads_per_kv_head * (self.attention * prefix * d + self.products * d**2)
        return self.flops_per_s * loaded / computed


A800 = Equations(8 * 312e12)
H800 = Equations(8 * 989e12)


def prefill_seconds(tokens: int, cached: int = 0) -> float:
    """Predicted seconds of prefilling a prompt of `tokens` tokens, of which some are cached."""
    return Predictor(SYSTEM.costs, SYSTEM.mesh).prefill(cached, tokens, CHUNK)
