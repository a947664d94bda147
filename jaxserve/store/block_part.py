"""Parts of a block: some of the model's layers and of its kv heads, as one process of a replica has
them, and the bytes that they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class BlockPart:
    """A part of each block: these of the model's layers, and of its own kv heads. With page groups
    (`checkpoint.page_groups`) a pool of pages, which a layer of each group has, counts as a
    layer."""

    layers: range
    heads: range

    def __str__(self) -> str:
        layers, heads = (f"{each.start}-{each.stop - 1}" for each in (self.layers, self.heads))
        return f"layers {layers}, heads {heads}"

    def __len__(self) -> int:
        """Pairs of a layer and a head; 0 for an empty part."""
        return len(self.layers) * len(self.heads)

    def common(self, other: BlockPart) -> BlockPart:
        """Returns what both have, which may be empty."""
        return BlockPart(_common(self.layers, other.layers), _common(self.heads, other.heads))

    def within(self, other: BlockPart) -> bool:
        """Returns whether the other part has all of this one."""
        return self.common(other) == self

    def slices(self, whole: BlockPart) -> tuple[slice, slice]:
        """Returns where this part is in arrays [layers, heads, ...] of one that has all of it."""
        layers, heads = self.layers, self.heads
        first_layer, first_head = whole.layers.start, whole.heads.start
        return (
            slice(layers.start - first_layer, layers.stop - first_layer),
            slice(heads.start - first_head, heads.stop - first_head),
        )


def _common(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


@dataclass(frozen=True)
class PartBytes:
    """The bytes of a part of a block: the numbers of each layer and head, [layers, heads,
    vector_bytes], then the scales of quantised ones, [layers, heads, scale_bytes]."""

    part: BlockPart
    vector_bytes: int
    scale_bytes: int = 0

    @property
    def bytes(self) -> int:
        return len(self.part) * (self.vector_bytes + self.scale_bytes)

    def of(self, part: BlockPart) -> PartBytes:
        """Returns the bytes of another part of the same blocks."""
        return PartBytes(part, self.vector_bytes, self.scale_bytes)

    def of_layers(self, layers: range) -> list[slice]:
        """Returns where a block has the bytes of some of its layers: numbers, and scales."""
        first = layers.start - self.part.layers.start
        pieces = []
        begin = 0
        for each in (self.vector_bytes, self.scale_bytes):
            size = len(self.part.heads) * each
            if size:
                start = begin + first * size
                pieces.append(slice(start, start + len(layers) * size))
            begin += len(self.part.layers) * size
        return pieces

    def take(self, block: np.ndarray, part: BlockPart, into: np.ndarray) -> None:
        """Copies a part of a block [bytes] uint8 to `into` [bytes of that part]."""
        for whole, piece in self._pairs(block, part, into):
            piece[:] = whole

    def put(self, block: np.ndarray, part: BlockPart, piece: np.ndarray) -> None:
        """Copies a part [its bytes] to its place in a block [bytes] uint8."""
        for whole, new in self._pairs(block, part, piece):
            whole[:] = new

    def _pairs(
        self, block: np.ndarray, part: BlockPart, piece: np.ndarray
    ) -> Iterable[tuple[np.ndarray, np.ndarray]]:
        """Pairs the part's place in the block with the piece: of numbers, and of scales."""
        place = part.slices(self.part)
        return zip([each[place] for each in self._views(block)], self.of(part)._views(piece))

    def _views(self, block: np.ndarray) -> list[np.ndarray]:
        extent = len(self.part.layers), len(self.part.heads)
        numbers = len(self.part) * self.vector_bytes
        return [
            block[:numbers].reshape(*extent, self.vector_bytes),
            block[numbers:].reshape(*extent, self.scale_bytes),
        ]


class PartPlace(NamedTuple):
    """A process of a replica that has this part of each block, and the address, HOST:PORT, at which
    others ask it."""

    part: BlockPart
    address: str


def cover(wanted: BlockPart, places: Iterable[PartPlace]) -> list[PartPlace]:
    """Divides a part among the places that have some of it, the first ones before others: what each
    is to be asked for. Errors: ValueError where they do not have all of it, or what they have
    overlaps so that it cannot be divided."""
    missing = np.ones((len(wanted.layers), len(wanted.heads)), bool)
    chosen = []
    for place in places:
        common = wanted.common(place.part)
        new = missing[common.slices(wanted)]
        if not new.any():
            continue
        layers, heads = (np.nonzero(new.any(axis))[0] for axis in (1, 0))
        asked = BlockPart(_within(common.layers, layers), _within(common.heads, heads))
        missing[asked.slices(wanted)] = False
        chosen.append(PartPlace(asked, place.address))
    if missing.any():
        raise ValueError(f"no process has {missing.sum()} of {missing.size} layers of heads")
    if sum(len(place.part) for place in chosen) > len(wanted):
        raise ValueError("its processes have parts that overlap")
    return chosen


def _within(numbers: range, found: np.ndarray) -> range:
    """The numbers from the first to the last that were found, by their positions."""
    return numbers[int(found[0]) : int(found[-1]) + 1]
