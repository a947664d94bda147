"""The adapters that this process holds in host memory, from where steps bring them to the
devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jaxserve.api.errors import RequestError
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.weights.adapters import AdapterFolder, Pair

OpenAdapter = Callable[[Path], AdapterFolder]


class HostAdapters:
    """Adapters by number, each as the factors of the layers that have devices here, by path. open:
    opens a folder; None where steps have no adapters."""

    def __init__(self, plan: StagePlan, layers: Sequence[range], open: OpenAdapter | None):
        self._plan = plan
        self._layers = layers
        self._open = open
        self._factors: dict[int, dict[str, Pair]] = {}

    def __getitem__(self, number: int) -> dict[str, Pair]:
        return self._factors[number]

    def __len__(self) -> int:
        return len(self._factors)

    def load(self, number: int, folder: str) -> str:
        """Reads an adapter's files; returns its fingerprint. May be called on any thread, beside
        steps. Errors: RequestError for files that cannot be served."""
        assert self._open is not None, "steps have no adapters"
        factors: dict[str, Pair] = {}
        try:
            adapter = self._open(Path(folder))
            for layers in self._layers:
                factors |= adapter.arrays(self._plan.model, layers, np.dtype(self._plan.dtype))
        except CheckpointError as error:
            raise RequestError("lora_path", error.message) from None
        except (OSError, ValueError, OverflowError, MemoryError) as error:
            raise RequestError("lora_path", f"{folder}: {error}") from None
        self._factors[number] = factors
        return adapter.fingerprint

    def take_lost(self) -> list[int]:
        """Returns []: nothing is lost while the process lives."""
        return []

    def drop(self, number: int) -> None:
        """Forgets an adapter, which no later command may bring to the devices."""
        self._factors.pop(number, None)
