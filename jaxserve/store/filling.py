"""A block of host memory while it is put into its slot, part by part.

A part is what a group of layers computed. Parts come in the order of the layers and can be read as
soon as they are there. What is read of a block that is not whole is not checked: who reads it
compares the whole block's checksum in the end.
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass
class Filling:
    """A block on its way to its slot. view: the slot's bytes, uint8. parts: how many are there."""

    key: bytes
    slot: int
    view: np.ndarray
    parts: int = 0
