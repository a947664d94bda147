"""The tokens of a step on a device, as the layers know them besides their hidden states."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Tokens(NamedTuple):
    """Tokens of a step. positions [T] int32: in their sequences; -1: padding. adapters [T] int32:
    the place on the devices of the adapter that each is computed with, -1: none; None where no
    step has adapters."""

    positions: jax.Array
    adapters: jax.Array | None = None
