"""Arrays in memory as a checkpoint: weights that a training loop in this process holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.weights.names import family_names
from jaxserve.weights.safetensors_files import FLOATS

_ALL = slice(None)
_NAMES = {dtype: name for name, dtype in FLOATS.items()}


class ArrayWeights:
    """A checkpoint of arrays, NumPy's or JAX's, by their Hugging Face names. config: of the model
    whose weights they are. Errors: CheckpointError for what is not an array of floats."""

    def __init__(self, arrays: Mapping[str, Any], config: ModelConfig):
        self.bytes_read = 0
        self.tokenizer = None
        self.config = config
        names = family_names(arrays, config)
        self._arrays = {names[name]: array for name, array in arrays.items() if name in names}
        for name, array in arrays.items():
            dtype = getattr(array, "dtype", None)
            if dtype is None or np.dtype(dtype) not in _NAMES:
                kind = type(array).__name__ if dtype is None else dtype
                raise CheckpointError(f"{name!r:.200} is no array of floats but {kind}")

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name -> (shape, name of the dtype)."""
        arrays = self._arrays.items()
        return {name: (tuple(a.shape), _NAMES[np.dtype(a.dtype)]) for name, a in arrays}

    def read(self, name: str, rows: slice = _ALL, columns: slice | None = None) -> np.ndarray:
        """Reads a slice of an array: a view that cannot be written to, where it lies in host
        memory."""
        index = (rows,) if columns is None else (rows, columns)
        values = np.asarray(self._arrays[name])[index]
        values.flags.writeable = False
        return values

    def blocks(
        self, name: str, rows: slice, columns: slice | None = None, expert: int | None = None
    ) -> None:
        """Returns None: nothing is quantised."""

    def release(self) -> None:
        """Does nothing: there are no files."""
