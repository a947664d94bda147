"""GPUs that programs are compiled for, and their numbers by NVIDIA's data sheets."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from jaxserve.kernels.ops import HOPPER

FOLDER = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates of a GPU. bandwidth: bytes/s of its memory. flops: dense bf16 FLOP/s."""

    bandwidth: float
    flops: float


@dataclasses.dataclass(frozen=True)
class Target(Rates):
    """A GPU with the rates of its data sheet. memory: bytes, as nvidia-smi shows them."""

    name: str
    memory: int

    def text(self, memory: int | None = None) -> str:
        """Describes the GPU to XLA's compiler. memory: bytes that it is to have, if not its own."""
        text = (FOLDER / f"{self.name}.txtpb").read_text()
        if memory is None:
            return text
        return re.sub(r"(?<=device_memory_size: )\d+", str(memory), text)

    def number(self, field: str) -> float:
        """Returns a number of the description. Errors: KeyError."""
        found = re.search(rf"^ +{field}: ([\d.]+)", self.text(), re.MULTILINE)
        if found is None:
            raise KeyError(field)
        return float(found[1])

    @property
    def kind(self) -> str:
        """Returns what JAX calls such a device (`device_kind`)."""
        found = re.search(r'^device_description_str: "(.*)"', self.text(), re.MULTILINE)
        assert found is not None
        return found[1]

    @property
    def capability(self) -> str:
        """Its compute capability, such as "8.0"."""
        found = re.search(r"cuda_compute_capability { major: (\d+) minor: (\d+)", self.text())
        assert found is not None, self.name
        return ".".join(found.groups())

    @property
    def is_hopper(self) -> bool:
        """True if it runs the kernels for Hopper."""
        return self.capability == HOPPER


TARGETS = {
    target.name: target
    for target in (
        # NVIDIA A100 80GB SXM
        Target(2.039e12, 312e12, "a100", 81920 * 2**20),
        # NVIDIA H100 SXM
        Target(3.35e12, 989e12, "h100", 81559 * 2**20),
        # NVIDIA H200 SXM
        Target(4.8e12, 989e12, "h200", 143771 * 2**20),
        # NVIDIA L40S; 733 TFLOP/s are of sparse products
        Target(0.864e12, 362e12, "l40s", 46068 * 2**20),
        # an eighth of NVIDIA DGX B200
        Target(8e12, 2250e12, "b200", 183359 * 2**20),
    )
}
