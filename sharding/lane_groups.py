"""Collectives inside aligned groups of lanes: all groups at once, none with lanes of another.

Everything here runs inside shard_map, on one lane and one rank; each rank has its own groups.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax

from jaxserve.sharding.mesh import KVP


@dataclasses.dataclass(frozen=True)
class LaneGroups:
    """Groups of `size` lanes each: lanes 0 to size - 1, and so on. `size` must divide the number of
    lanes."""

    size: int

    def index(self) -> jax.Array:
        """Number of this lane in its group."""
        return lax.axis_index(KVP) % self.size

    def gather(self, x: jax.Array) -> jax.Array:
        """Gathers x [...] of each lane of the group: [size, ...], on all of them."""
        return lax.all_gather(x, KVP, axis_index_groups=self._members())

    def gather_rows(self, x: jax.Array) -> jax.Array:
        """Gathers x [R, ...] of each lane of the group: [size * R, ...], on all of them."""
        return lax.all_gather(x, KVP, tiled=True, axis_index_groups=self._members())

    def sum(self, x: jax.Array) -> jax.Array:
        """Adds up x of each lane of the group, on all of them."""
        return lax.psum(x, KVP, axis_index_groups=self._members())

    def all_to_all(self, x: jax.Array) -> Any:
        """Sends x[i], of x [size, ...], to lane i of the group; returns what each sent to this
        one."""
        return lax.all_to_all(x, KVP, 0, 0, axis_index_groups=self._members())

    def send_to_next(self, x: jax.Array) -> jax.Array:
        """Sends x to the next lane of the group's ring; returns what the previous one sent."""
        lanes = range(lax.axis_size(KVP))
        after = lambda lane: lane - lane % self.size + (lane + 1) % self.size
        return lax.ppermute(x, KVP, [(lane, after(lane)) for lane in lanes])

    def most(self, x: jax.Array) -> jax.Array:
        """The greatest x of all lanes, those of other groups too: for loops with collectives, which
        all lanes of the mesh must run equally often."""
        if self.size == lax.axis_size(KVP):
            return x
        return lax.pmax(x, KVP)

    def _members(self) -> list[list[int]] | None:
        """The lanes of each group; None where all lanes are one."""
        lanes = lax.axis_size(KVP)
        if self.size == lanes:
            return None
        return [list(range(first, first + self.size)) for first in range(0, lanes, self.size)]
