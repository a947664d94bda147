"""On which lane the next block of a sequence goes: one function per placement.

A placement gets what it may look at and names a lane that has a page available (the caller sees to
it that there is one). Attention gives the same answer wherever a block lies, so a placement decides
speed and room, never tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple


class PlacementView(NamedTuple):
    """What a placement sees: `available` and `held` count pages per lane, `block` is the index of
    the block to place."""

    available: list[int]
    held: list[int]  # by this sequence
    lane: int  # of the block before, or the home lane
    limit: int  # blocks of a sequence on a lane before the next lane joins
    block: int
    slot: int
    home: int
    blocks: int  # of the whole prompt
    # lanes over which it shall be dealt out evenly; none: one lane may hold it
    group: tuple[int, ...]
    stripe: int  # blocks that a prompt which is dealt out has in a row on a lane


def grow(view: PlacementView) -> int:
    """Stay on the lane until its share is full, then go to the lane with the most room (Medha's
    dynamic growth, M5).

    Once every lane with room holds its share, blocks go on to where most room is: the limit says
    when lanes join, not what fits.
    """
    if view.available[view.lane] and view.held[view.lane] < view.limit:
        return view.lane
    lanes = [lane for lane, pages in enumerate(view.available) if pages]
    return max(lanes, key=lambda lane: (view.held[lane] < view.limit, view.available[lane], -lane))


def round_robin(view: PlacementView) -> int:
    """Block by block over the lanes, skipping full ones."""
    lanes = len(view.available)
    return next(
        lane % lanes
        for lane in range(view.block, view.block + lanes)
        if view.available[lane % lanes]
    )


def striped(view: PlacementView) -> int:
    """Prompts that are dealt out: stripe by stripe over the lanes of the group. Others as
    `grow`."""
    return _dealt(view, view.group)


def zigzag(view: PlacementView) -> int:
    """As `striped`, but there and back again, so that lanes have as much of what comes early as of
    what comes late and sees all before it: causal attention is even too (context parallel paper,
    3.5.1)."""
    return _dealt(view, view.group + view.group[::-1])


def _dealt(view: PlacementView, lanes: tuple[int, ...]) -> int:
    """The prompt's last block is at home, where the token after it is sampled."""
    if not lanes:
        return grow(view)
    lane = (
        view.home
        if view.block == view.blocks - 1
        else lanes[view.block // view.stripe % len(lanes)]
    )
    return lane if view.available[lane] else grow(view)


def scatter(view: PlacementView) -> int:
    """Anywhere, but the same anywhere in every run."""
    lanes = [lane for lane, pages in enumerate(view.available) if pages]
    return random.Random(view.slot * 1_000_003 + view.block).choice(lanes)


Placement = Callable[[PlacementView], int]
PLACEMENTS: dict[str, Placement] = {
    "grow": grow,
    "striped": striped,
    "zigzag": zigzag,
    "round_robin": round_robin,
    "random": scatter,
}
