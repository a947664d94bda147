"""Weights made up for benchmarks and tests."""

from __future__ import annotations

import numpy as np

from jaxserve.checkpoint.zoo import ModelConfig
from jaxserve.weights.names import tensors_of

_ALL = slice(None)


class RandomWeights:
    """Weights of a named shape for benchmarks and tests: normal, deviation 0.02, norms one. Any
    slice has the same values however the model is split, for a tensor is read from one tape of
    numbers, at a place that its name decides; that costs hardly more than a copy."""

    _TAPE = 4_194_301  # prime, so that rows of no width repeat on it

    def __init__(self, config: ModelConfig, seed: int = 0):
        self.bytes_read = 0
        self.tokenizer = None
        self.config = config
        self._seed = seed
        self._shapes = tensors_of(config)
        self._tape = np.random.Generator(np.random.Philox(seed)).standard_normal(
            self._TAPE, np.float32
        ) * np.float32(0.02)

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return {name: (shape, "F32") for name, shape in self._shapes.items()}

    def read(self, name: str, rows: slice = _ALL, columns: slice | None = None) -> np.ndarray:
        shape = self._shapes[name]
        first, last, _ = rows.indices(shape[0])
        if name.endswith("norm.weight"):
            return np.ones(last - first, np.float32)
        if len(shape) == 1:
            return self._span(name, first, last)
        width = shape[1]
        left, right, _ = (columns or _ALL).indices(width)
        if (left, right) == (0, width):
            return self._span(name, first * width, last * width).reshape(-1, width)
        found = np.empty((last - first, right - left), np.float32)
        for i, row in enumerate(range(first, last)):
            found[i] = self._span(name, row * width + left, row * width + right)
        return found

    def _span(self, name: str, start: int, stop: int) -> np.ndarray:
        """Numbers start to stop of a tensor's own endless tape."""
        digest = int.from_bytes(name.encode(), "little") * 2_654_435_761
        at = (digest + start) % self._TAPE
        return np.resize(
            np.roll(self._tape, -at) if stop - start > self._TAPE - at else self._tape[at:],
            stop - start,
        )
