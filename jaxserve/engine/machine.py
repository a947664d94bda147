"""Chooses the settings that were not given, by the machine.

The defaults of the config classes are those for CPUs, where a test's engine and a notebook's run.
On GPUs a plain start should use what is there: all GPUs of the host, pages that attention kernels
load in large pieces, and as many sequences as the memory has room for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.checkpoint.model import ModelConfig
from jaxserve.engine.memory import DeviceRoom
from jaxserve.settings.schema import EngineConfig, MeshConfig

# tokens: a page is then one load of a kernel, and a prefix is shared from 64 tokens on
GPU_BLOCK_SIZE = 64
# tokens of prefill in a step: beyond, a GPU's products are no faster, and decodes wait longer
GPU_CHUNK_TOKENS = 2048
MOST_SEQUENCES = 256
LEAST_SEQUENCES = 16
SEQUENCE_TOKENS = 1024  # of KV that there must be for each sequence


@dataclasses.dataclass(frozen=True)
class Choice:
    """A setting that was chosen. flag: what would change it. why: the reason, in a few words."""

    setting: str
    value: Any
    why: str
    flag: str

    def __str__(self) -> str:
        return f"{self.setting}={self.value}: {self.why} ({self.flag} to change it)"


def fitted(
    config: EngineConfig,
    model: ModelConfig,
    room: DeviceRoom,
    devices: int,
    kv_tokens: Callable[[EngineConfig], int],
) -> tuple[EngineConfig, list[Choice]]:
    """Chooses the open settings of a config for a host with a number of devices; returns the config
    and the choices.

    model: as the checkpoint says. room: that of each device. kv_tokens: how many tokens a replica
    with a config has room for.
    """
    if room.platform == "cpu":
        return config, []
    mesh = _mesh(model, devices)
    chosen = {
        "mesh": Choice(
            "mesh",
            str(mesh),
            f"{devices} devices, {model.kv_heads} kv heads",
            "-tp, --context-parallel-size",
        ),
        "block_size": Choice(
            "block_size", GPU_BLOCK_SIZE, "pages that GPUs load at once", "--block-size"
        ),
        "chunk_tokens": Choice(
            "chunk_tokens", GPU_CHUNK_TOKENS, "prefill that fills a GPU", "--max-num-batched-tokens"
        ),
    }
    chosen = {name: choice for name, choice in chosen.items() if name in config.automatic}
    config = _with(config, {name: choice.value for name, choice in chosen.items()})
    if config.source.dtype == "auto" and model.stored == "float32":
        why = "float32 has half the room and no kernels of attention"
        chosen["dtype"] = Choice("dtype", "bfloat16", why, "--dtype")
    if "max_seqs" in config.automatic:
        tokens = kv_tokens(_with(config, {"max_seqs": LEAST_SEQUENCES}))
        sequences = _sequences(tokens)
        why = f"room for about {tokens:,} tokens of KV"
        chosen["max_seqs"] = Choice("max_seqs", sequences, why, "--max-num-seqs")
        config = _with(config, {"max_seqs": sequences})
    return dataclasses.replace(config, automatic=()), list(chosen.values())


def _mesh(model: ModelConfig, devices: int) -> MeshConfig:
    """The largest degree of ranks that splits the kv heads without repeating one, and lanes on the
    devices that are left."""
    degrees = range(1, devices + 1)
    ranks = max(n for n in degrees if model.kv_heads % n == 0 and model.splits(n))
    return MeshConfig(tp=ranks, kvp=devices // ranks)


def _sequences(kv_tokens: int) -> int:
    sequences = LEAST_SEQUENCES
    while sequences < MOST_SEQUENCES and 2 * sequences * SEQUENCE_TOKENS <= kv_tokens:
        sequences *= 2
    return sequences


def _with(config: EngineConfig, values: Mapping[str, Any]) -> EngineConfig:
    """The config with other values of the settings that are chosen here."""
    values = dict(values)
    mesh = MeshConfig.parse(values.pop("mesh")) if "mesh" in values else config.mesh
    sizes = {name: values.pop(name) for name in ("block_size",) if name in values}
    return dataclasses.replace(
        config,
        mesh=mesh,
        cache=dataclasses.replace(config.cache, **sizes),
        scheduler=dataclasses.replace(config.scheduler, **values),
    )
