"""Random weights, as a checkpoint, for benchmarks and tests."""

from __future__ import annotations

import numpy as np

from jaxserve.checkpoint.model import ModelConfig
from jaxserve.weights.names import tensors_of

_ALL = slice(None)


class RandomWeights:
    """A checkpoint of random weights: normal with standard deviation 0.02; norms are one.

    Any slice has the same values however the model is split: tensors are read from one long array
    of random numbers, each beginning where its name says, which costs little more than a copy.
    """

    _LENGTH = 4_194_301  # random numbers; prime, so that rows of no width repeat

    def __init__(self, config: ModelConfig, seed: int = 0):
        self.bytes_read = 0
        self.tokenizer = None
        self.config = config
        self._seed = seed
        self._shapes = tensors_of(config)
        generator = np.random.Generator(np.random.Philox(seed))
        self._numbers = generator.standard_normal(self._LENGTH, np.float32) * np.float32(0.02)

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name -> (shape, dtype)."""
        return {name: (shape, "F32") for name, shape in self._shapes.items()}

    def read(self, name: str, rows: slice = _ALL, columns: slice | None = None) -> np.ndarray:
        """Reads a slice of a tensor, f32."""
        shape = self._shapes[name]
        if len(shape) == 3:
            some = range(*rows.indices(shape[0]))
            return np.stack([self._matrix(f"{name}.{i}", shape[1:], columns or _ALL) for i in some])
        return self._matrix(name, shape, rows, columns)

    def blocks(
        self, name: str, rows: slice, columns: slice | None = None, expert: int | None = None
    ) -> None:
        """Returns None: nothing is quantised."""

    def release(self) -> None:
        """Does nothing: there are no files."""

    def _matrix(
        self, name: str, shape: tuple[int, ...], rows: slice, columns: slice | None = None
    ) -> np.ndarray:
        """Reads a slice of a matrix or a vector."""
        first, last, _ = rows.indices(shape[0])
        if name.endswith("norm.weight"):
            return np.ones(last - first, np.float32)
        if len(shape) == 1:
            return self._span(name, first, last)
        width = shape[1]
        begin, end, _ = (columns or _ALL).indices(width)
        if (begin, end) == (0, width):
            return self._span(name, first * width, last * width).reshape(-1, width)
        values = np.empty((last - first, end - begin), np.float32)
        for i, row in enumerate(range(first, last)):
            values[i] = self._span(name, row * width + begin, row * width + end)
        return values

    def _span(self, name: str, start: int, stop: int) -> np.ndarray:
        """Elements start to stop of a flattened tensor."""
        digest = int.from_bytes(name.encode(), "little") * 2_654_435_761
        offset = (digest + start) % self._LENGTH
        wraps = stop - start > self._LENGTH - offset
        numbers = np.roll(self._numbers, -offset) if wraps else self._numbers[offset:]
        return np.resize(numbers, stop - start)
