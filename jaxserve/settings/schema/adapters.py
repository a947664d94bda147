"""Settings of low-rank adapters (LoRA)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jaxserve.api.errors import ConfigError
from jaxserve.settings.fields import Settings, option

MAX_RANK = 512
MAX_HELD = 65536  # adapters in host memory


class AdapterRoom(NamedTuple):
    """Room for adapters on devices: how many at once, and their rank, which others are padded
    to."""

    places: int
    rank: int


@dataclass(frozen=True)
class AdapterConfig(Settings):
    """Adapters of a replica: which it begins with, and which may be loaded."""

    lora_modules: tuple[str, ...] = option(
        (),
        "adapter (LoRA) that is served from the start, as a model of this name: NAME=FOLDER, of "
        "files that PEFT saved",
    )
    lora_root: str | None = option(
        None,
        "folder below which POST /v1/load_lora_adapter may load adapters; without it none can be "
        "loaded while serving",
    )
    max_lora_rank: int = option(
        16, "largest rank of an adapter; others are padded to it", low=1, high=MAX_RANK
    )
    max_cpu_loras: int = option(
        64,
        "adapters in host memory at once; with more, those used least recently leave it, and their "
        "files are read again when a request needs them",
        low=1,
        high=MAX_HELD,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [name for name, _ in self.named]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError("lora_modules", f"{name} is given more than once")
        if self.lora_root is not None and not Path(self.lora_root).is_dir():
            raise ConfigError("lora_root", f"{self.lora_root} is no folder")

    @property
    def named(self) -> list[tuple[str, str]]:
        """Names and folders of the adapters that are served from the start. Errors: ConfigError."""
        found = []
        for module in filter(None, self.lora_modules):
            name, folder = _named(module)
            if not (name and folder):
                raise ConfigError("lora_modules", f"{module!r:.100} is not NAME=FOLDER")
            found.append((name, folder))
        return found


def _named(module: str) -> tuple[str, str]:
    """Name and folder of an adapter, given as NAME=FOLDER or as vLLM's JSON; empty where it is
    neither."""
    if not module.startswith("{"):
        name, _, folder = module.partition("=")
        return name, folder
    try:
        fields = json.loads(module)
    except ValueError:
        return "", ""
    return str(fields.get("name", "")), str(fields.get("path", ""))
